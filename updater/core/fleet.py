"""The fleet machine: design section 4's fleet table as data, and the interpreter that walks it.

`step(state, event)` is pure and total: equal inputs give equal outputs, and an event that does not apply leaves the
state as it is and asks for nothing (a client's event is then `Denied`).
"""

from __future__ import annotations

from updater.core.effects import Effect
from updater.core.events import Event
from updater.core.state import FleetState, Member, Phase, Published, Standing, Transaction

__all__ = ["FleetState", "Member", "Phase", "Published", "Standing", "Transaction", "step"]


def step(state: FleetState, event: Event) -> tuple[FleetState, tuple[Effect, ...]]:
    """What follows from `event`."""
    raise NotImplementedError
