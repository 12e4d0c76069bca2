"""A config that changes a forward pass is refused before anything is staged: over HTTP, from Python, by command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from engine_adapter.models import make_versions
from engine_adapter.replica.launch import ENGINES
from engine_adapter.testing.toy.checkpoint import make_toy_checkpoint
from tests.cases.live_fleet import LiveFleet, live_fleet
from trainer_side import Pusher, push
from transports.disk.manifests import write_manifest
from updater.cli.main import app
from updater.core.errors import Rejected

pytestmark = pytest.mark.engine

ALL = {"config": "engine", "tokenizer": "none", "quantisation": "engine"}
NONE = dict.fromkeys(ALL, "none")


@pytest.fixture(scope="module", params=["toy", "transformers"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveFleet]:
    home = tmp_path_factory.mktemp(request.param)
    if request.param == "toy":
        for number in range(2):
            make_toy_checkpoint(home / f"v{number + 1}", seed=number)
    else:
        make_versions(home, 2, seed=5)
    with live_fleet(home) as made:
        made.begin("a", home / "v1", factory=ENGINES[request.param])
        made.admitted("a")
        yield made


def folder(fleet: LiveFleet, name: str, **changes: Any) -> Path:
    """The second version with another config."""
    made = fleet.home / name
    shutil.copytree(fleet.home / "v2", made)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | changes))
    return made


def step(fleet: LiveFleet) -> int:
    run_step = fleet.get("/v1/version")["version"]
    return 1 if run_step == "start" else int(run_step.split("-")[1]) + 1


def rope(fleet: LiveFleet, theta: float) -> dict[str, Any]:
    config = json.loads((fleet.home / "v1" / "config.json").read_text())
    return (
        {"rope_parameters": {**config["rope_parameters"], "rope_theta": theta}}
        if "rope_parameters" in config
        else {"rope_theta": theta}
    )


@pytest.mark.case("F01")
@pytest.mark.parametrize("manifest", [False, True])
def test_another_config_is_refused_by_key_with_both_values(fleet: LiveFleet, manifest: bool, tmp_path: Path) -> None:
    path = folder(fleet, f"other-{manifest}", rms_norm_eps=0.5, **rope(fleet, 37.0))
    if manifest:
        write_manifest(str(path))
    before = fleet.get("/v1/version")
    answer = fleet.push(path, step(fleet))
    told = answer.json()
    assert (answer.status_code, told["code"]) == (422, "config_mismatch")
    named = {failure["message"].split(" ")[0]: failure for failure in told["failures"]}
    assert set(named) == {"rms_norm_eps", "rope_parameters.rope_theta"}
    assert "0.5" in named["rms_norm_eps"]["message"]
    assert "37" in named["rope_parameters.rope_theta"]["message"]
    assert all(failure["hint"] and failure["replica"] == "a" for failure in named.values())
    assert fleet.get("/v1/version") == before
    with pytest.raises(Rejected) as caught:
        push(path, step(fleet), url=fleet.url)
    assert caught.value.code == "config_mismatch"
    shell = CliRunner().invoke(app, ["push", str(path), str(step(fleet)), "--url", fleet.url, "--json"])
    assert (shell.exit_code, json.loads(shell.stdout)["code"]) == (1, "config_mismatch")
    shutil.rmtree(path)


@pytest.mark.case("F01")
def test_what_is_allowed_is_published_and_said(fleet: LiveFleet) -> None:
    path = folder(fleet, "allowed", rms_norm_eps=0.5, **rope(fleet, 37.0))
    with pytest.raises(Rejected):
        push(path, step(fleet), url=fleet.url, allow_config=["rope_theta"])
    receipt = push(path, step(fleet), url=fleet.url, allow_config=["rope_theta", "rms_norm_eps"])
    assert receipt.outcome == "committed"
    assert asdict(receipt.compared) | {"tokenizer": "none"} == ALL
    told = [text for text in receipt.warnings if "allowed" in text]
    assert len(told) == 2
    assert any("0.5" in text for text in told)
    again = fleet.get(f"/v1/updates/{receipt.id}")["receipt"]
    assert again["compared"] == asdict(receipt.compared)


@pytest.mark.case("F01", "F02")
def test_another_save_of_the_same_model_is_the_same(fleet: LiveFleet) -> None:
    path = folder(
        fleet, "saved-anew", transformers_version="9.9", _name_or_path="/x", torch_dtype="float16", use_cache=False,
        rms_norm_eps=json.loads((fleet.home / "v1" / "config.json").read_text())["rms_norm_eps"],
    )  # fmt: skip
    receipt = push(path, step(fleet), url=fleet.url, policy={"require_config": True})
    assert receipt.compared.config == "engine"
    assert not [text for text in receipt.warnings if text.startswith("config")]


@pytest.mark.case("F01")
def test_a_source_without_a_config_is_not_compared(fleet: LiveFleet) -> None:
    bare = fleet.home / f"bare-{step(fleet)}"
    bare.mkdir()
    shutil.copy(fleet.home / "v2" / "model.safetensors", bare)
    answer = fleet.push(bare, step(fleet), policy={"require_config": True})
    assert (answer.status_code, answer.json()["code"]) == (422, "config_required")
    receipt = fleet.push(bare, step(fleet)).json()
    assert (receipt["outcome"], receipt["compared"]) == ("committed", NONE)
    with Pusher(fleet.url, transport="shared_memory") as pusher:
        weights = load_file(fleet.home / "v2" / "model.safetensors")
        streamed = pusher.push(weights, step(fleet))
    assert (streamed.outcome, streamed.compared.config) == ("committed", "none")


@pytest.mark.case("F01")
def test_a_streamed_folder_says_what_its_config_is(fleet: LiveFleet) -> None:
    path = folder(fleet, "streamed", rms_norm_eps=0.5)
    with pytest.raises(Rejected) as caught:
        push(path, step(fleet), url=fleet.url, transport="shared_memory")
    assert caught.value.code == "config_mismatch"


@pytest.mark.case("F01")
@pytest.mark.parametrize("transport", ["broadcast", "shared_memory", "disk"])
def test_config_from_says_what_a_state_dict_is_of(fleet: LiveFleet, transport: str, tmp_path: Path) -> None:
    weights = load_file(fleet.home / "v2" / "model.safetensors")
    other, directory = folder(fleet, f"of-{transport}", rms_norm_eps=0.5), fleet.home / "pushed"
    chosen: dict[str, Any] = {"transport": transport, "directory": directory if transport == "disk" else None}
    with Pusher(fleet.url, config_from=other, **chosen) as pusher, pytest.raises(Rejected) as caught:
        pusher.push(weights, step(fleet))
    assert caught.value.code == "config_mismatch"
    assert any("rms_norm_eps" in failure.message for failure in caught.value.failures)
    with Pusher(fleet.url, config_from=fleet.home / "v2", **chosen) as pusher:
        receipt = pusher.push(weights, step(fleet), policy={"require_config": True})
    assert (receipt.outcome, receipt.compared.config) == ("committed", "engine")


@pytest.mark.case("F01")
@pytest.mark.parametrize("fleet", ["transformers"], indirect=True)
@pytest.mark.parametrize("transport", ["broadcast", "shared_memory", "disk"])
def test_a_model_says_its_own_config(fleet: LiveFleet, transport: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(fleet.home / "v2")
    model.config.use_cache, model.config.attention_dropout = False, 0.1
    chosen: dict[str, Any] = {"transport": transport}
    if transport == "disk":
        chosen["directory"] = fleet.home / "pushed"
    with Pusher(fleet.url, **chosen) as pusher:
        receipt = pusher.push(model, step(fleet), policy={"require_config": True})
        assert (receipt.outcome, asdict(receipt.compared)) == ("committed", ALL)
        assert not [text for text in receipt.warnings if text.startswith("config")]
        model.config.rms_norm_eps = 0.5
        with pytest.raises(Rejected) as caught:
            pusher.push(model, step(fleet))
        assert caught.value.code == "config_mismatch"
        assert any("rms_norm_eps" in failure.message for failure in caught.value.failures)
        assert pusher.push(model, step(fleet), allow_config=["rms_norm_eps"]).outcome == "committed"
        assert asdict(pusher.push(model.state_dict(), step(fleet)).compared) == NONE


@pytest.mark.case("F01")
def test_a_folder_is_held_against_the_fleet_before_it_is_pushed(fleet: LiveFleet) -> None:
    def look(path: Path, *more: str) -> tuple[int, Any]:
        found = CliRunner().invoke(app, ["inspect", str(path), "--against", fleet.url, "--json", *more])
        return found.exit_code, json.loads(found.stdout)["against"]

    code, told = look(fleet.home / "v2")
    assert (code, told["refused"], told["compared"]["config"]) == (0, [], "engine")
    path = folder(fleet, "looked-at", rms_norm_eps=0.5)
    code, told = look(path)
    assert (code, [each["code"] for each in told["refused"]]) == (1, ["config_mismatch"])
    assert look(path, "--allow-config", "rms_norm_eps")[0] == 0
    assert CliRunner().invoke(app, ["inspect", str(path), "--against", fleet.url]).exit_code == 1


@pytest.mark.case("F65")
@pytest.mark.parametrize("text", ["{", '{"x": ' + "[" * 5000 + "]" * 5000 + "}", json.dumps({"x": "y" * 100_000})])
def test_a_config_that_cannot_be_compared_is_refused(fleet: LiveFleet, text: str) -> None:
    path = folder(fleet, f"odd-{len(text)}")
    (path / "config.json").write_text(text)
    answer = fleet.push(path, step(fleet))
    assert (answer.status_code, answer.json()["code"]) == (422, "config_mismatch")
    assert {failure["file"] for failure in answer.json()["failures"]} == {"config.json"}


@pytest.mark.case("F02", "F64")
def test_who_joins_runs_on_the_same_config(tmp_path: Path) -> None:
    with live_fleet(tmp_path) as fleet:
        first = make_toy_checkpoint(tmp_path / "v1", seed=1)
        fleet.begin("a", first)
        fleet.admitted("a")
        other = tmp_path / "other"
        shutil.copytree(first, other)
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps(config | {"transformers_version": "9.9", "dtype": "float16"}))
        fleet.begin("b", other)
        fleet.admitted("b")
        differs = tmp_path / "differs"
        shutil.copytree(first, differs)
        (differs / "config.json").write_text(json.dumps(config | {"rope_theta": 37.0}))
        fleet.begin("c", differs)
        replica = fleet.replicas["c"]
        fleet.until(lambda: replica.face.front is not None)
        answer = fleet.post("/v1/fleet/replicas", {"replica": "c", "url": replica.url})
        assert answer.json()["code"] == "config_mismatch"
        assert any("rope_theta" in failure["message"] for failure in answer.json()["failures"])
        assert {member["replica"] for member in fleet.get("/v1/fleet")["members"]} == {"a", "b"}
