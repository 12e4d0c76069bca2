"""The embedded engine by itself: what it binds, where its bytes lie, and how its ranks end."""

from __future__ import annotations

import itertools
import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine_adapter.base import EngineSpec, GenerateRequest, TokenEvent
from engine_adapter.models import ModelShape, encode, make_model, make_versions, reference_tokens
from engine_adapter.transformers.engine import TransformersEngine, build
from tests.integration.embedded_driver import HANG_S, Replica
from updater.core.errors import LiveweightsError
from updater.core.policy import CachePolicy

pytestmark = pytest.mark.engine
torch.set_num_threads(1)

PROMPT = encode("The quick brown fox jumps over the lazy dog.")
ROOT = Path(__file__).parents[2]


class Served:
    """An engine in this process."""

    def __init__(self, model: Path, **options: Any) -> None:
        self.events: queue.Queue[TokenEvent] = queue.Queue()
        self.engine: TransformersEngine = build(EngineSpec(0, 1, str(model), "", {"threads": 1, **options}))
        self._ids = itertools.count()

    def start(self) -> Served:
        self.engine.set_version("0-1", "", CachePolicy.RESET)
        self.engine.start(self.events.put)
        return self

    def generate(self, count: int = 16, **more: Any) -> list[int]:
        self.engine.submit(GenerateRequest(f"r{next(self._ids)}", PROMPT, count, **more))
        tokens: list[int] = []
        while True:
            event = self.events.get(timeout=HANG_S)
            tokens += event.tokens
            if event.finish_reason is not None:
                assert event.error == ""
                return tokens


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(make_model(tmp_path / "model", ModelShape(tied=True)))
    yield made
    made.engine.stop(HANG_S)


def test_the_forward_reads_what_rebind_bound_and_ties_follow(served: Served, tmp_path: Path) -> None:
    """Also by the logits: a rebind that only some reader sees would move them less."""
    other = make_model(tmp_path / "other", ModelShape(tied=True), seed=9)
    weights = load_file(other / "model.safetensors")
    served.start()
    engine = served.engine
    before = served.generate()
    engine.pause(HANG_S)
    old = {name: parameter.local for name, parameter in engine.parameters().items()}
    for name, parameter in engine.parameters().items():
        parameter.rebind(weights[name].clone())
    assert engine.reset_cache() == {"kv_blocks": True}
    engine.unpause(HANG_S)
    assert tuple(served.generate()) == reference_tokens(other, PROMPT, 16).tokens
    engine.pause(HANG_S)
    for name, parameter in engine.parameters().items():
        parameter.rebind(old[name])
    engine.reset_cache()
    engine.unpause(HANG_S)
    assert served.generate() == before == list(reference_tokens(tmp_path / "model", PROMPT, 16).tokens)


def test_every_checkpoint_tensor_is_a_parameter_and_tables_are_not(served: Served, tmp_path: Path) -> None:
    parameters = served.engine.parameters()
    assert set(parameters) == set(load_file(tmp_path / "model" / "model.safetensors"))
    assert parameters["model.embed_tokens.weight"].aliases == ("lm_head.weight",)
    assert served.engine.parameters() is parameters


def test_rebind_refuses_another_form(served: Served) -> None:
    parameter = served.engine.parameters()["model.layers.0.self_attn.q_proj.weight"]
    before = parameter.local.data_ptr()
    for wrong in (parameter.local.float(), parameter.local[:1].clone(), parameter.local.t().contiguous().t()):
        with pytest.raises(ValueError):
            parameter.rebind(wrong)
    assert served.engine.parameters()[parameter.name].local.data_ptr() == before


