"""What a trainer may want to hear of its update while it goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from updater.schemas import Receipt, UpdateState

T = TypeVar("T")
_log = logging.getLogger("liveweights.trainer")

#: Phases that only a verified update enters, and those that only one enters for which every rank stands still.
_STAGED = frozenset(
    (
        "ready",
        "pausing",
        "deciding",
        "installing",
        "invalidating",
        "publishing",
        "resuming",
        "restoring",
    )
)
_PAUSED = frozenset(("deciding", "installing", "invalidating", "publishing", "resuming", "restoring"))


@dataclass(frozen=True, slots=True)
class Hooks:
    """Called in a thread of the update's own, in this order, each at most once; what they raise is logged, no more.

    `on_staged`: every rank has voted for what it holds. `on_paused`: every rank stands still, requests are held back.
    Both are told soon after it happened and hold nothing up. Of an update that rolls back they may have been called.
    """

    on_staged: Callable[[UpdateState], None] | None = None
    on_paused: Callable[[UpdateState], None] | None = None
    on_committed: Callable[[Receipt], None] | None = None
    on_rolled_back: Callable[[Receipt], None] | None = None


class HookCaller:
    """Turns the states of one update into calls. Used from one thread."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._called: set[str] = set()

    def saw(self, state: UpdateState) -> None:
        """Phases that passed unseen show in the timings."""
        seen = {state.phase, *state.phases_ms}
        if seen & _STAGED:
            self._call("on_staged", self._hooks.on_staged, state)
        if seen & _PAUSED:
            self._call("on_paused", self._hooks.on_paused, state)
        if state.receipt is not None and state.receipt.outcome == "committed":
            self._call("on_committed", self._hooks.on_committed, state.receipt)
        if state.receipt is not None and state.receipt.outcome == "rolled_back":
            self._call("on_rolled_back", self._hooks.on_rolled_back, state.receipt)

    def _call(self, name: str, hook: Callable[[T], None] | None, told: T) -> None:
        if name in self._called:
            return
        self._called.add(name)
        if hook is None:
            return
        try:
            hook(told)
        except Exception:  # the caller's code: it must not decide over the update
            _log.exception("the hook %s failed", name)
