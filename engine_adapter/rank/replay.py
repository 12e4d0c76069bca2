"""Staging: a plan's rows replayed into the spare, and the look at what arrived. Never touches a live tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from engine_adapter.placement.regions import target_region
from engine_adapter.placement.rows import CarryRow, CopyRow, FillRow
from engine_adapter.rank.plan import Plan
from transports.base import Cancelled, Read
from transports.scans import nonfinite
from updater.core.errors import Aborted, Failure


@dataclass(frozen=True, slots=True)
class Stop:
    """Whether long work should end: its update was cancelled, or its time is over (I9)."""

    cancelled: Callable[[], bool]
    deadline: float  # of `clock`
    clock: Callable[[], float]

    def __call__(self) -> bool:
        return self.cancelled() or self.clock() >= self.deadline

    def check(self) -> None:
        """Raises `Aborted`: `client_abort` when cancelled, `phase_timeout` when late."""
        if self():
            raise self.error()

    def error(self) -> Aborted:
        if self.cancelled():
            return Aborted(Failure("client_abort", "the update was dropped while this rank was at work"))
        return Aborted(Failure("phase_timeout", "the rank's time for this step is over"))


def replay(
    plan: Plan,
    live: Mapping[str, torch.Tensor],
    spare: Mapping[str, torch.Tensor],
    stop: Stop,
    progress: Callable[[int], None],
) -> int:
    """Fill the spare of a checked plan; bytes asked for. Raises `LiveweightsError`; the spare is then a mix.

    `progress` hears increments of bytes.

    Fills and carried regions go first: no copy lies under one (see `check_destination`), so the order of the copies
    is the reader's to choose.
    """
    for row in plan.placement.rows:
        stop.check()
        if isinstance(row, FillRow):
            spare[row.target][row.target_box.slices()].fill_(row.value)
        elif isinstance(row, CarryRow):
            region = row.target_box.slices()
            spare[row.target][region].copy_(live[row.target][region])
    copies = [row for row in plan.placement.rows if isinstance(row, CopyRow) and row.source_box.numel]
    reads = [Read(row.source, row.source_box, target_region(spare[row.target], row), row.permute) for row in copies]
    try:
        report = plan.source.read(reads, progress=progress, should_stop=stop)
    except Cancelled:
        raise stop.error() from None
    plan.source.recheck()
    if not plan.request.allow_nonfinite:
        _refuse_nonfinite(copies, spare, stop)
    return report.bytes_asked


def _refuse_nonfinite(rows: list[CopyRow], spare: Mapping[str, torch.Tensor], stop: Stop) -> None:
    """A whole parameter is looked at first; only where that says no, the rows are, to name the tensor."""
    suspect: set[str] = set()
    for target in dict.fromkeys(row.target for row in rows):
        stop.check()
        if _can_be_nonfinite(spare[target]) and nonfinite(spare[target]):
            suspect.add(target)
    bad = [row.source for row in rows if row.target in suspect and nonfinite(target_region(spare[row.target], row))]
    if bad:
        why = "NaN or an infinity arrived; the policy does not allow it"
        raise Aborted(*(Failure("tensor_nonfinite", why, tensor=name) for name in dict.fromkeys(bad)))


def _can_be_nonfinite(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