def test_a_truncated_start_checkpoint_does_not_hurt_the_server(served: Served, tmp_path: Path) -> None:
    expected = list(reference_tokens(tmp_path / "model", PROMPT, 16).tokens)
    os.truncate(tmp_path / "model" / "model.safetensors", 8)
    served.start()
    assert served.generate() == expected
    # By address, not by chance: no parameter lies in a mapping of a file.
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [tuple(int(x, 16) for x in line[0].split("-")) for line in mapped if len(line) > 5 and line[5][0] == "/"]
    for parameter in served.engine.parameters().values():
        assert not any(low <= parameter.local.data_ptr() < high for low, high in spans)


def test_sampling_is_an_option_and_greedy_stays_greedy_beside_it(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    made = Served(model, sampling=True).start()
    expected = list(reference_tokens(model, PROMPT, 16).tokens)
    assert made.generate() == expected
    assert made.generate(temperature=50.0) != expected
    with pytest.raises(LiveweightsError):
        made.generate(temperature=1.0, seed=1)
    made.engine.stop(HANG_S)


@pytest.mark.parametrize("options", [{"num_block": 1}, {"num_blocks": "many"}, {"dtype": "int3"}])
def test_unknown_options_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(LiveweightsError) as caught:
        build(EngineSpec(0, 1, str(tmp_path), "", options))
    assert caught.value.code == "bad_request"


def test_a_namespace_is_refused(served: Served) -> None:
    with pytest.raises(LiveweightsError) as caught:
        served.engine.set_version("0-2", "", CachePolicy.NAMESPACE)
    assert caught.value.code == "mode_unsupported"


def test_requests_of_a_stopped_engine_end_with_an_error(served: Served) -> None:
    served.start()
    served.engine.submit(GenerateRequest("long", PROMPT, 1500))
    served.events.get(timeout=HANG_S)
    served.engine.stop(HANG_S)
    reasons = []
    while not reasons or reasons[-1] is None:
        reasons.append(served.events.get(timeout=HANG_S).finish_reason)
    assert reasons[-1] == "error"
    with pytest.raises(LiveweightsError) as caught:
        served.engine.submit(GenerateRequest("late", PROMPT, 4))
    assert caught.value.code == "rank_failed"
    assert served.engine.failure is not None


def test_a_request_that_slips_in_while_the_loop_ends_still_ends(served: Served) -> None:
    served.start()
    served.engine.pause(HANG_S)  # the loop is parked, so it takes no request from its queue
    served.engine.submit(GenerateRequest("late", PROMPT, 4))
    served.engine._over(None)  # what the loop's thread says last, here before it has seen the request
    event = served.events.get(timeout=HANG_S)
    assert (event.request_id, event.finish_reason) == ("late", "error")
    served.engine.unpause(HANG_S)


def test_more_requests_than_the_cache_holds_still_end_right(tmp_path: Path) -> None:
    """The library takes blocks away from running requests and starts them over."""
    model = make_model(tmp_path / "model")
    made = Served(model, num_blocks=12, page_size=16).start()
    for i in range(6):
        made.engine.submit(GenerateRequest(f"m{i}", PROMPT[i:], 60))
    found: dict[str, list[int]] = {f"m{i}": [] for i in range(6)}
    open_requests = set(found)
    while open_requests:
        event = made.events.get(timeout=HANG_S)
        found[event.request_id] += event.tokens
        if event.finish_reason is not None:
            assert event.finish_reason == "length"
            open_requests.discard(event.request_id)
    for i in range(6):
        assert tuple(found[f"m{i}"]) == reference_tokens(model, PROMPT[i:], 60).tokens
    made.engine.stop(HANG_S)


@pytest.mark.parametrize("stacked", [False, True], ids=["per expert", "stacked"])
def test_mixtral_goes_to_another_version_and_back(tmp_path: Path, stacked: bool) -> None:
    first, second = make_versions(tmp_path, 2, ModelShape(family="mixtral"))
    target = second
    if stacked:
        target = tmp_path / "stacked"
        stack_experts(second, target)
    replica = Replica(first, 1)
    try:
        assert replica.differs == []
        assert tuple(replica.generate(PROMPT, 16).tokens) == reference_tokens(first, PROMPT, 16).tokens
        replica.update(first, "0-1")
        replica.update(target, "0-2")
        assert tuple(replica.generate(PROMPT, 16).tokens) == reference_tokens(second, PROMPT, 16).tokens
        replica.roll_back("0-1")
        assert tuple(replica.generate(PROMPT, 16).tokens) == reference_tokens(first, PROMPT, 16).tokens
    finally:
        replica.close()


def stack_experts(source: Path, target: Path) -> None:
    """The spelling that transformers uses inside."""
    from safetensors.torch import save_file

    target.mkdir()
    weights = load_file(source / "model.safetensors")
    stacked = {n.replace(".block_sparse_moe.", ".mlp."): t for n, t in weights.items() if ".experts." not in n}
    for layer in range(2):
        old, new = f"model.layers.{layer}.block_sparse_moe.experts", f"model.layers.{layer}.mlp.experts"
        parts = {w: torch.stack([weights[f"{old}.{e}.{w}.weight"] for e in range(4)]) for w in ("w1", "w2", "w3")}
        stacked[f"{new}.gate_up_proj"] = torch.cat((parts["w1"], parts["w3"]), dim=1)
        stacked[f"{new}.down_proj"] = parts["w2"]
    save_file(stacked, target / "model.safetensors", metadata={"format": "pt"})


DENSE = {
    "llama": ModelShape(),
    "tied": ModelShape(tied=True),
    "qwen2": ModelShape(family="qwen2"),
    "qwen3": ModelShape(family="qwen3"),
}


def test_declared_rules_and_dtensors_agree_on_two_ranks(tmp_path: Path) -> None:
    """And what rows cannot say (the library's strided shards of stacked experts) is refused."""
    shapes = DENSE | {"mixtral": ModelShape(family="mixtral")}
    first, second = placements([make_model(tmp_path / name, shape) for name, shape in shapes.items()])
    for name in DENSE:
        for answers in (first, second):
            assert answers[name]["placement"] == answers[name]["declared"]
            assert len(answers[name]["placement"][0]) == len(answers[name]["parameters"])
        assert first[name]["placement"] != second[name]["placement"]
    assert [answers["mixtral"]["placement"] for answers in (first, second)] == ["placement_refused"] * 2


def placements(models: list[Path]) -> list[dict[str, Any]]:
    """Per rank: model name -> what `embedded_placements` prints."""
    return [json.loads(lines[-1]) for lines in two_ranks("embedded_placements.py", "2", *map(str, models))]


def two_ranks(script: str, *arguments: str) -> list[list[str]]:
    """Lines that each of two rank processes printed."""
    path = str(Path(__file__).with_name(script))
    ranks = [
        subprocess.Popen(
            [sys.executable, path, str(rank), *arguments],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return [rank.communicate(timeout=2 * HANG_S)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_a_forward_that_raises_on_one_rank_ends_both_loops(tmp_path: Path) -> None:
    """Rank 0 is then inside a collective of the forward pass: it must not wait there for a timeout."""
    first, second = two_ranks("embedded_crash.py", str(make_model(tmp_path / "model")))
    assert first == ["error", "over"]
    assert second == ["over"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_ends_the_other_within_a_deadline(tmp_path: Path, victim: int) -> None:
    replica = Replica(make_model(tmp_path / "model"), 2)
    try:
        request = replica.submit(PROMPT, 1500)
        replica.wait(request, tokens=2)
        os.kill(replica.pool.pids[victim], signal.SIGKILL)
        if victim == 1:
            reply = replica.wait(request)
            assert reply.reason == "error"
            with pytest.raises(LiveweightsError) as caught:
                replica.submit(PROMPT, 4)
            assert caught.value.code in ("rank_failed", "rank_died")  # its process ends a moment later
        with pytest.raises(LiveweightsError) as caught:
            replica.pause(1)
        assert "rank_died" in {failure.code for failure in caught.value.failures}
    finally:
        replica.close()
