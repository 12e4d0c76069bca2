"""Reload mode: a stock vLLM server without our worker extension, published to by way of vLLM's own reload.

The tests of this file share one engine and run in order: the last but one leaves it out of service.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from safetensors.torch import load_file, save_file

from engine_adapter.models import encode, reference_tokens
from engine_adapter.vllm.private import CLIENT_CALLS, NAMES, choose_mode, installed_version
from engine_adapter.vllm.reload.ranks import NAME, WARNINGS
from engine_adapter.vllm.settings import COORDINATOR, MODE, REPLICA, ROOTS, WAIT_S, Mode
from tests.vllm_server.fleet import Fleet, coordinator, until
from tests.vllm_server.models import PROMPTS, Checkpoints
from tests.vllm_server.server import VllmServer, serve
from transports.disk.manifests import write_manifest

COUNT = 48
_SPEC = find_spec("vllm")
#: Where vLLM lies.
ROOT = Path(_SPEC.origin or "").parents[1] if _SPEC is not None else Path()
_HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]


@pytest.fixture(scope="module")
def fleet(checkpoints: Callable[..., Checkpoints], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made, home = checkpoints("llama"), tmp_path_factory.mktemp("reload-mode")
    roots = [made.first.parent, home]
    with coordinator(home / "coordinator", roots) as at:
        environment = {
            "VLLM_PLUGINS": "liveweights",
            MODE: "reload",
            REPLICA: "reloaded",
            ROOTS: os.pathsep.join(str(root) for root in roots),
            COORDINATOR: at.url,
            WAIT_S: "2",
        }
        with serve(made.first, home / "server.log", ready="/readyz", environment=environment) as server:
            yield Fleet(at, server, made.first, made.second, made.first, home=home)


def serves(fleet: Fleet, path: Path) -> bool:
    """Whether every prompt is answered by this checkpoint, under the live version."""
    answers = [fleet.server.complete(prompt, COUNT) for prompt in PROMPTS]
    return [answer.tokens for answer in answers] == [
        reference_tokens(path, encode(prompt), COUNT).tokens for prompt in PROMPTS
    ] and all(answer.body["liveweights"]["version"] == fleet.live for answer in answers)


def altered(fleet: Fleet, name: str, drop: str = "") -> Path:
    """A copy of the checkpoint that is not live, without the tensor `drop`."""
    folder = fleet.home / name
    shutil.copytree(fleet.other, folder)
    file = folder / "model.safetensors"
    save_file({key: tensor for key, tensor in load_file(file).items() if key != drop}, file, {"format": "pt"})
    return folder


def test_a_publication_serves_the_new_tokens_and_says_that_nothing_was_verified_on_the_ranks(fleet: Fleet) -> None:
    assert serves(fleet, fleet.first)
    prompt = 3 * PROMPTS[1]  # of more than one block: what is cached under the old weights must not be met
    fleet.server.complete(prompt, COUNT)
    source = altered(fleet, "promised")
    write_manifest(str(source))
    receipt = fleet.publish(source)
    assert (receipt["outcome"], receipt["proof"], receipt["install"]) == ("committed", "structure_only", "none")
    assert set(WARNINGS) <= set(receipt["warnings"])
    assert 0 < receipt["tensors_changed"] <= receipt["tensors"]
    assert serves(fleet, fleet.second)
    assert fleet.server.complete(prompt, COUNT).tokens == reference_tokens(fleet.second, encode(prompt), COUNT).tokens
    answer = fleet.server.client.post("/liveweights/v1/participant/v1/describe", json={}).json()
    assert (answer["engine"], len(answer["ranks"])) == (NAME, 1)
    assert set(WARNINGS) <= set(answer["capabilities"]["notes"])


def test_there_is_no_way_back(fleet: Fleet) -> None:
    until(lambda: fleet.coordinator.get("/v1/version")["rollback_to"] is None, "the coordinator knows")
    body = {"target": "start", "expected_live": fleet.live}
    answer = fleet.coordinator.client.post("/v1/rollback", params={"wait": "true"}, json=body)
    assert (answer.status_code, answer.json()["code"]) == (412, "no_rollback")
    assert serves(fleet, fleet.path)


def test_what_is_unlike_the_start_checkpoint_or_not_asked_of_a_disk_is_refused_before_the_pause(fleet: Fleet) -> None:
    lacking = altered(fleet, "lacking", drop="model.norm.weight")
    problem = fleet.publish(lacking, expect=422)
    assert [(failure["code"], failure["tensor"]) for failure in problem["failures"]] == [
        ("tensor_missing", "model.norm.weight")
    ]
    assert problem["outcome"] == "rejected"
    assert fleet.publish(fleet.other, expect=422, in_flight="keep", cache="namespace")["code"] == "mode_unsupported"
    assert fleet.publish(fleet.other, expect=422, require_digests=True)["code"] == "mode_unsupported"
    assert serves(fleet, fleet.path)


def test_a_source_that_is_gone_before_the_commit_is_never_reloaded(fleet: Fleet) -> None:
    doomed = altered(fleet, "doomed")
    end = committed(fleet, doomed, lambda: shutil.rmtree(doomed))
    assert (end["outcome"], end["failures"][0]["code"]) == ("aborted", "source_missing")
    until(lambda: fleet.server.client.get("/readyz").status_code == 200, "it reopened")
    assert serves(fleet, fleet.path)


def committed(fleet: Fleet, path: Path, before: Callable[[], None]) -> dict[str, Any]:
    """Staged, verified, then `before()`, then the commit: the receipt."""
    step, client = next(fleet.steps), fleet.coordinator.client
    body = {"version": step, "path": str(path), "policy": {"commit": "manual"}, "id": f"by-hand-{step}"}
    assert client.post("/v1/updates", json=body).status_code == 202
    at = f"/v1/updates/by-hand-{step}"
    until(lambda: fleet.coordinator.get(at)["phase"] == "ready", "the update is verified")
    before()
    assert client.post(f"{at}/commit").status_code == 202
    until(lambda: fleet.coordinator.get(at)["receipt"] is not None, "the update ended")
    receipt: dict[str, Any] = fleet.coordinator.get(at)["receipt"]
    return receipt


def test_a_reload_that_fails_leaves_the_replica_shut_and_its_engine_alone(fleet: Fleet) -> None:
    before = {process.pid for process in fleet.server.processes()}
    with no_more_files(fleet.server):
        end = committed(fleet, fleet.other, lambda: None)
    assert end["outcome"] == "rolled_back"
    assert [member["state"] for member in end["members"]] == ["quarantined"]
    client = fleet.server.client
    assert client.get("/readyz").status_code == 503
    for _ in range(2):
        with pytest.raises(httpx.HTTPStatusError) as caught:
            fleet.server.complete(PROMPTS[0], 1)
        assert caught.value.response.status_code == 503
    answer = client.post("/liveweights/v1/replica/v1/readmit", json={})
    assert (answer.status_code, answer.json()["code"]) == (422, "mode_unsupported")
    assert client.get("/readyz").status_code == 503
    # vLLM ends itself when it has to run on what a failed reload left: it was not asked to.
    assert client.get("/health").status_code == 200
    assert {process.pid for process in fleet.server.processes()} == before
    assert json.loads(client.get("/liveweights/v1/version").text)["state"] == "quarantined"


@contextmanager
def no_more_files(server: VllmServer) -> Iterator[None]:
    """The engine's processes can open nothing: a fault that no check of a checkpoint sees coming."""
    workers = server.processes()[1:]
    old = [process.rlimit(psutil.RLIMIT_NOFILE) for process in workers]
    for process in workers:
        process.rlimit(psutil.RLIMIT_NOFILE, (3, _HARD))
    try:
        yield
    finally:
        for process, limits in zip(workers, old, strict=True):
            process.rlimit(psutil.RLIMIT_NOFILE, limits)


def test_this_release_was_tried_and_has_every_listed_name() -> None:
    assert choose_mode(Mode.STAGED, installed_version()) == (Mode.STAGED, ())
    client = source_of("vllm/v1/engine/async_llm.py")
    assert [name for name in CLIENT_CALLS if f"async def {name}(" not in client] == []
    assert [name for name in NAMES if not is_there(name)] == []


def is_there(name: str) -> bool:
    """Its last part is defined in vLLM: in the module that the name says, or in any where it names only a class."""
    path, _, last = name.rpartition(".")
    module = path
    while module and not (ROOT / f"{module.replace('.', '/')}.py").is_file():
        module = module.rpartition(".")[0]
    where = source_of(f"{module.replace('.', '/')}.py") if module == path else everything()
    return re.search(rf"(?:class|def) {last}\b|^    {last}:|\.{last}(?::[^=\n]+)? = ", where, re.MULTILINE) is not None


def source_of(file: str) -> str:
    return (ROOT / file).read_text()


@cache
def everything() -> str:
    return "\n".join(path.read_text() for path in (ROOT / "vllm").rglob("*.py"))
