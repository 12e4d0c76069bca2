"""vLLM servers that were started otherwise than on their folder alone: with overrides of its config, with a KV
connector, with dummy weights.

The tests of this file share one engine and run in order: the first meets it before it is admitted.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from engine_adapter.models import encode, reference_tokens
from engine_adapter.rank.messages import running_document
from engine_adapter.vllm.configs import ServerConfig
from engine_adapter.vllm.connectors import ALLOW
from tests.vllm_server.fleet import IN_CORE, Coordinator, Fleet, coordinator, member, until
from tests.vllm_server.models import PROMPTS, Checkpoints
from tests.vllm_server.server import StartFailed, VllmServer, reserved_port, running, wait_ready
from updater.cli.main import app
from updater.protocol.model_config import config_part, view

COUNT = 32
CONNECTOR = "ExampleConnector"
#: All but its last two tokens lie in whole blocks of the cache.
PROMPT = (5 * "a prompt that lies in more than one block of the cache; ")[: 2 * 128 + 2]
#: What the shared engine's folder says otherwise than the checkpoints, and what it is told to read. To override
#: `rope_theta` does nothing where a config has `rope_parameters`, as these have: it runs on theirs.
SAID: dict[str, Any] = {"rms_norm_eps": 0.5}
TOLD: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 37.0}
#: What it was started on, and what it was told in vain.
UNLIKE = SAID | {"rope_parameters": {"rope_theta": 37.0, "rope_type": "default"}}
#: Seconds, which only a hang reaches.
LIMIT_S = 120.0


def with_config(source: Path, target: Path, **changes: Any) -> Path:
    """A copy of a checkpoint whose config says something else."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    return target


