"""A compiled vLLM model, which captured the addresses of its parameters: installs go in place, from a host spare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine_adapter.models import encode, reference_tokens
from tests.vllm_server.fleet import Fleet, coordinator, member
from tests.vllm_server.models import PROMPTS, Checkpoints, packs_linears
from tests.vllm_server.server import StartFailed

COUNT = 32


@pytest.mark.case("F00")
@pytest.mark.any_processor
def test_a_compiled_model_is_updated_in_place_or_refused_at_its_start(
    checkpoints: Callable[..., Checkpoints], tmp_path: Path
) -> None:
    """The ranks compare every address before and after: one that moved would take the install back.

    Where vLLM packs bfloat16 linears for the processor, the server says so and ends before it listens.
    """
    models = checkpoints("llama")
    if packs_linears("bfloat16"):
        log = tmp_path / "server.log"
        with pytest.raises(StartFailed) as raised, member(models.first, log, None, eager=False, joined=False):
            raise AssertionError("it listens")
        assert raised.value.code is not None  # by itself
        assert "placement_refused" in raised.value.output
        return
    roots = [models.first.parent]
    with coordinator(tmp_path / "coordinator", roots) as at:
        environment = {"LIVEWEIGHTS_SPARE": "host"}
        log = tmp_path / "server.log"
        with member(models.first, log, at, roots=roots, eager=False, environment=environment) as server:
            fleet = Fleet(at, server, models.first, models.second, models.first)
            assert serves(fleet, models.first)
            problem = fleet.publish(models.second, expect=422, install="flip")
            assert problem["code"] == "mode_unsupported"
            receipt = fleet.publish(models.second)
            assert receipt["install"] == "exchange"
            assert serves(fleet, models.second)
            assert at.rollback("start", receipt["version"])["install"] == "exchange"
            assert serves(fleet, models.first)
        assert at.get("/v1/fleet")["members"] == []  # a server that is told to end leaves its fleet


def serves(fleet: Fleet, path: Path) -> bool:
    answers = [fleet.server.complete(prompt, COUNT).tokens for prompt in PROMPTS]
    return answers == [reference_tokens(path, encode(prompt), COUNT).tokens for prompt in PROMPTS]
