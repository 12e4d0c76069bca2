"""The toy engine passes the engine contract in every fixture and at TP 1, 2 and 4, in real processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from engine_adapter.testing import ToyOptions, expected_digests, make_toy_checkpoint, reference_generate
from engine_adapter.testing.contract import EngineContract, at_rest
from engine_adapter.testing.harness import RankHarness

pytestmark = pytest.mark.engine


@cache
def reference(folder: Path, prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    torch.set_num_threads(1)
    return reference_generate(folder, prompt, tokens)


class ToyContract(EngineContract):
    factory = "engine_adapter.testing:build_toy"
    fixture: ClassVar[str] = "M0"
    changes: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def checkpoint(cls, folder: Path, seed: int) -> Path:
        return make_toy_checkpoint(folder, cls.fixture, seed, **cls.changes)

    @classmethod
    def reference(cls, folder: Path, prompt: Sequence[int], tokens: int) -> tuple[int, ...]:
        return reference(folder, tuple(prompt), tokens)

    @classmethod
    def expected(cls, folder: Path, rank: int) -> dict[str, str]:
        return expected_digests(folder, rank, cls.size, ToyOptions.parse(dict(cls.options)))


class TestDense(ToyContract):
    options: ClassVar[Mapping[str, str | int | float | bool]] = {"head32": True}


class TestDenseOverTwo(ToyContract):
    size = 2
    options: ClassVar[Mapping[str, str | int | float | bool]] = {"interleaved": True, "kernel": "packed"}


class TestDenseOverFour(ToyContract):
    """More ranks than key/value heads."""

    size = 4
    options: ClassVar[Mapping[str, str | int | float | bool]] = {"kernel": "swap"}


class TestTiedOverTwo(ToyContract):
    fixture = "M1"
    size = 2


class TestExpertsOverFour(ToyContract):
    """Every expert cut over all ranks."""

    fixture = "M2"
    size = 4


class TestExpertParallelOverTwo(ToyContract):
    """Whole experts per rank."""

    fixture = "M2"
    size = 2
    options: ClassVar[Mapping[str, str | int | float | bool]] = {"expert_parallel": True, "kernel": "swap"}


class TestFusedExperts(ToyContract):
    fixture = "M2"
    changes: ClassVar[Mapping[str, Any]] = {"fused_experts": True}


class TestWrappedOverTwo(ToyContract):
    fixture = "M3"
    size = 2


class TestFloat8OverTwo(ToyContract):
    fixture = "M4"
    size = 2


def test_no_update_after_the_second_takes_memory_that_a_shard_would_show_in(tmp_path: Path) -> None:
    sizes = {"vocab_size": 16384, "hidden_size": 512, "num_hidden_layers": 1}
    seven, eight = (make_toy_checkpoint(tmp_path / str(seed), seed=seed, **sizes) for seed in (7, 8))
    with RankHarness(ToyContract.factory, seven, 1) as replica:
        replica.publish(eight, "1")
        replica.publish(seven, "2")
        shard, (before,) = replica.status()[0].spare_bytes, at_rest(replica)
        for version in range(3, 11):
            replica.publish((seven, eight)[version % 2], str(version))
        (after,) = at_rest(replica)
    assert shard > 32 * 2**20
    assert after[2] - before[2] < shard // 2
    assert after[:2] == before[:2]
