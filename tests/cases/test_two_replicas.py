"""A fleet: two replicas, one over two ranks, a coordinator, everything over HTTP.

REFUSED here is the whole of it: nothing published; version, digests of every parameter on every rank and greedy
output as before; admission open; the spare empty or still the previous version and nothing held beyond it; a stable
code that names the tensor or file and the replica; and a good update right after works, under the same version.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file

from engine_adapter.testing import (
    ToyReference,
    expected_digests,
    fixture_config,
    make_toy_checkpoint,
    toy_tensors,
    write_shards,
)
from engine_adapter.testing.toy.pace import steps_held
from tests.cases.live_fleet import HANG_S, PROMPT, TOKENS, LiveFleet, View, free_port, live_fleet
from transports.disk.manifests import write_manifest
from transports.testing import HandMadeFile, shard_name
from updater.core.participant import FrontState, SpareState

pytestmark = pytest.mark.engine

torch.set_num_threads(1)

INDEX = "model.safetensors.index.json"
FIRST, SECOND = shard_name(1, 2), shard_name(2, 2)
LAYER = "model.layers.0"
Q, K, V = (f"{LAYER}.self_attn.{name}_proj.weight" for name in "qkv")
NORM = "model.norm.weight"
UP = "model.layers.0.mlp.experts.0.up_proj.weight"
EXPERT = "model.layers.1.mlp.experts.3"
SIZES = {"one": 2, "two": 1}  # replica -> ranks

Tensors = dict[str, torch.Tensor]


@dataclass
class Stage:
    """The fleet, two good checkpoints that take turns, and the next free step."""

    fleet: LiveFleet
    home: Path
    good: tuple[Path, Path]
    step: int = 1
    live: Path | None = None
    turns: Iterator[int] = field(default_factory=itertools.count)
    origins: dict[Path, Path] = field(default_factory=dict)  # of copies

    def next_good(self) -> Path:
        """The one with other values in every element than what is live."""
        live = self.origins.get(self.live, self.live) if self.live else None
        return next(each for each in self.good if each != live)

    def accepted(self, path: Path, answer: httpx.Response, *others: str) -> dict[str, Any]:
        """Committed, and every rank of every replica holds what an independent slicer cuts from the source."""
        assert answer.status_code == 200, answer.text
        receipt: dict[str, Any] = answer.json()
        assert receipt["outcome"] == "committed"
        assert self.fleet.get("/v1/version")["version"] == receipt["version"]
        for name in (*SIZES, *others):
            self.serves(name, path, receipt["version"])
        self.live = path
        self.step = int(receipt["version"].split("-")[1]) + 1
        return receipt

    def serves(self, name: str, path: Path, version: str) -> None:
        replica = self.fleet.replicas[name]
        size = len(replica.pool.pids)
        assert self.fleet.digests(name) == [sliced(path, rank, size) for rank in range(size)]
        answer = self.fleet.complete(replica.url)
        assert answer.status_code == 200, answer.text
        told = answer.json()
        assert told["choices"][0]["token_ids"] == reference(path)
        assert told["liveweights"]["version"] == version

    def publish(self, *others: str, path: Path | None = None, **body: Any) -> dict[str, Any]:
        path = path or self.next_good()
        return self.accepted(path, self.fleet.push(path, self.step, **body), *others)

    def copy(self, path: Path) -> Path:
        """A source of its own, for a test that takes it away."""
        made = Path(shutil.copytree(path, self.home / f"copy-{next(self.turns)}"))
        self.origins[made] = self.origins.get(path, path)
        return made


@cache
def sliced(path: Path, rank: int, size: int) -> dict[str, str]:
    return expected_digests(path, rank, size)


@cache
def reference(path: Path) -> list[int]:
    return list(ToyReference.load(path).generate(PROMPT, TOKENS))


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    home = tmp_path_factory.mktemp("fleet")
    start = make_toy_checkpoint(home / "start", "M2", seed=7)
    good = tuple(make_toy_checkpoint(home / f"good-{seed}", "M2", seed=seed, shards=2) for seed in (8, 9))
    with live_fleet(home) as fleet:
        for name, size in SIZES.items():
            os.mkfifo(home / f"pace-{name}")
            fleet.begin(name, start, size, options={"pace": str(home / f"pace-{name}")})
        for name in SIZES:
            fleet.admitted(name)
        made = Stage(fleet, home, (good[0], good[1]))
        made.publish()
        made.publish()
        yield made


# REFUSED


@dataclass(frozen=True)
class Case:
    """A checkpoint that `spoil` made bad, and the case that it stands for, if any.

    `failures`: (code, tensor, file) that must be told, among others.
    """

    id: str
    name: str
    spoil: Callable[[Path], None]
    code: str
    failures: Sequence[tuple[str, str, str]]
    outcome: str = "rejected"
    exact: bool = False  # nothing else may be told


def tensors_of(folder: Path) -> Tensors:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def rewrite(folder: Path, tensors: Tensors) -> None:
    """Well-formed shards with an index that knows them."""
    for old in folder.glob("*.safetensors"):
        old.unlink()
    write_shards(folder, tensors, 2)


def changed(change: Callable[[Tensors], Tensors]) -> Callable[[Path], None]:
    """A well-formed checkpoint of other tensors."""
    return lambda folder: rewrite(folder, change(tensors_of(folder)))


def one_file(write: Callable[[HandMadeFile, Tensors], None]) -> Callable[[Path], None]:
    """One file written entry by entry in place of the shards."""

    def spoil(folder: Path) -> None:
        tensors, made = tensors_of(folder), HandMadeFile()
        for old in (*folder.glob("*.safetensors"), folder / INDEX):
            old.unlink()
        write(made, tensors)
        made.write(folder / "model.safetensors")

    return spoil


def truncate(folder: Path) -> None:
    shard = folder / SECOND
    shard.write_bytes(shard.read_bytes()[:-1])


def name_twice(made: HandMadeFile, tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        made.tensor(name, tensor)
    made.tensor(NORM, tensors[NORM] + 1)


def same_range(made: HandMadeFile, tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if name != V:
            made.tensor(name, tensor)
    made.entry(V, dict(made.entries)[K])


def hole(made: HandMadeFile, tensors: Tensors) -> None:
    for at, name in enumerate(NAMES):
        made.tensor(name, tensors[name])
        if at == 2:
            made.hole(8)


def invented_dtype(made: HandMadeFile, tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        made.tensor(name, tensor)
    at = next(number for number, (name, _) in enumerate(made.entries) if name == UP)
    made.entries[at] = UP, {**made.entries[at][1], "dtype": "F7"}


def reindex(where: dict[str, str]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"] |= where
        (folder / INDEX).write_text(json.dumps(index))

    return spoil


def lead_out(folder: Path) -> None:
    """To a file that is there and well formed, above the root of the fleet."""
    shutil.copy(folder / FIRST, folder.parent.parent / "evil.safetensors")
    reindex({K: "../../evil.safetensors"})(folder)


def flip_a_byte(folder: Path) -> None:
    """Behind a manifest that was written before: in the middle of V."""
    write_manifest(str(folder))
    tensors = tensors_of(folder)
    tensors[V].view(torch.uint8)[4, 7] ^= 0x10
    rewrite(folder, tensors)


def swap_keys_and_values(folder: Path) -> None:
    write_manifest(str(folder))
    tensors = tensors_of(folder)
    tensors[K], tensors[V] = tensors[V], tensors[K]
    rewrite(folder, tensors)


def with_nan(tensors: Tensors) -> Tensors:
    tensors[Q][3, 5] = float("nan")
    return tensors


def renamed(tensors: Tensors, old: str, new: str) -> Tensors:
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


def lacking(part: str) -> Callable[[Path], None]:
    return changed(lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name})


def twice_as_wide(folder: Path) -> None:
    """The config stays that of the fleet's model: it is the shapes that have to speak."""
    config = (folder / "config.json").read_text()
    for old in folder.iterdir():
        old.unlink()
    make_toy_checkpoint(folder, "M2", seed=11, shards=2, hidden_size=32)
    (folder / "config.json").write_text(config)


