"""Ranks of a trainer that do the same together: what one of them learned reaches all, as JSON in tensors.

No collective waits long for the sender: while it waits for the fleet it says so again and again (the group's own
timeout would otherwise end a trainer whose fleet is slow). Nothing is pickled (I10).

A rank that is gone, or does not come in time, is `peer_lost` on the others.

The JSON travels over a group of our own beside the trainer's, of the same ranks in the same order, on the CPU. It is
not in torch's registry, where the name of a new group depends on how many groups a rank is in. A collective of the
weights that never ends does not block it, and what fails in one of the two does not spoil the other.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from updater.core.errors import Aborted, Failure, LiveweightsError
from updater.protocol.problems import error_of, problem_body

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: What one step of the sender takes at most before the others hear that it goes on, in seconds, where it can say so.
BEAT_S = 20.0
Message = Mapping[str, Any]
_c10d: Any = dist  # torch's own words for groups have no types
#: How much longer than a collective of the trainer's own group a wait here lasts: a rank that has failed stays until
#: the others are back from the collective that they are in.
MARGIN = timedelta(minutes=1)
USUAL = timedelta(minutes=30)


class RankAgreement:
    """The ranks of `group`, all of which make the same calls in the same order; None: this process alone.

    Made by all of them at the same time. `purpose`: as for `control_group`.
    """

    def __init__(self, group: ProcessGroup | None, purpose: str = "push") -> None:
        self._control = None if group is None else control_group(group, purpose)

    def lead(self, step: Callable[[], Message | None] | None) -> Message:
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
                value: Message = told["value"]
                return value

    def agree(self, error: LiveweightsError | None, *, follows: bool = False) -> LiveweightsError | None:
        """The error of the first rank that has one, on every rank, with that rank as its place.

        The rank itself gets its own, with what it was caused by. `follows`: it may only be what another rank's error
        led to here, and counts where there is no other.
        """
        mine = None if error is None else self.placed(error)
        spoken: Message = {} if mine is None else {"error": _described(mine), "follows": follows}
        told = [(rank, each) for rank, each in enumerate(self.exchange(spoken)) if each]
        if not told:
            return None
        rank, first = min(told, key=lambda item: (item[1]["follows"], item[0]))
        own = self._control is None or rank == self._control.rank
        return mine if own else _error_of(first["error"])

    def span(self, value: int) -> tuple[int, int]:
        """Lowest and highest of what the ranks say: one small collective, for what is asked often."""
        if self._control is None:
            return value, value
        lowest, highest = self._control.highest([-value, value])
        return -lowest, highest

    def exchange(self, spoken: Message) -> list[Message]:
        """What every rank says, in the order of the group."""
        if self._control is None:
            return [spoken]
        return [json.loads(text) for text in self._control.gathered(json.dumps(spoken).encode())]

    def _spoken(self, step: Callable[[], Message | None] | None) -> tuple[Message, BaseException | None]:
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
        if self._control is None:
            return error
        failures = [each if each.replica else each.at(rank=self._control.rank) for each in error.failures]
        if failures == list(error.failures):
            return error
        placed = type(error)(*failures, live_version=error.live_version, receipt=error.receipt)
        placed.__cause__ = error.__cause__
        return placed


def _described(error: LiveweightsError) -> Message:
    return problem_body(error, receipt=error.receipt)


def _error_of(document: Mapping[str, Any]) -> LiveweightsError:
    status = document.get("status")
    return error_of(status if isinstance(status, int) else 500, document)


class ControlGroup:
    """Made by every rank of `group` at the same time; `control_group` keeps one for the life of the process."""

    def __init__(self, group: ProcessGroup, purpose: str) -> None:
        self.rank, self.size = group.rank(), group.size()
        store = _c10d.PrefixStore(f"liveweights/{purpose}", group.get_group_store())
        with _all_there():
            self._group = _c10d.ProcessGroupGloo(store, self.rank, self.size, timeout_of(group) + MARGIN)

    def highest(self, values: Sequence[int]) -> list[int]:
        """Of each value the highest that a rank says. One collective."""
        told = torch.tensor(values, dtype=torch.int64)
        options = _c10d.AllreduceOptions()
        options.reduceOp = _c10d.ReduceOp.MAX
        self._wait(lambda group: group.allreduce([told], options))
        return [int(value) for value in told]

    def gathered(self, data: bytes) -> list[bytes]:
        """What every rank says, in the order of ranks: lengths first, then everything padded to the longest."""
        mine = torch.tensor([len(data)], dtype=torch.int64)
        lengths = [torch.zeros_like(mine) for _ in range(self.size)]
        self._wait(lambda group: group.allgather([lengths], [mine]))
        counts = [int(length) for length in lengths]
        padded = torch.zeros(max(counts), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.zeros_like(padded) for _ in range(self.size)]
        self._wait(lambda group: group.allgather([parts], [padded]))
        return [part[:count].numpy().tobytes() for part, count in zip(parts, counts, strict=True)]

    def _wait(self, begin: Callable[[Any], Any]) -> None:
        """What broke stays broken, and is let go of at once: that closes its connections, by which the others notice.
        A rank whose own neighbours are alive would wait on.
        """
        try:
            with _all_there():
                if self._group is None:
                    raise RuntimeError("it broke before")
                begin(self._group).wait()
        except BaseException:
            self._group = None
            raise

    def close(self) -> None:
        """torch joins the group's threads."""
        self._group = None


_CONTROL_GROUPS: dict[tuple[ProcessGroup, str], ControlGroup] = {}


def _close_all() -> None:
    """At exit: a thread of gloo that asks for the interpreter while that ends brings the process down (pytorch issue
    190489), and `destroy_process_group` does not know of ours.
    """
    for group in _CONTROL_GROUPS.values():
        group.close()


atexit.register(_close_all)
os.register_at_fork(after_in_child=lambda: atexit.unregister(_close_all))  # a child has none of these threads


def control_group(group: ProcessGroup, purpose: str) -> ControlGroup:
    """Collective when it is first asked for. `purpose`: another one has connections of its own, for another thread."""
    key = (group, purpose)
    if key not in _CONTROL_GROUPS:
        _CONTROL_GROUPS[key] = ControlGroup(group, purpose)
    return _CONTROL_GROUPS[key]


def timeout_of(group: ProcessGroup) -> timedelta:
    """Of the group's collectives, the longest of its backends; where torch does not say, its usual one."""
    found = []
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        found.append(getattr(options, "_timeout", USUAL))
    return max(found, default=USUAL)


@contextmanager
def _all_there() -> Iterator[None]:
    """torch says by a RuntimeError that a rank is gone or too late, and not which."""
    try:
        yield
    except RuntimeError as error:
        text = "a rank of the trainer is gone, or did not come within the time-out of its group"
        raise Aborted(Failure("peer_lost", text)) from error.with_traceback(None)  # its frames hold the group
