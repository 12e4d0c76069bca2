"""Which source tensors left no normal number in this rank's part of the spare."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine_adapter.placement.regions import target_region
from engine_adapter.placement.rows import CopyRow
from engine_adapter.placement.values import BlankTensor
from engine_adapter.rank.plan import Plan
from engine_adapter.rank.replay import Stop
from transports.scans import has_normal, judged


def blank_sources(
    plan: Plan, live: Mapping[str, torch.Tensor], spare: Mapping[str, torch.Tensor], stop: Stop
) -> tuple[BlankTensor, ...]:
    """Sorted by name. A sound tensor is left at its first few elements, so this costs next to nothing.

    Nothing is judged where the content is known already.
    """
    if plan.request.known:
        return ()
    rows: dict[str, list[CopyRow]] = {}
    for row in plan.placement.rows:
        if isinstance(row, CopyRow) and row.source_box.numel:
            rows.setdefault(row.source, []).append(row)
    found = []
    for name, mine in sorted(rows.items()):
        spec = plan.specs[name]
        if not judged(spec):
            continue
        stop.check()
        if not any(has_normal(target_region(spare[row.target], row), spec.dtype) for row in mine):
            normal = any(has_normal(target_region(live[row.target], row), spec.dtype) for row in mine)
            found.append(BlankTensor(name, normal))
    return tuple(found)
