"""What is computed from parameters, kept for both sides: built before the vote, bound while the engine stands.

A packed kernel or a cached head follows the bytes that it was made from. States are kept like the two sides of a spare:
one is bound, the other was built from what is staged or was bound before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from engine_adapter.base import Derived
from updater.core.errors import Aborted, Failure, LiveweightsError, Rejected


class DerivedStates:
    """Two states per derived value. `held`: whether the side that is not bound has any.

    Raises `Rejected` (`placement_refused`) at construction for a value that lacks a hook or is computed from something
    that is no parameter.
    """

    def __init__(self, derived: Sequence[Derived], parameters: Mapping[str, object]) -> None:
        _check(derived, parameters)
        self._derived = tuple(derived)
        self._sides: list[dict[str, object] | None] = [{each.name: each.bound() for each in derived}, None]
        self._side = 0  # which is bound, if the last `install` or `undo` returned
        self._from_side: int | None = None  # of the install that is not settled

    @property
    def feeds(self) -> frozenset[str]:
        """Parameters that something is computed from."""
        return frozenset(name for each in self._derived for name in each.feeds)

    @property
    def held(self) -> bool:
        return self._sides[1 - self._side] is not None

    def build(self, tensors: Mapping[str, torch.Tensor], check: Callable[[], None]) -> None:
        """Compute the other side's states from `tensors`, calling `check` before each. Touches nothing live.

        Raises `Aborted` naming the value that could not be computed; nothing is held then.
        """
        self.drop()
        made: dict[str, object] = {}
        for each in self._derived:
            check()
            try:
                made[each.name] = each.build({name: tensors[name] for name in each.feeds})
            except LiveweightsError:
                raise
            except Exception as error:  # an engine's own code, at the boundary of a rank
                why = f"could not be computed from the new weights: {type(error).__name__}: {error}"
                raise Aborted(Failure("rank_failed", why, tensor=each.name)) from error
        self._sides[1 - self._side] = made

    def drop(self) -> None:
        """Let the other side's states go, unless an unsettled install may still have to bind them again."""
        if self._from_side is None:
            self._sides[1 - self._side] = None

    def install(self) -> None:
        """Bind the other side's states. After an exception: `undo`."""
        if not self.held:
            raise RuntimeError("no states were built for what is staged")
        self._from_side = self._side
        self._bind(1 - self._side)

    def undo(self) -> None:
        """Take `install` back, whole or half done; may be repeated until it returns. Without one: nothing."""
        if self._from_side is not None:
            self._bind(self._from_side)
            self._from_side = None

    def settle(self) -> None:
        """The install stands."""
        self._from_side = None

    def _bind(self, side: int) -> None:
        """Binds every value, also those that already are: a repetition ends in the same place."""
        states = self._sides[side]
        for each in self._derived:
            each.bind((states or {})[each.name])
        self._side = side


def _check(derived: Sequence[Derived], parameters: Mapping[str, object]) -> None:
    stuck = [each.name for each in derived if not (callable(each.build) and callable(each.bind))]
    lost = [(each.name, feed) for each in derived for feed in each.feeds if feed not in parameters]
    failures = [Failure("placement_refused", "derived, and cannot be built again", tensor=name) for name in stuck]
    failures += [Failure("placement_refused", f"derived from {feed}, no parameter", tensor=n) for n, feed in lost]
    if failures:
        raise Rejected(*failures)
