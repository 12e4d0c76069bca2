"""One rank of several fails, and the first error is not lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_adapter.rank.host import failures_of
from engine_adapter.rank.messages import RankStatus
from engine_adapter.testing.fronts import PROMPT, HandCoordinator, toy_stage
from transports.base import Cancelled
from updater.core.errors import Aborted, Failure, LiveweightsError
from updater.core.participant import FrontState, SpareState


@pytest.mark.case("B096")
@pytest.mark.engine
def test_the_error_of_the_one_rank_that_fails_in_staging_is_the_answer(tmp_path: Path) -> None:
    """Of TP=4 only rank 2 holds the row that cannot be accepted: it raises while the others finish."""
    with toy_stage(tmp_path, tp=4) as stage:
        bad = tmp_path / "bad"
        shutil.copytree(stage.paths[1], bad)
        tensors = load_file(bad / "model.safetensors")
        rows = tensors["model.layers.0.self_attn.q_proj.weight"]
        rows[2 * rows.shape[0] // 4, 3] = torch.nan  # the first row of rank 2's only head
        save_file(tensors, bad / "model.safetensors")

        async def scene(c: HandCoordinator) -> None:
            before, bytes_before = await c.status(), await stage.digests()
            serial, _, version = stage.next()
            await c.plan(serial, bad, version)
            with pytest.raises(LiveweightsError) as caught:
                await c.stage(serial)
            assert [(f.code, f.rank, f.tensor) for f in caught.value.failures] == [
                ("tensor_nonfinite", 2, "model.layers.0.self_attn.q_proj.weight")
            ]
            await c.discard(serial)
            status = await c.status()
            assert (status.state, status.live_version) == (FrontState.OPEN, before.live_version)
            assert status.spare.state is SpareState.EMPTY
            ranks = await stage.replica.pool.call("status", RankStatus(), deadline_s=60.0)
            assert [rank.spare_state for rank in ranks] == ["empty"] * 4
            assert await stage.digests() == bytes_before
            answer = await c.complete(PROMPT)
            assert answer["choices"][0]["token_ids"] == stage.expected(stage.live)
            # All ranks are free: a good update goes through.
            serial, path, version = stage.next()
            await c.update(serial, path, version)
            stage.installed()
            assert (await c.complete(PROMPT))["choices"][0]["token_ids"] == stage.expected(stage.live)

        stage.play(scene)


@pytest.mark.case("B096")
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError("no room"), "no_space"),
        (TimeoutError("late"), "phase_timeout"),
        (Cancelled(), "client_abort"),
        (RuntimeError("whatever"), "rank_failed"),
        (Aborted(Failure("tensor_digest", "differs")), "tensor_digest"),
    ],
)
def test_whatever_a_rank_raises_becomes_a_code(error: Exception, code: str) -> None:
    assert [failure.code for failure in failures_of(error)] == [code]