def as_integers(tensors: Tensors) -> Tensors:
    return tensors | {NORM: tensors[NORM].view(torch.int16)}


NAMES = {name: tuple(tensor.shape) for name, tensor in toy_tensors(fixture_config("M2"), 11).items()}
WIDER = {name: tuple(tensor.shape) for name, tensor in toy_tensors(fixture_config("M2", hidden_size=32), 11).items()}
ONE_FILE = "model.safetensors"
BEHIND_HOLE = list(NAMES)[3]

CASES = (
    Case("B002", "truncated", truncate, "file_truncated", [("file_truncated", NORM, SECOND)]),
    Case("B004", "name-twice", one_file(name_twice), "tensor_duplicate", [("tensor_duplicate", NORM, ONE_FILE)]),
    Case("B006", "same-range", one_file(same_range), "file_range", [("file_range", name, ONE_FILE) for name in (K, V)]),
    Case("B007", "hole", one_file(hole), "file_range", [("file_range", BEHIND_HOLE, ONE_FILE)], exact=True),
    Case(
        "B013", "no-shard", lambda folder: (folder / SECOND).unlink(), "shard_missing", [("shard_missing", "", SECOND)]
    ),
    Case("B014", "other-shard", reindex({K: SECOND}), "index_mismatch", [("index_mismatch", K, SECOND)]),
    Case("B014", "in-no-shard", reindex({"x": FIRST}), "index_mismatch", [("index_mismatch", "x", FIRST)], exact=True),
    Case("B017", "leads-out", lead_out, "source_outside_roots", [("source_outside_roots", K, INDEX)], exact=True),
    Case("B024", "flipped-byte", flip_a_byte, "tensor_digest", [("tensor_digest", V, "")], "aborted", exact=True),
    Case("B027", "no-such-dtype", one_file(invented_dtype), "file_dtype", [("file_dtype", UP, ONE_FILE)], exact=True),
    Case("B027", "other-dtype", changed(as_integers), "tensor_dtype", [("tensor_dtype", NORM, "")], exact=True),
    Case(
        "B036",
        "misspelt",
        changed(lambda tensors: renamed(tensors, NORM, "model.nrom.weight")),
        "tensor_missing",
        [("tensor_missing", NORM, ""), ("tensor_unexpected", "model.nrom.weight", "")],
        exact=True,
    ),
    Case(
        "B037",
        "all-renamed",
        changed(lambda tensors: {f"net.{name}": tensor for name, tensor in tensors.items()}),
        "tensor_missing",
        [
            *(("tensor_missing", name, "") for name in NAMES),
            *(("tensor_unexpected", f"net.{name}", "") for name in NAMES),
        ],
        exact=True,
    ),
    Case(
        "B040", "no-head", lacking("lm_head"), "tensor_missing", [("tensor_missing", "lm_head.weight", "")], exact=True
    ),
    Case(
        "B054",
        "no-expert-3",
        lacking(EXPERT),
        "tensor_missing",
        [("tensor_missing", f"{EXPERT}.{part}_proj.weight", "") for part in ("gate", "up", "down")],
        exact=True,
    ),
    Case("B075", "nan", changed(with_nan), "tensor_nonfinite", [("tensor_nonfinite", Q, "")], "aborted", exact=True),
    Case(
        "B104",
        "placeholder",
        changed(lambda tensors: tensors | {Q: torch.empty(0, dtype=torch.bfloat16)}),
        "tensor_shape",
        [("tensor_shape", Q, "")],
        exact=True,
    ),
    Case(
        "B175",
        "twice-as-wide",
        twice_as_wide,
        "tensor_shape",
        [("tensor_shape", name, "") for name, shape in NAMES.items() if WIDER[name] != shape],
        exact=True,
    ),
    Case(
        "",
        "keys-and-values-swapped",
        swap_keys_and_values,
        "tensor_digest",
        [("tensor_digest", name, "") for name in (K, V)],
        "aborted",
        exact=True,
    ),
)


