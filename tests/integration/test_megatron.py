"""A real Megatron-core GPTModel on two processes, layout by layout: what it emits, its digests, its logits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_adapter.models import ModelShape, encode, make_model, make_versions, reference_tokens
from transports.digest import tensor_digest, to_hex
from updater.demo.processes import Children, free_port

HERE = Path(__file__).resolve().parent
HANG_S = 900.0  # only a hang reaches it
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(3 * HANG_S)]

SHAPES = {
    "llama": ModelShape(hidden=80, intermediate=64),
    "llama4": ModelShape(hidden=80, intermediate=64, layers=4),
    "mqa": ModelShape(hidden=80, intermediate=64, kv_heads=1),
    "qwen2": ModelShape("qwen2", hidden=80, intermediate=64, tied=True),
    "qwen3": ModelShape("qwen3", hidden=80, intermediate=64, tied=True),
    "mixtral": ModelShape("mixtral", hidden=80, intermediate=64),
}
TOKENS = list(encode("the quick brown fox jumps over it, and the lazy dog sleeps"))


@dataclass(frozen=True)
class Job:
    """One layout of one model. `drift`: which copy the check of that name spoils."""

    model: str
    sizes: Mapping[str, int]
    checks: tuple[str, ...] = ("emitted", "run")
    drift: str = ""


TP2 = ("emitted", "rounded", "swapped", "stepped", "drifted", "unknown", "wrapped", "run")
JOBS = {
    "tp2": Job("llama", {"tp": 2}, TP2, "norm"),
    "tp2_tied": Job("qwen2", {"tp": 2}),
    "tp2_one_group": Job("mqa", {"tp": 2}),
    "pp2_tied": Job("qwen3", {"pp": 2}, ("emitted", "drifted", "run"), "tied"),
    "pp2_virtual": Job("llama4", {"pp": 2, "vp": 2}, ("emitted",)),
    "ep2": Job("mixtral", {"ep": 2}),
    "tp2_ep2": Job("mixtral", {"tp": 2, "ep": 2, "etp": 1}, ("emitted",)),
    "tp2_etp2": Job("mixtral", {"tp": 2, "etp": 2}),
}
LAST = "tp2_deserted"  # leaves no group behind
RUN = [name for name, job in JOBS.items() if "run" in job.checks]


@dataclass(frozen=True)
class Results:
    folder: Path

    def facts(self, name: str, rank: int = 0) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads((self.folder / f"{name}-{rank}.json").read_text())
        return facts

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / f"{name}.safetensors")

    def model(self, name: str) -> Path:
        return self.folder / JOBS[name].model

    def checkpoint(self, name: str) -> dict[str, torch.Tensor]:
        """What the ranks were filled from, without tied copies."""
        whole = {key: tensor.float() for key, tensor in load_file(self.model(name) / "model.safetensors").items()}
        if SHAPES[JOBS[name].model].tied:
            whole.pop("lm_head.weight", None)
        return whole


def ranks(folder: Path, jobs: list[dict[str, Any]]) -> None:
    """Two trainer processes do the jobs, one after the other."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    port = str(free_port())
    kept = {key: value for key, value in os.environ.items() if not key.startswith("LIVEWEIGHTS_")}
    environment = kept | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    program = [sys.executable, "-W", "ignore", str(HERE / "megatron_program.py")]
    logs = [folder / f"rank-{rank}.log" for rank in range(2)]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            with open(log, "wb") as stream:
                command = [*program, str(rank), port, str(folder)]
                running.append(subprocess.Popen(command, env=environment, stdout=stream, stderr=subprocess.STDOUT))
        codes = [process.wait(HANG_S) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("megatron")
    for name, shape in SHAPES.items():
        make_model(folder / name, shape)
    jobs = [
        {
            "name": name,
            "model": str(folder / job.model),
            "sizes": job.sizes,
            "checks": job.checks,
            "drift": job.drift,
            "tokens": TOKENS,
        }
        for name, job in {**JOBS, LAST: Job("llama", {"tp": 2}, ("deserted",))}.items()
    ]
    ranks(folder, jobs)
    return Results(folder)


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: to_hex(tensor_digest(tensor)) for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", JOBS)
def test_emits_the_checkpoint_it_was_cut_from(results: Results, name: str) -> None:
    emitted, whole = results.tensors(name), results.checkpoint(name)
    assert set(emitted) == set(whole)
    unequal = [key for key, tensor in whole.items() if not torch.equal(emitted[key], tensor)]
    assert unequal == []


@pytest.mark.parametrize("name", JOBS)
def test_digests_of_shards_are_those_of_whole_tensors(results: Results, name: str) -> None:
    expected = digests(results.checkpoint(name))
    for rank in range(2):
        facts = results.facts(name, rank)["emitted"]
        assert facts["digests"] == expected
        assert facts["again"]


@pytest.mark.parametrize("name", JOBS)
def test_specs_are_known_before_anything_is_gathered(results: Results, name: str) -> None:
    whole = results.checkpoint(name)
    specs = {key: ["F32", list(tensor.shape)] for key, tensor in whole.items()}
    first, second = (results.facts(name, rank)["emitted"] for rank in range(2))
    assert first["specs"] == second["specs"] == specs
    assert list(first["specs"]) == list(second["specs"])


@pytest.mark.parametrize("name", JOBS)
def test_a_tied_head_is_a_tie_and_no_second_tensor(results: Results, name: str) -> None:
    tied = SHAPES[JOBS[name].model].tied
    assert results.facts(name)["emitted"]["ties"] == ([["lm_head.weight", "model.embed_tokens.weight"]] if tied else [])
    assert ("lm_head.weight" in results.tensors(name)) is not tied


@pytest.mark.parametrize("name", RUN)
def test_the_emitted_checkpoint_computes_the_same_logits(results: Results, name: str, tmp_path: Path) -> None:
    import transformers

    save_file(results.tensors(name), tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((results.model(name) / "config.json").read_bytes())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([TOKENS])).logits
    found = load_file(results.folder / f"{name}-logits.safetensors")["logits"]
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    top = expected.topk(2).values
    settled = (top[..., 0] - top[..., 1])[0] > 2.0
    assert int(settled.sum()) > len(TOKENS) // 2
    assert torch.equal(found[0, settled].argmax(-1), expected[0, settled].argmax(-1))


def test_rounded_tensors_have_digests_of_what_travels(results: Results) -> None:
    emitted = results.tensors("tp2-rounded")
    whole = results.checkpoint("tp2")
    expected = {
        key: tensor if key.endswith("norm.weight") else tensor.to(torch.bfloat16) for key, tensor in whole.items()
    }
    assert {key: tensor.dtype for key, tensor in emitted.items()} == {
        key: tensor.dtype for key, tensor in expected.items()
    }
    assert digests(emitted) == digests(expected) == results.facts("tp2")["rounded"]["digests"]


@pytest.mark.parametrize(("one", "other"), [("mlp.gate_proj", "mlp.up_proj"), ("self_attn.k_proj", "self_attn.v_proj")])
def test_halves_put_in_each_others_place_are_seen(results: Results, one: str, other: str) -> None:
    facts = results.facts("tp2")
    found, right = facts["swapped"][one], facts["emitted"]["digests"]
    names = {f"model.layers.1.{half}.weight" for half in (one, other)}
    assert {name for name in right if found[name] != right[name]} == names
    first, second = sorted(names)
    assert (found[first], found[second]) == (right[second], right[first])


def test_an_optimiser_that_steps_in_between_is_caught(results: Results) -> None:
    facts = results.facts("tp2")["stepped"]
    assert facts["codes"] == ["source_changed"]
    assert facts["wrote"] == "embedding.word_embeddings.weight"
    assert facts["tensors"] == ["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("tp2", "model.layers.0.input_layernorm.weight"), ("pp2_tied", "model.embed_tokens.weight")],
)
def test_copies_that_drifted_apart_are_named_on_every_rank(results: Results, name: str, tensor: str) -> None:
    for rank in range(2):
        facts = results.facts(name, rank)["drifted"]
        assert facts == {"faults": [["copies_differ", tensor, 1]], "after": []}


def test_a_parameter_without_a_rule_is_refused_on_every_rank(results: Results) -> None:
    for rank in range(2):
        facts = results.facts("tp2", rank)["unknown"]
        assert [fault[:2] for fault in facts["faults"]] == [["tensor_unexpected", "adapter_scale"]]
        assert facts["ignoring"] == facts["without"]


def test_a_trainer_rank_that_dies_is_named(results: Results) -> None:
    facts = results.facts(LAST)["deserted"]
    ((code, tensor, rank),) = facts["faults"]
    assert (code, rank) == ("peer_lost", 1)
    assert tensor in facts["names"]


def test_wrappers_leave_no_trace_in_names(results: Results) -> None:
    assert results.facts("tp2")["wrapped"] == {"same": True}


@dataclass(frozen=True)
class Published:
    folder: Path
    versions: tuple[Path, ...]
    facts: dict[str, Any]
    live: dict[str, Any]
    example: list[str]


def torchrun(*command: str | Path) -> list[str]:
    launcher = (sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2")
    where = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    kept = {key: value for key, value in os.environ.items() if not key.startswith("LIVEWEIGHTS_")}
    kept |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ran = subprocess.run([*launcher, *where, *command], env=kept, capture_output=True, text=True, timeout=HANG_S)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
    return ran.stdout.splitlines()


@contextmanager
def serving(folder: Path, model: Path) -> Iterator[tuple[str, str]]:
    """URLs of a coordinator and of an embedded engine that serves `model`."""
    children = Children(folder)
    try:
        port, root = free_port(), ["--root", str(folder)]
        serve = ["serve", "--new-fleet", "--port", str(port), "--state", str(folder / "state"), *root]
        coordinator = children.start("coordinator", serve, port)
        children.wait_ready(coordinator, "/healthz")
        port = free_port()
        engine = ["engine", "--model", str(model), "--port", str(port), "--coordinator", coordinator.url]
        replica = children.start("replica", [*engine, *root], port)
        children.wait_ready(replica)
        yield coordinator.url, replica.url
    finally:
        assert children.stop() == []


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Published]:
    """A fleet on one checkpoint. The example trains on it for two steps; then a trainer at TP=2 that holds another one
    pushes that, trains a step and pushes again.
    """
    import httpx

    folder = tmp_path_factory.mktemp("pushed")
    versions = make_versions(folder / "models", 2, SHAPES["llama"])
    with serving(folder, versions[0]) as (coordinator, replica):
        example = torchrun(HERE.parents[1] / "examples" / "04_megatron.py", versions[0], coordinator, "2")
        job = {"name": "push", "model": str(versions[1]), "sizes": {"tp": 2}, "checks": ["pushed"], "tokens": TOKENS}
        more = {
            "dtype": "bfloat16",
            "padding": 0.0,
            "url": coordinator,
            "replica": replica,
            "directory": str(folder / "out"),
        }
        ranks(folder, [job | more])
        facts = [json.loads((folder / f"push-{rank}.json").read_text())["pushed"] for rank in range(2)]
        assert facts[1]["receipts"] == facts[0]["receipts"]  # every rank returns the receipt
        live = httpx.get(f"{coordinator}/v1/version", timeout=10).json()
        yield Published(folder, versions, facts[0], live, example)


def test_the_example_trains_on_what_the_fleet_serves(published: Published) -> None:
    said = [line.split(",") for line in published.example if line.startswith("0-")]
    assert [line[0].partition(":")[0] for line in said] == ["0-1", "0-2"]
    assert [line[-1].split()[-1] for line in said] == ["digests", "digests"]
    changed, of, tensors = said[0][1].split()[:3]
    assert (of, int(tensors)) == ("of", len(load_file(published.versions[0] / "model.safetensors")))
    # Had the trainer not started from the checkpoint, its norms would not be those that a small step leaves alone.
    assert 0 < int(changed) < int(tensors)


def test_the_engine_answers_like_one_started_on_the_converted_checkpoint(published: Published) -> None:
    receipt, answer = published.facts["receipts"][0], published.facts["answers"][0]
    assert (receipt["outcome"], receipt["proof"], answer["version"]) == ("committed", "digests", "0-3")
    expected = reference_tokens(published.versions[1], TOKENS, 16)
    assert min(expected.margins) > 2.0
    assert answer["text"] == bytes(expected.tokens).decode()
    before = reference_tokens(published.versions[0], TOKENS, 16)
    assert before.tokens != expected.tokens


def test_after_a_training_step_the_engine_answers_like_the_trained_checkpoint(published: Published) -> None:
    receipt, answer = published.facts["receipts"][1], published.facts["answers"][1]
    assert (receipt["outcome"], receipt["proof"], answer["version"]) == ("committed", "digests", "0-4")
    written = published.folder / "out" / "0-4"
    trained = load_file(written / "model.safetensors")
    start = load_file(published.versions[1] / "model.safetensors")
    changed = {name for name, tensor in trained.items() if not torch.equal(tensor, start[name])}
    # Attention of these models is settled, so queries and keys hardly have a gradient; norms stay within rounding.
    moved = ("v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head")
    assert {name for name in trained if any(part in name for part in moved)} <= changed
    assert (receipt["tensors_changed"], receipt["tensors"]) == (len(changed), len(start))
    assert published.live["version"] == "0-4"
    expected = reference_tokens(written, TOKENS, 16)
    settled = next((at for at, margin in enumerate(expected.margins) if margin <= 2.0), 16)
    assert settled >= 8
    assert answer["text"].encode()[:settled] == bytes(expected.tokens[:settled])


def test_a_mixture_of_experts_at_ep2_is_served_like_its_converted_checkpoint(tmp_path: Path) -> None:
    versions = make_versions(tmp_path / "models", 2, SHAPES["mixtral"])
    job = {"name": "experts", "model": str(versions[1]), "sizes": {"ep": 2}, "checks": ["delivered"], "tokens": TOKENS}
    with serving(tmp_path, versions[0]) as (coordinator, replica):
        ranks(tmp_path, [job | {"dtype": "bfloat16", "padding": 0.0, "url": coordinator, "replica": replica}])
    told = [json.loads((tmp_path / f"experts-{rank}.json").read_text())["delivered"] for rank in range(2)]
    assert told[0]["receipt"] == told[1]["receipt"]
    receipt, answer = told[0]["receipt"], told[0]["answer"]
    assert (receipt["outcome"], receipt["proof"], answer["version"]) == ("committed", "digests", "0-1")
    assert receipt["tensors"] == len(load_file(versions[1] / "model.safetensors"))
    expected = reference_tokens(versions[1], TOKENS, 16)
    assert min(expected.margins) > 2.0
    assert answer["text"] == bytes(expected.tokens).decode()
    assert reference_tokens(versions[0], TOKENS, 16).tokens != expected.tokens
