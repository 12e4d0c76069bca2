"""The embedded engine passes the engine contract, on one rank and on two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from engine_adapter.models import SAFE_MARGIN, encode, make_model, reference_tokens
from engine_adapter.testing.contract import EngineContract

pytestmark = pytest.mark.engine


class TestTransformers(EngineContract):
    factory = "engine_adapter.transformers.engine:build"
    prompt = encode("The quick brown fox jumps over the lazy dog.")

    @classmethod
    def checkpoint(cls, folder: Path, seed: int) -> Path:
        return make_model(folder, seed=seed)

    @classmethod
    def reference(cls, folder: Path, prompt: Sequence[int], tokens: int) -> tuple[int, ...]:
        found = reference_tokens(folder, prompt, tokens)
        assert min(found.margins) >= SAFE_MARGIN
        return found.tokens


class TestTransformersOverTwo(TestTransformers):
    size = 2