def connector(home: Path) -> tuple[str, ...]:
    """Of a tier that is keyed by tokens alone and has no reset."""
    tier = home / "tier"
    tier.mkdir(exist_ok=True)
    extra = {"shared_storage_path": str(tier)}
    config = {"kv_connector": CONNECTOR, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return ("--kv-transfer-config", json.dumps(config))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("started-otherwise")


@pytest.fixture(scope="module")
def made(checkpoints: Callable[..., Checkpoints]) -> Checkpoints:
    return checkpoints("llama")


@pytest.fixture(scope="module")
def at(made: Checkpoints, home: Path) -> Iterator[Coordinator]:
    """Of a fleet that lives on what came by a stream, and that no replica is left of."""
    with coordinator(home / "coordinator", [made.first.parent, home]) as found:
        stream_to_another(found, made, home)
        assert found.get("/v1/fleet")["members"] == []
        yield found


def stream_to_another(at: Coordinator, made: Checkpoints, home: Path) -> None:
    """To a replica of our own, which starts in seconds and leaves."""
    log = home / "embedded.log"
    with reserved_port() as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        options = ("--model", str(made.first), "--port", str(port), "--coordinator", at.url, "--replica", "embedded")
        command = [sys.executable, "-m", "updater.cli.main", "engine", *options]
        with running(command, log, os.environ) as process:
            wait_ready(process, client, "/readyz", log)
            embedded = VllmServer(str(client.base_url), str(made.first), process, log, client)
            fleet = Fleet(at, embedded, made.first, made.second, made.first)
            with fleet.stream(made.second) as (session, tensors):
                for name, tensor in tensors.items():
                    session.put(name, tensor)
                session.seal()
                assert session.wait().outcome == "committed"


@pytest.fixture(scope="module")
def fleet(made: Checkpoints, home: Path, at: Coordinator) -> Iterator[Fleet]:
    start = with_config(made.first, home / "start", **SAID)
    arguments = ("--hf-overrides", json.dumps(TOLD), *connector(home))
    roots = [made.first.parent, home]
    with member(
        start,
        home / "server.log",
        at,
        roots=roots,
        arguments=arguments,
        environment={ALLOW: CONNECTOR},
        joined=False,
    ) as server:
        found = Fleet(at, server, made.first, made.second, made.first, home=home)
        found.steps = iter(range(10, 1000))
        yield found


def in_core(replica: str, *arguments: str) -> dict[str, Any]:
    """Of a server that is not waited for beyond its start, with one process less to start."""
    return {"replica": replica, "joined": False, **IN_CORE, "arguments": (*IN_CORE["arguments"], *arguments)}


def serves(fleet: Fleet, path: Path) -> bool:
    answers = [fleet.server.complete(prompt, COUNT).tokens for prompt in PROMPTS]
    return answers == [expected(path, prompt) for prompt in PROMPTS]


def expected(path: Path, prompt: str) -> tuple[int, ...]:
    return reference_tokens(path, encode(prompt), COUNT).tokens


def status_of(at: Coordinator) -> str:
    """What `liveweights status` prints."""
    shell = CliRunner().invoke(app, ["status", "--url", at.url], env={"COLUMNS": "1000"})
    return " ".join(shell.output.split())


def by_code(failures: list[dict[str, Any]], code: str) -> list[dict[str, Any]]:
    return [failure for failure in failures if failure["code"] == code]


@pytest.mark.case("F24")
def test_a_server_that_cannot_catch_up_says_why_everywhere_and_opens_with_the_next_folder(fleet: Fleet) -> None:
    at, client = fleet.coordinator, fleet.server.client
    until(lambda: at.get("/v1/fleet")["members"], "it asked to be taken in", LIMIT_S)

    def why() -> list[dict[str, Any]]:
        return by_code(at.get("/v1/fleet")["members"][0]["failures"], "no_source")

    until(why, "the coordinator says why not", LIMIT_S)
    (said,) = why()
    assert (said["replica"], bool(said["hint"])) == ("vllm", True)
    until(lambda: by_code(client.get("/readyz").json()["failures"], "no_source"), "so does the server", LIMIT_S)
    for answer in (client.get("/readyz"), at.client.get("/readyz")):
        assert answer.status_code == 503
        (told,) = by_code(answer.json()["failures"], "no_source")
        assert told["hint"] == said["hint"]
    assert "no_source" in status_of(at)
    assert said["hint"] in status_of(at)
    for log in (at.log, fleet.server.log):
        until(lambda log=log: "no_source" in log.read_text(errors="replace"), "it is in the log", LIMIT_S)
    # What the hint says.
    receipt = fleet.publish(fleet.first)
    assert [each["state"] for each in receipt["members"]] == ["open"]
    assert client.get("/readyz").status_code == 200
    assert serves(fleet, fleet.first)
    assert by_code(at.get("/v1/fleet")["members"][0]["failures"], "no_source") == []


@pytest.mark.case("F01", "F64")
def test_a_folder_is_held_against_what_the_server_was_told_to_read(fleet: Fleet) -> None:
    """Its tokens show what it runs on: neither what its folder says, nor what an override without effect asked for."""
    receipt = fleet.publish(fleet.second, require_config=True)
    assert receipt["compared"] == {"config": "engine", "tokenizer": "engine", "quantisation": "engine"}
    assert [text for text in receipt["warnings"] if text.startswith("config")] == []
    assert serves(fleet, fleet.second)


@pytest.mark.case("F01", "F64")
def test_a_folder_with_the_values_of_the_start_folder_is_refused_by_key_unless_allowed(fleet: Fleet) -> None:
    keys = {"rope_parameters.rope_theta": ("37", "100"), "rms_norm_eps": ("0.5", "1e-06")}
    path = with_config(fleet.first, fleet.home / "as-it-started", **UNLIKE)
    problem = fleet.publish(path, expect=422)
    assert {(each["code"], each["file"]) for each in problem["failures"]} == {("config_mismatch", "config.json")}
    named = {each["message"].split(" ")[0]: each["message"] for each in problem["failures"]}
    assert named.keys() == keys.keys()
    assert all(value in named[key] for key, values in keys.items() for value in values)
    assert serves(fleet, fleet.second)
    receipt = fleet.publish(path, allow_config=["rope_theta", "rms_norm_eps"])
    assert (receipt["outcome"], receipt["compared"]["config"]) == ("committed", "engine")
    kept = fleet.coordinator.get(f"/v1/updates/{receipt['id']}")["receipt"]["warnings"]
    assert [key for key in keys for text in kept if key in text and "allowed" in text] == list(keys)
    assert serves(fleet, fleet.first)  # these weights, and the engine's own values


@pytest.mark.case("F01")
def test_a_folder_with_another_tokenizer_is_refused(fleet: Fleet) -> None:
    before = fleet.path
    path = fleet.home / "other-tokenizer"
    shutil.copytree(fleet.second, path)
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    one, other = sorted(vocabulary)[:2]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    file.write_text(json.dumps(tokenizer))
    problem = fleet.publish(path, expect=422)
    assert {(each["code"], each["file"]) for each in problem["failures"]} == {("config_mismatch", "tokenizer.json")}
    fleet.path = before


@pytest.mark.case("F07")
def test_a_tier_that_was_allowed_is_named_in_every_receipt_and_does_answer_with_older_keys(fleet: Fleet) -> None:
    fleet.publish(fleet.first)
    fleet.server.complete(PROMPT, 1)  # leaves its keys and values in the tier
    receipt = fleet.publish(fleet.second, cache="reset")
    kept = fleet.coordinator.get(f"/v1/updates/{receipt['id']}")["receipt"]
    for each in (receipt, kept):
        assert each["outcome"] == "committed"
        assert [text for text in each["warnings"] if ALLOW in text and CONNECTOR in text]
    answer = fleet.server.complete(PROMPT, COUNT)
    assert answer.body["liveweights"]["version"] == receipt["version"]
    assert answer.tokens != expected(fleet.second, PROMPT)  # what the warning is about
    assert serves(fleet, fleet.second)  # prompts that the tier has nothing of
    back = fleet.coordinator.rollback(receipt["rollback_to"], receipt["version"])
    assert [text for text in back["warnings"] if ALLOW in text]
    fleet.path = fleet.first


@pytest.mark.case("F07")
def test_a_server_with_such_a_tier_ends_before_it_listens_and_names_the_class(
    made: Checkpoints, home: Path, at: Coordinator
) -> None:
    log = home / "refused.log"
    options = in_core("tier", *connector(home))
    with pytest.raises(StartFailed) as raised, member(made.first, log, at, **options):
        raise AssertionError("it listens")
    assert raised.value.code is not None
    assert f"{ALLOW}={CONNECTOR}" in raised.value.output
    assert "tier" not in {each["replica"] for each in at.get("/v1/fleet")["members"]}


@pytest.mark.case("F24")
def test_a_server_of_dummy_weights_is_not_taken_in_and_says_what_to_start_it_with(
    made: Checkpoints, home: Path, at: Coordinator
) -> None:
    options = in_core("dummy", "--load-format", "dummy")
    with member(made.first, home / "dummy.log", at, **options) as server:

        def why() -> list[dict[str, Any]]:
            return [each for each in at.get("/v1/fleet")["refused"] if each["replica"] == "dummy"]

        until(why, "the coordinator says why not", LIMIT_S)
        until(lambda: by_code(why(), "placement_refused"), "it tried to prove its weights", LIMIT_S)
        (said,) = why()
        assert "--load-format" in said["hint"]
        answer = server.client.get("/readyz")
        assert answer.status_code == 503
        (told,) = by_code(answer.json()["failures"], "placement_refused")
        assert told["hint"] == said["hint"]
        assert "placement_refused" in status_of(at)
        assert said["hint"] in status_of(at)
        with pytest.raises(httpx.HTTPStatusError) as caught:
            server.complete(PROMPTS[0], 1)
        problem = caught.value.response
        assert (problem.status_code, len(by_code(problem.json()["failures"], "placement_refused"))) == (503, 1)
        for log in (at.log, server.log):
            until(lambda log=log: "placement_refused" in log.read_text(errors="replace"), "it is in the log", LIMIT_S)


# ----- what vLLM makes of its options, without an engine

ROTARY: dict[str, Any] = {"rope_type": "linear", "factor": 8.0, "rope_theta": 37.0}
OVERRIDES: dict[str, Any] = {
    "none": {},
    "plain": {"rms_norm_eps": 0.5},
    "no effect": {"rope_theta": 37.0},
    "object": {"rope_parameters": {"rope_theta": 37.0, "rope_type": "default"}},
    "older spelling": {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 37.0}},
    "null": {"rope_scaling": None},
    "function": lambda config: config.update({"rms_norm_eps": 0.25, "rope_parameters": ROTARY}) or config,
}


