"""Ranks of a trainer that do the same together: what one of them learned reaches all, as JSON in tensors.

No collective waits long for the sender: while it waits for the fleet it says so again and again (the group's own
timeout would otherwise end a trainer whose fleet is slow). Nothing is pickled (I10).

A rank that is gone, or does not come in time, is `peer_lost` on the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from trainer_side.side import side_of
from updater.core.errors import Aborted, Failure, LiveweightsError
from updater.problems import error_of, problem_body

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: What one step of the sender takes at most before the others hear that it goes on, in seconds, where it can say so.
BEAT_S = 20.0
Told = Mapping[str, Any]


class Lockstep:
    """The ranks of `group`, all of which make the same calls in the same order; None: this process alone.

    Made by all of them at the same time. `purpose`: as for `side.side_of`.
    """

    def __init__(self, group: ProcessGroup | None, purpose: str = "push") -> None:
        self._side = None if group is None else side_of(group, purpose)

    def lead(self, step: Callable[[], Told | None] | None) -> Told:
        """The sender gives a `step`, the others None. It is repeated until it returns something or raises, and every
        rank then gets the same or raises the same.
        """
        while True:
            spoken, caught = self._spoken(step)
            try:
                told = next((each for each in self.exchange(spoken) if each), {})
            except Aborted as lost:
                raise caught or lost from lost.__cause__
            if caught is not None:
                raise caught
            if "error" in told:
                raise _error_of(told["error"])
            if "value" in told:
                value: Told = told["value"]
                return value

    def agree(self, error: LiveweightsError | None, *, follows: bool = False) -> LiveweightsError | None:
        """The error of the first rank that has one, on every rank, with that rank as its place.

        The rank itself gets its own, with what it was caused by. `follows`: it may only be what another rank's error
        led to here, and counts where there is no other.
        """
        mine = None if error is None else self.placed(error)
        spoken: Told = {} if mine is None else {"error": _described(mine), "follows": follows}
        told = [(rank, each) for rank, each in enumerate(self.exchange(spoken)) if each]
        if not told:
            return None
        rank, first = min(told, key=lambda item: (item[1]["follows"], item[0]))
        own = self._side is None or rank == self._side.rank
        return mine if own else _error_of(first["error"])

    def span(self, value: int) -> tuple[int, int]:
        """Lowest and highest of what the ranks say: one small collective, for what is asked often."""
        if self._side is None:
            return value, value
        lowest, highest = self._side.highest([-value, value])
        return -lowest, highest

    def exchange(self, spoken: Told) -> list[Told]:
        """What every rank says, in the order of the group."""
        if self._side is None:
            return [spoken]
        return [json.loads(text) for text in self._side.gathered(json.dumps(spoken).encode())]

    def _spoken(self, step: Callable[[], Told | None] | None) -> tuple[Told, BaseException | None]:
        if step is None:
            return {}, None
        try:
            value = step()
        except LiveweightsError as error:
            return {"error": _described(error)}, error
        except Exception as error:  # the others would wait for this rank until their group gives up
            failure = Failure("internal", f"{type(error).__name__} on the sending rank")
            return {"error": _described(Aborted(failure))}, error
        return ({"more": True} if value is None else {"value": value}), None

    def placed(self, error: LiveweightsError) -> LiveweightsError:
        """The same error with this rank in every failure that names no other and no replica."""
        if self._side is None:
            return error
        failures = [each if each.replica else each.at(rank=self._side.rank) for each in error.failures]
        if failures == list(error.failures):
            return error
        placed = type(error)(*failures, live_version=error.live_version, receipt=error.receipt)
        placed.__cause__ = error.__cause__
        return placed


def _described(error: LiveweightsError) -> Told:
    return problem_body(error, receipt=error.receipt)


def _error_of(document: Mapping[str, Any]) -> LiveweightsError:
    status = document.get("status")
    return error_of(status if isinstance(status, int) else 500, document)
