"""A factory for one test: the embedded engine, whose forward raises from the third step on."""

from __future__ import annotations

from typing import Any

from engine_adapter.base import EngineSpec
from engine_adapter.transformers import engine as embedded

GOOD_STEPS = 2


def build(spec: EngineSpec) -> embedded.TransformersEngine:
    engine = embedded.build(spec)
    norm = engine._model.model.norm
    forward, calls = norm.forward, iter(range(1_000_000))

    def failing(*arguments: Any, **named: Any) -> Any:
        if next(calls) >= GOOD_STEPS:
            raise RuntimeError("broken on purpose")
        return forward(*arguments, **named)

    norm.forward = failing
    return engine
