"""What an update's vote settled, journaled before anything pauses: a receipt that the next coordinator has to write can
then say what was proved and read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from updater.coordinator.sources import UNSEEN, Seen
from updater.core.participant import NOT_COMPARED, Compared, PlanReply
from updater.core.state import Transaction


@dataclass(frozen=True, slots=True)
class Facts:
    """`observed`: content digest per member. `phases_ms`: of the phases up to the vote. `source`: what was read, as it
    looked before it was planned. Empty: nothing was settled.
    """

    proof: str = ""
    bytes_read: int = 0
    tensors: int = 0
    tensors_changed: int = 0
    install: str = ""
    observed: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    phases_ms: dict[str, float] = field(default_factory=dict)
    source: Seen = UNSEEN
    compared: Compared = NOT_COMPARED


def facts_of(
    update: Transaction,
    plans: Mapping[str, PlanReply],
    observed: Mapping[str, str],
    phases_ms: Mapping[str, float],
    source: Seen,
) -> Facts:
    """Of an update that all members have voted for."""
    replies = plans.values()
    return Facts(
        proof=update.proof,
        bytes_read=update.bytes_read,
        tensors=max((plan.tensors for plan in replies), default=0),
        tensors_changed=update.tensors_changed,
        install=next((plan.install.value for plan in replies), ""),
        observed=dict(observed),
        warnings=tuple(dict.fromkeys([*(line for plan in replies for line in plan.warnings), *update.warnings])),
        phases_ms=dict(phases_ms),
        source=source,
        compared=update.compared,
    )