def settled(fleet: LiveFleet) -> View:
    """A thread that has ended is counted among a rank's for a moment longer."""
    view = fleet.view()
    while (again := fleet.view()) != view:
        view = again
    return view


def refused(stage: Stage, before: View, kept: str | None, answer: httpx.Response, status: int = 422) -> dict[str, Any]:
    """The fleet is as it was; the problem document. `kept`: the version to go back to before."""
    document: dict[str, Any] = answer.json()
    assert answer.status_code == status, document
    assert settled(stage.fleet) == before
    back = stage.fleet.get("/v1/version")["rollback_to"]
    assert back == (kept if document["outcome"] == "rejected" else None)
    assert document["live_version"] == before.version["version"]
    return document


def as_before(view: View) -> None:
    """The view that refusals are compared with is one of a fleet in order."""
    assert {state for state, _, _ in view.fronts.values()} == {FrontState.OPEN.value}
    assert set(view.ready.values()) == {200}
    assert {status for status, _, _ in view.answers.values()} == {200}
    assert not [rank for ranks in view.held.values() for rank in ranks if rank.paused or rank.files]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=pytest.mark.case(case.id) if case.id else ()) for case in CASES],
)
def test_refused(stage: Stage, tmp_path: Path, case: Case) -> None:
    fleet, folder = stage.fleet, stage.home / f"bad-{case.name}"
    make_toy_checkpoint(folder, "M2", seed=11, shards=2)
    case.spoil(folder)
    before, kept = settled(fleet), fleet.get("/v1/version")["rollback_to"]
    as_before(before)
    document = refused(stage, before, kept, fleet.push(folder, stage.step, id=case.name))
    assert (document["code"], document["outcome"]) == (case.code, case.outcome)
    refusals = document["failures"]
    told = {(failure["code"], failure["tensor"], failure["file"]) for failure in refusals}
    assert set(case.failures) <= told
    if case.exact:
        assert told == set(case.failures)
    assert {failure["replica"] for failure in document["failures"]} <= set(SIZES)
    assert document["receipt"]["outcome"] == case.outcome
    assert fleet.get("/v1/fleet")["phase"] == "idle"
    number = stage.step
    assert stage.publish()["version"] == f"0-{number}"  # refused versions stay free


