"""The embedded engine, which on its way up measures the best bare exchange of its own parameters in its own process."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from engine_adapter.base import EngineSpec
from engine_adapter.transformers.engine import TransformersEngine
from engine_adapter.transformers.engine import build as build_embedded

CHUNKS = (256 << 10, 512 << 10, 1 << 20)
ROUNDS = 6


def build(spec: EngineSpec) -> TransformersEngine:
    """Writes `<bare_report>.<rank>.json`: chunk bytes -> median seconds of one whole exchange, all ranks at once."""
    options = dict(spec.options)
    report = str(options.pop("bare_report"))
    engine = build_embedded(replace(spec, options=options))
    live = [parameter.local.detach() for parameter in engine.parameters().values()]
    spare = [tensor.clone() for tensor in live]
    bounce = torch.empty(max(CHUNKS), dtype=torch.uint8).fill_(0)
    found: dict[str, float] = {}
    for chunk in CHUNKS:
        times = []
        for _ in range(ROUNDS):
            _together(spec.size)
            begun = time.perf_counter()
            exchange_plainly(live, spare, bounce[:chunk])
            times.append(time.perf_counter() - begun)
        found[str(chunk)] = median(times)
    Path(f"{report}.{spec.rank}.json").write_text(json.dumps(found))
    return engine


def exchange_plainly(live: list[torch.Tensor], spare: list[torch.Tensor], bounce: torch.Tensor) -> None:
    """Nothing but copies: no cursor, no undo. An even number of rounds leaves every byte where it was."""
    for left, right in zip(live, spare, strict=True):
        a, b = (side.reshape(-1).view(torch.uint8) for side in (left, right))
        for start in range(0, a.numel(), bounce.numel()):
            x, y = a[start : start + bounce.numel()], b[start : start + bounce.numel()]
            held = bounce[: x.numel()]
            held.copy_(x)
            x.copy_(y)
            y.copy_(held)


def _together(size: int) -> None:
    if size > 1:
        torch.distributed.barrier()
