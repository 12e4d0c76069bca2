"""A toy engine that cannot empty its cache and says so, as the adapter of a real engine would."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine_adapter.base import EngineSpec
from engine_adapter.testing import ToyEngine
from updater.core.policy import CachePolicy, Capabilities


class NoResetEngine(ToyEngine):
    @property
    def capabilities(self) -> Capabilities:
        able = super().capabilities
        cells = tuple(cell for cell in able.cells if cell[1] is not CachePolicy.RESET)
        return replace(able, cells=cells, notes=("cache=reset: this engine has no such operation",))


def build(spec: EngineSpec) -> NoResetEngine:
    torch.set_num_threads(1)
    return NoResetEngine(spec)