@pytest.mark.case("F01", "F64")
@pytest.mark.parametrize(
    "start",
    [{"rope_type": "default", "rope_theta": 100.0}, {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}],
)
@pytest.mark.parametrize("name", OVERRIDES)
def test_a_document_says_what_vllm_made_of_its_overrides(
    made: Checkpoints, tmp_path: Path, name: str, start: Mapping[str, Any]
) -> None:
    folder = with_config(made.first, tmp_path / "start", rope_parameters=start)
    runs = configured(folder, hf_overrides=OVERRIDES[name])
    found = running_document(str(folder), ServerConfig(runs)).config
    assert found is not None
    rotary = {f"rope_parameters.{key}": value for key, value in (runs.hf_config.rope_parameters or {}).items()}
    seen = view(found)
    assert {key: value for key, value in seen.items() if key.startswith("rope")} == rotary
    assert seen["rms_norm_eps"] == runs.hf_config.rms_norm_eps
    plain = running_document(str(folder), ServerConfig(configured(folder))).config
    assert plain is not None
    untouched = seen.keys() | view(plain).keys()
    assert [
        key
        for key in untouched
        if seen.get(key) != view(plain).get(key) and key != "rms_norm_eps" and not key.startswith("rope")
    ] == []


@pytest.mark.case("F01", "F64")
def test_config_and_tokenizer_of_other_folders_are_the_ones_that_count(made: Checkpoints, tmp_path: Path) -> None:
    start = with_config(made.first, tmp_path / "start", **SAID)
    (start / "tokenizer.json").write_text((start / "tokenizer.json").read_text().replace('"merges"', '"merge"'))
    runs = configured(start, hf_config_path=str(made.second), tokenizer=str(made.second))
    found, plain = running_document(str(start), ServerConfig(runs)), running_document(str(made.second), object())
    assert (found.config, found.tokenizer) == (plain.config, plain.tokenizer)


@pytest.mark.case("F01", "F64")
def test_overrides_of_a_part_that_is_a_config_itself_leave_the_rest_of_it_as_its_file_says(made: Checkpoints) -> None:
    text = json.loads((made.first / "config.json").read_text())
    read = {"model_type": "llava", "text_config": text, "vision_config": {"model_type": "clip_vision_model"}}
    told = {"text_config": {"rms_norm_eps": 0.5, "rope_theta": 37.0}}
    transformers: Any = import_module("transformers")
    configs: Any = import_module("vllm.config")
    runs = transformers.LlavaConfig.from_dict(deepcopy(read))
    object.__new__(configs.ModelConfig)._apply_dict_overrides(runs, told)
    said = ServerConfig(SimpleNamespace(model="m", hf_config=runs, hf_overrides=told)).running_config(deepcopy(read))
    seen, plain = view(config_part(said)), view(config_part(read))
    assert {key: value for key, value in seen.items() if value != plain.get(key)} == {"rms_norm_eps": 0.5}
    assert seen.keys() == plain.keys()


def configured(folder: Path, **options: Any) -> Any:
    configs: Any = import_module("vllm.config")
    return configs.ModelConfig(model=str(folder), dtype="bfloat16", **{"tokenizer": str(folder), **options})
