"""The replica machine: design section 4's replica table as data, and the interpreter that walks it.

`step(state, event, now)` is pure and total. The front keeps the state in one variable and replaces it whole before it
performs an effect: that is the compare-and-set which keeps a lease timer from reopening a replica whose first rank
has installed. `now` is any monotonic clock in seconds; leases are compared whenever anything is handled, not only
when their timer fires.
"""

from __future__ import annotations

from updater.core.replica_state import ReplicaEvent, ReplicaState, Step, started, status

__all__ = ["ReplicaState", "started", "status", "step"]


def step(state: ReplicaState, event: ReplicaEvent, now: float) -> Step:
    """What follows from `event` at time `now`."""
    raise NotImplementedError
