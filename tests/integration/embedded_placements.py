"""One rank of a script: build engines, write down what both ways of placing say. Run by test_embedded_engine."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from engine_adapter.base import EngineSpec
from engine_adapter.transformers.engine import build
from transports.disk.source import DiskSource
from updater.core.errors import LiveweightsError


def answer_for(rank: int, size: int, model: Path) -> dict[str, Any]:
    engine = build(EngineSpec(rank, size, str(model), str(model / "meet"), {"threads": 1}))
    specs = DiskSource.open(str(model), [str(model)]).specs
    answer: dict[str, Any] = {"parameters": {n: [*p.local.shape] for n, p in engine.parameters().items()}}
    for way in (engine.placement, engine.declared):
        try:
            placement = way(specs)
            answer[way.__name__] = [sorted(map(repr, placement.rows)), sorted(placement.redundant)]
        except LiveweightsError as error:
            answer[way.__name__] = error.code
    dist.destroy_process_group()
    return answer


def main(rank: int, size: int, models: list[Path]) -> None:
    print(json.dumps({model.name: answer_for(rank, size, model) for model in models}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), [Path(argument) for argument in sys.argv[3:]])