@pytest.mark.case("B137")
def test_an_adapter_is_refused_and_changes_nothing(stage: Stage) -> None:
    fleet, path = stage.fleet, stage.next_good()
    before, kept = settled(fleet), fleet.get("/v1/version")["rollback_to"]
    as_before(before)
    document = refused(stage, before, kept, fleet.push(path, stage.step, id="adapter", adapter="x"))
    assert (document["code"], document["outcome"], document["retryable"]) == ("adapter_unsupported", "rejected", False)
    assert fleet.client.get(f"{fleet.url}/v1/updates/adapter").status_code == 404
    stage.publish(id="adapter")


@pytest.mark.case("B137")
def test_a_cached_prompt_is_computed_anew_by_every_version(stage: Stage) -> None:
    """What takes the adapter's place here: the same label in the request, other weights behind it."""
    fleet, url = stage.fleet, stage.fleet.replicas["two"].url
    cached = []
    for _ in range(2):
        stage.publish()  # it asks for the prompt once
        cached.append(fleet.complete(url).json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        answer = fleet.push(stage.next_good(), stage.step)
        assert answer.status_code == 200
        stage.live, stage.step = stage.next_good(), stage.step + 1
        told = fleet.complete(url).json()
        assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert told["choices"][0]["token_ids"] == reference(stage.live)
    assert min(cached) > 0  # or nothing was shared that could have been stale


# requests in flight and caches


@contextmanager
def streaming(stage: Stage, name: str, tokens: int) -> Iterator[Iterator[dict[str, Any]]]:
    """A long reply, chunk by chunk."""
    body = {"prompt": PROMPT, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    with stage.fleet.client.stream("POST", f"{stage.fleet.replicas[name].url}/v1/completions", json=body) as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {"))
        yield (json.loads(line) for line in lines)


@pytest.mark.case("B134")
def test_frozen_requests_need_a_mode_that_no_later_request_can_hit(stage: Stage) -> None:
    fleet = stage.fleet
    before, kept = settled(fleet), fleet.get("/v1/version")["rollback_to"]
    path, old = stage.next_good(), before.version["version"]
    refusal = fleet.push(path, stage.step, id="frozen", policy={"in_flight": "keep", "cache": "reset"})
    assert refused(stage, before, kept, refusal)["code"] == "mode_unsupported"
    keep: dict[str, Any] = {
        "id": "frozen-keep",
        "policy": {"in_flight": "keep", "cache": "namespace", "commit": "manual"},
        "lease_s": HANG_S,
    }
    assert fleet.push(path, stage.step, wait=False, **keep).status_code == 202
    fleet.until(lambda: phase(fleet, "frozen-keep") == "ready")
    url = fleet.replicas["two"].url

    def shut() -> bool:
        allow(1)  # the step in which the pause finds the engine must end
        status = fleet.front(url)
        return status.state not in (FrontState.OPEN, FrontState.CLOSING) or status.live_version != old

    with ExitStack() as slowly:
        allow = slowly.enter_context(steps_held(stage.home / "pace-two"))
        allow(2)
        with streaming(stage, "two", 1000) as chunks:
            next(chunks)
            assert fleet.post("/v1/updates/frozen-keep/commit").status_code == 202
            fleet.until(shut)
            slowly.close()
            new = stage.accepted(path, fleet.push(path, stage.step, **keep))["version"]
            later = fleet.complete(url).json()  # shares the whole prompt with the frozen one
            rest = list(chunks)
    assert later["choices"][0]["token_ids"] == reference(path)
    assert [span["version"] for span in later["liveweights"]["spans"]] == [new]
    told = next(chunk["liveweights"] for chunk in reversed(rest) if "liveweights" in chunk)
    assert [span["version"] for span in told["spans"]] == [old, new]
    assert fleet.complete(url).json()["choices"][0]["token_ids"] == reference(path)
    stage.publish()


@pytest.mark.case("B142")
def test_an_engine_that_cannot_reset_its_cache_says_so_and_is_believed(stage: Stage) -> None:
    fleet = stage.fleet
    assert stage.live is not None
    model = stage.copy(stage.live)
    fleet.begin("no-reset", model, factory="tests.cases.no_reset_engine:build")
    try:
        fleet.admitted("no-reset")
        before, kept = settled(fleet), fleet.get("/v1/version")["rollback_to"]
        as_before(before)
        for in_flight in ("drain", "abort", "recompute"):
            policy = {"in_flight": in_flight, "cache": "reset"}
            answer = fleet.push(stage.next_good(), stage.step, id=f"no-reset-{in_flight}", policy=policy)
            document = refused(stage, before, kept, answer)
            assert (document["code"], document["outcome"]) == ("mode_unsupported", "rejected")
            assert {failure["replica"] for failure in document["failures"]} == {"no-reset"}
        stage.publish("no-reset", policy={"in_flight": "drain", "cache": "namespace"})
    finally:
        assert fleet.stop("no-reset") == 0
    assert {member["replica"] for member in fleet.get("/v1/fleet")["members"]} == set(SIZES)
    stage.publish()


# updates that fail in the middle, or come twice


def half_way(stage: Stage) -> str:
    """The fault: all parameters of layer 0 are rebound, and half of layer 1, when the rank raises."""
    assert stage.live is not None
    names = sorted(sliced(stage.live, 0, 1))
    inside = [at for at, name in enumerate(names, 1) if name.startswith("model.layers.1.")]
    assert all(at < inside[0] for at, name in enumerate(names, 1) if name.startswith("model.layers.0."))
    return f"raise:before:rebind:0:{inside[len(inside) // 2]}"


@pytest.mark.case("B148", "B174")
def test_an_install_that_fails_half_way_is_taken_back_without_the_source(stage: Stage) -> None:
    """Everywhere, from the kept copy: the live version's own files are gone by then."""
    fleet = stage.fleet
    home = stage.copy(stage.next_good())
    stage.publish(path=home)
    other = stage.next_good()
    fleet.begin("faulty", stage.copy(home), options={"fault": half_way(stage)})
    try:
        fleet.admitted("faulty")
        before = settled(fleet)
        as_before(before)
        shutil.rmtree(home)
        document = refused(stage, before, None, fleet.push(other, stage.step, id="half-way"), status=424)
        assert (document["code"], document["outcome"]) == ("rank_failed", "rolled_back")
        assert {(failure["replica"], failure["rank"]) for failure in document["failures"]} == {("faulty", 0)}
        stage.step += 1  # a decided version is used up
        stage.publish("faulty", path=other)
    finally:
        assert fleet.stop("faulty") == 0


@pytest.mark.case("B150")
def test_a_repeat_in_the_middle_joins_and_one_after_the_end_gets_the_receipt(stage: Stage) -> None:
    fleet, once = stage.fleet, stage.publish()["bytes_read"]
    path = stage.next_good()
    body: dict[str, Any] = {"id": "repeated", "policy": {"commit": "manual"}, "lease_s": HANG_S}
    with ThreadPoolExecutor(2) as waiters:
        first = waiters.submit(stage.fleet.push, path, stage.step, **body)
        fleet.until(lambda: phase(fleet, "repeated") == "ready")
        again = fleet.push(path, stage.step, wait=False, **body)
        assert (again.status_code, again.json()["phase"]) == (202, "ready")
        second = waiters.submit(stage.fleet.push, path, stage.step, **body)
        other = fleet.push(stage.good[0], stage.step + 1, **body)
        assert (other.status_code, other.json()["code"]) == (422, "id_reused")
        concurrent = fleet.push(path, stage.step, id="repeated-other")
        assert (concurrent.status_code, concurrent.json()["code"]) == (409, "busy")
        assert fleet.post("/v1/updates/repeated/commit").status_code == 202
        answers = [first.result(HANG_S), second.result(HANG_S)]
    receipt = stage.accepted(path, answers[0])
    assert answers[1].json() == receipt
    assert receipt["serial"] == again.json()["serial"]
    assert receipt["bytes_read"] == once
    after = settled(fleet)
    late = fleet.push(path, stage.step - 1, **body)
    assert (late.status_code, late.json()) == (200, receipt)
    assert settled(fleet) == after
    assert [each["id"] for each in fleet.get("/v1/history")["receipts"]].count("repeated") == 1


@pytest.mark.case("B150")
def test_a_failed_update_asked_for_again_gets_its_failure_and_another_begins_from_nothing(stage: Stage) -> None:
    fleet, once = stage.fleet, stage.publish()["bytes_read"]
    folder = stage.copy(stage.next_good())
    rewrite(folder, with_nan(tensors_of(folder)))
    first = fleet.push(folder, stage.step, id="repeated-nan")
    before = settled(fleet)
    assert (first.status_code, first.json()["code"]) == (422, "tensor_nonfinite")
    shutil.rmtree(folder)
    shutil.copytree(stage.next_good(), folder)  # repaired under the same path
    repeat = fleet.push(folder, stage.step, id="repeated-nan")
    assert repeat.json()["receipt"] == first.json()["receipt"]
    assert settled(fleet) == before
    assert stage.publish(path=folder, id="repeated-repaired")["bytes_read"] == once


def phase(fleet: LiveFleet, update: str) -> str:
    answer = fleet.client.get(f"{fleet.url}/v1/updates/{update}")
    return str(answer.json()["phase"]) if answer.status_code == 200 else ""


# versions, restarts, ways back


def labels(stage: Stage) -> set[str]:
    """The version that everything tells which tells one."""
    fleet = stage.fleet
    told = {fleet.get("/v1/version")["version"], fleet.get("/v1/fleet")["live_version"]}
    for replica in fleet.replicas.values():
        told.add(fleet.client.get(f"{replica.url}/v1/version").json()["version"])
        told.add(fleet.front(replica.url).live_version)
        answer = fleet.complete(replica.url).json()["liveweights"]
        told |= {answer["version"], *(span["version"] for span in answer["spans"])}
        metrics = fleet.client.get(f"{replica.url}/metrics").text.splitlines()
        told |= {line.split('"')[1] for line in metrics if line.startswith("liveweights_replica_version{")}
    return told


@pytest.mark.case("B168")
def test_the_version_is_told_by_everybody_from_the_commit_on_and_by_nobody_before(stage: Stage) -> None:
    fleet, path, new = stage.fleet, stage.next_good(), f"0-{stage.step}"
    old = fleet.get("/v1/version")["version"]
    assert labels(stage) == {old}
    manual: dict[str, Any] = {"policy": {"commit": "manual"}, "lease_s": HANG_S}
    begun = fleet.push(path, stage.step, wait=False, **manual)
    assert begun.status_code == 202
    fleet.until(lambda: phase(fleet, new) == "ready")
    assert labels(stage) == {old}
    assert fleet.post(f"/v1/updates/{new}/commit").status_code == 202
    stage.accepted(path, fleet.push(path, stage.step, **manual))
    assert labels(stage) == {new}
    back = fleet.post("/v1/rollback", {"target": old, "expected_live": new}, wait=True)
    assert back.status_code == 200, back.text
    assert labels(stage) == {old}
    stage.live = next(each for each in stage.good if each != path)
    stage.publish()


@pytest.mark.case("B174")
def test_the_way_back_is_the_kept_copy_and_not_the_disk(stage: Stage) -> None:
    fleet = stage.fleet
    seven, eight = stage.copy(stage.good[0]), stage.copy(stage.good[1])
    old = stage.publish(path=seven)["version"]
    held = fleet.view()
    new = stage.publish(path=eight)["version"]
    shutil.rmtree(seven)
    shutil.rmtree(eight)
    # One that needs no byte to be refused leaves the kept copy alone.
    gone = fleet.push(eight, stage.step, id="way-back-gone")
    assert (gone.status_code, gone.json()["code"], gone.json()["outcome"]) == (422, "source_missing", "rejected")
    back = fleet.post("/v1/rollback", {"target": old, "expected_live": new}, wait=True)
    assert (back.status_code, back.json()["kind"], back.json()["bytes_read"]) == (200, "rollback", 0)
    view = fleet.view()
    assert (view.digests, view.answers) == (held.digests, held.answers)
    version = fleet.get("/v1/version")
    assert (version["version"], version["digest"]) == (old, held.version["digest"])
    assert version["rollback_to"] == new
    # One that was staged has spent it, and no status says otherwise.
    folder = stage.copy(stage.good[0])
    rewrite(folder, with_nan(tensors_of(folder)))
    bad = fleet.push(folder, stage.step, id="way-back-nan")
    assert (bad.status_code, bad.json()["outcome"], bad.json()["receipt"]["rollback_to"]) == (422, "aborted", None)
    late = fleet.post("/v1/rollback", {"target": new, "expected_live": old}, wait=True)
    assert (late.status_code, late.json()["code"]) == (412, "no_rollback")
    assert fleet.view().digests == held.digests
    stage.publish(path=stage.good[1])


@contextmanager
def program(stage: Stage, name: str, model: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A replica in a process of its own; killed at the end if it still runs."""
    home, fleet = stage.home, stage.fleet
    file = Path(__file__).with_name("replica_program.py")
    arguments = [name, model, port, fleet.url, home, home / "logs" / name]
    with (home / f"{name}.log").open("ab") as log:
        process = subprocess.Popen([sys.executable, str(file), *map(str, arguments)], stdout=log, stderr=log)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(HANG_S)


@dataclass
class Asked:
    """What a client heard that never stopped asking one address: codes of the 503s, and tokens with their version."""

    url: str
    client: httpx.Client
    refused: list[str] = field(default_factory=list)
    served: list[tuple[tuple[int, ...], str]] = field(default_factory=list)

    def ask(self) -> bool:
        """Whether it was served."""
        try:
            answer = self.client.post(
                f"{self.url}/v1/completions", json={"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True}
            )
        except httpx.TransportError:
            return False  # no process listens
        told = answer.json()
        if answer.status_code != 200:
            assert answer.status_code == 503, told
            self.refused.append(told["code"])
            return False
        self.served.append((tuple(told["choices"][0]["token_ids"]), told["liveweights"]["version"]))
        return True


def member(stage: Stage, name: str) -> dict[str, Any]:
    members = stage.fleet.get("/v1/fleet")["members"]
    return next((each for each in members if each["replica"] == name), {"state": "none"})


def history(stage: Stage) -> set[tuple[str, str]]:
    """Kind and outcome of every update that ended."""
    return {(each["kind"], each["outcome"]) for each in stage.fleet.get("/v1/history")["receipts"]}


@pytest.mark.case("B166")
def test_a_killed_replica_that_comes_back_with_base_weights_serves_nothing_before_it_caught_up(
    stage: Stage,
) -> None:
    fleet, start, port = stage.fleet, stage.home / "start", free_port()
    source = stage.copy(stage.next_good())
    live = stage.publish(path=source)["version"]
    label = tuple(reference(source)), live
    client = Asked(f"http://127.0.0.1:{port}", fleet.client)
    with program(stage, "third", start, port) as process:
        fleet.until(lambda: client.ask() or process.poll() is not None)
        ranks = psutil.Process(process.pid).children()
        assert len(ranks) == 1
        process.kill()
        process.wait(HANG_S)
        assert psutil.wait_procs(ranks, timeout=HANG_S)[1] == []
        fleet.until(lambda: member(stage, "third")["state"] == "lost")
        # It is not known what it serves: no version passes it.
        blocked = fleet.push(stage.next_good(), stage.step, id="blocked")
        assert (blocked.status_code, blocked.json()["code"]) == (409, "member_blocked")
        assert {failure["replica"] for failure in blocked.json()["failures"]} == {"third"}
    hidden = source.rename(source.with_name("hidden"))
    asked = Asked(client.url, fleet.client)
    with program(stage, "third", start, port) as process:
        # It cannot catch up while the source is away, so that the time in between is as long as we want.
        fleet.until(lambda: ("catch_up", "rejected") in history(stage))
        status = fleet.front(client.url)
        assert (status.state, status.live_version) == (FrontState.JOINING, "start")
        assert not asked.ask()
        assert asked.refused == ["shut"]
        assert fleet.client.get(f"{client.url}/readyz").status_code == 503
        assert asked.served == []
        hidden.rename(source)
        # What its front does every few seconds while it is shut: it asks again.
        assert fleet.post("/v1/fleet/replicas", {"replica": "third", "url": client.url}).status_code == 201
        fleet.until(lambda: asked.ask() or process.poll() is not None)
        assert set(asked.served) == {label}
        status, digest = fleet.front(client.url), fleet.get("/v1/version")["digest"]
        assert (status.state, status.live_version, status.live_digest) == (FrontState.OPEN, live, digest)
        receipt = stage.publish()
        assert receipt["observed"] == dict.fromkeys((*SIZES, "third"), fleet.get("/v1/version")["digest"])
        status = fleet.front(client.url)
        assert (status.live_version, status.spare.state, status.spare.version) == (
            receipt["version"],
            SpareState.PREVIOUS,
            live,
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == 0
    assert member(stage, "third")["state"] == "none"
    assert set(client.served) == {label}
