"""`liveweights inspect DIR --against URL` says of a folder what a push of it would end with, and changes nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from engine_adapter.models import make_versions
from engine_adapter.replica.launch import ENGINES
from tests.cases.live_fleet import LiveFleet, live_fleet
from transports.disk.manifests import write_manifest
from updater.cli.main import app
from updater.cli.steps import Exit

pytestmark = pytest.mark.engine

Weights = dict[str, torch.Tensor]
LAYER = "model.layers.0"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveFleet]:
    home = tmp_path_factory.mktemp("fleet")
    make_versions(home, 2, seed=5)
    with live_fleet(home) as made:
        made.begin("a", home / "v1", factory=ENGINES["transformers"])
        made.admitted("a")
        assert made.push(home / "v1", 0).status_code == 200  # so that there is something to go back to
        yield made


def weights_of(folder: Path) -> Weights:
    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


def rewritten(change: Callable[[Weights], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        weights = weights_of(folder)
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        change(weights)
        save_file({name: each.contiguous() for name, each in weights.items()}, folder / "model.safetensors")

    return apply


def config(**changes: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return apply


def drop(weights: Weights) -> None:
    del weights[f"{LAYER}.mlp.up_proj.weight"]


def add(weights: Weights) -> None:
    weights["model.layers.0.more.weight"] = torch.ones(2, 2)


def cut(weights: Weights) -> None:
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1]


def integers(weights: Weights) -> None:
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int32)


def widen(weights: Weights) -> None:
    for name, each in weights.items():
        weights[name] = each.to(torch.float64)


def zero(weights: Weights) -> None:
    weights[f"{LAYER}.mlp.up_proj.weight"].zero_()


def odd(weights: Weights) -> None:
    weights["model.norm.weight"][0] = float("nan")


def other(weights: Weights) -> None:
    weights["model.norm.weight"].add_(1.0)


def two_faults(folder: Path) -> None:
    rewritten(drop)(folder)
    config(rms_norm_eps=0.5, hidden_act="gelu")(folder)


def beside(folder: Path) -> None:
    """An index with its shards, and a newer file of the same names."""
    weights = weights_of(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(weights, folder / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({name: each + 1 for name, each in weights.items()}, folder / "model.safetensors")


def truncated(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])


def changed_since(folder: Path) -> None:
    """Its manifest of digests is of other bytes."""
    write_manifest(str(folder))
    rewritten(other)(folder)


def blank_and_meant(folder: Path) -> None:
    rewritten(zero)(folder)
    write_manifest(str(folder))


#: (what is wrong with the folder, options of both commands, how it ends: empty for published). Layouts: test_contents.
TABLE: dict[str, tuple[Callable[[Path], None], tuple[str, ...], str]] = {
    "sound": (lambda folder: None, (), ""),
    "missing": (rewritten(drop), (), "tensor_missing"),
    "additional": (rewritten(add), (), "tensor_unexpected"),
    "shape": (rewritten(cut), (), "tensor_shape"),
    "dtype": (rewritten(integers), (), "tensor_dtype"),
    "narrowing": (rewritten(widen), (), "tensor_narrowing"),
    "narrowing allowed": (rewritten(widen), ("--narrow", "F64:F32", "--narrow", "F64:BF16"), ""),
    "ambiguous": (beside, (), "source_ambiguous"),
    "truncated": (truncated, (), "file_truncated"),
    "config": (config(rms_norm_eps=0.5), (), "config_mismatch"),
    "config allowed": (config(rms_norm_eps=0.5), ("--allow-config", "rms_norm_eps"), ""),
    "no config": (lambda folder: (folder / "config.json").unlink(), ("--require-config",), "config_required"),
    "no digests": (lambda folder: None, ("--require-digests",), "manifest_required"),
    "no numbers": (rewritten(zero), (), "tensor_suspicious"),
    "no numbers allowed": (rewritten(zero), ("--allow-suspicious", "*.up_proj.*"), ""),
    "no numbers and meant": (blank_and_meant, (), ""),
    "nan": (rewritten(odd), (), "tensor_nonfinite"),
    "nan allowed": (rewritten(odd), ("--allow-nonfinite",), ""),
    "other bytes": (changed_since, (), "tensor_digest"),
    "mode": (lambda folder: None, ("--in-flight", "keep"), "mode_unsupported"),
    "two faults": (two_faults, (), "tensor_missing"),
}


def ask(*words: str) -> tuple[int, Any]:
    ran = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    return ran.exit_code, json.loads(ran.stdout)


def next_step(fleet: LiveFleet) -> str:
    return str(int(fleet.get("/v1/version")["version"].split("-")[1]) + 1)


@pytest.mark.case("F01", "F03", "F05", "F26")
@pytest.mark.parametrize("name", TABLE)
def test_the_verdict_is_that_of_a_push(fleet: LiveFleet, name: str) -> None:
    spoil, options, expected = TABLE[name]
    path = fleet.home / name.replace(" ", "-")
    shutil.copytree(fleet.home / "v2", path)
    spoil(path)
    before = fleet.view(), fleet.get("/v1/version")
    code, told = ask("inspect", str(path), "--against", fleet.url, *options)
    against = told["against"]
    assert (against["would_be_refused"], against["code"]) == (bool(expected), expected)
    assert code == (Exit.REFUSED if expected else Exit.OK)
    assert (fleet.view(), fleet.get("/v1/version")) == before
    pushed, receipt = ask("push", str(path), next_step(fleet), "--url", fleet.url, *options)
    assert pushed == code
    if expected:
        assert receipt["code"] == expected
        assert {each["tensor"] for each in receipt["failures"]} <= {each["tensor"] for each in against["refused"]}
        assert (receipt["hint"] == "") <= (against["hint"] == "")
    else:
        assert (receipt["outcome"], receipt["compared"]) == ("committed", against["compared"])
    shutil.rmtree(path)


@pytest.mark.case("F01")
def test_all_that_is_wrong_is_said_at_once(fleet: LiveFleet) -> None:
    path = fleet.home / "much"
    shutil.copytree(fleet.home / "v2", path)
    two_faults(path)
    _, told = ask("inspect", str(path), "--against", fleet.url)
    found = [each["code"] for each in told["against"]["refused"]]
    assert found == ["tensor_missing", "config_mismatch", "config_mismatch"]


@pytest.mark.case("F05")
def test_what_is_live_without_numbers_may_come_again(fleet: LiveFleet) -> None:
    path = fleet.home / "blank"
    shutil.copytree(fleet.home / "v2", path)
    blank_and_meant(path)
    streamed = ("--transport", "shared_memory")  # whose manifest the fleet keeps
    assert ask("push", str(path), next_step(fleet), "--url", fleet.url, *streamed)[0] == Exit.OK
    (path / "liveweights.manifest.json").unlink()
    code, told = ask("inspect", str(path), "--against", fleet.url)
    assert (code, told["against"]["refused"]) == (Exit.OK, [])
    assert ask("push", str(path), next_step(fleet), "--url", fleet.url)[0] == Exit.OK


@pytest.mark.case("F01")
def test_a_version_is_judged_where_it_is_named_and_values_are_left_alone_where_that_is_asked(fleet: LiveFleet) -> None:
    path = str(fleet.home / "v2")
    code, told = ask("inspect", path, "--against", fleet.url, "--version", "0")
    assert (code, told["against"]["code"]) == (Exit.REFUSED, "stale_version")
    shutil.copytree(path, fleet.home / "values")
    rewritten(odd)(fleet.home / "values")
    code, told = ask("inspect", str(fleet.home / "values"), "--against", fleet.url, "--headers")
    assert (code, told["against"]["content"]) == (Exit.OK, "not read")


@pytest.mark.case("F01")
def test_people_read_a_verdict(fleet: LiveFleet) -> None:
    ran = CliRunner().invoke(app, ["inspect", str(fleet.home / "v2"), "--against", fleet.url])
    assert ran.exit_code == Exit.OK
    path = fleet.home / "read"
    shutil.copytree(fleet.home / "v2", path)
    config(rms_norm_eps=0.5)(path)
    ran = CliRunner().invoke(app, ["inspect", str(path), "--against", fleet.url])
    assert ran.exit_code == Exit.REFUSED
    assert "config_mismatch" in ran.stdout
    assert "--allow-config rms_norm_eps" in ran.stdout
    assert CliRunner().invoke(app, ["inspect", str(path), "--against", "http://127.0.0.1:9"]).exit_code == 3


@pytest.mark.case("F01")
def test_a_push_can_be_a_dry_run(fleet: LiveFleet) -> None:
    before = fleet.get("/v1/version")
    code, receipt = ask("push", str(fleet.home / "v2"), next_step(fleet), "--url", fleet.url, "--dry-run")
    assert (code, receipt["outcome"]) == (Exit.OK, "planned")
    assert fleet.get("/v1/version") == before


@pytest.mark.case("F26")
@pytest.mark.parametrize("dtypes", ["engine", "BF16"])
def test_a_stream_from_the_command_line_is_cast(fleet: LiveFleet, dtypes: str) -> None:
    path = fleet.home / f"wide-{dtypes}"
    shutil.copytree(fleet.home / "v2", path)
    rewritten(widen)(path)
    words = ("push", str(path), next_step(fleet), "--url", fleet.url, "--transport", "shared_memory")
    refused, told = ask(*words)
    assert (refused, told["code"]) == (Exit.REFUSED, "tensor_narrowing")
    pushed, receipt = ask(*words, "--dtypes", dtypes)
    assert (pushed, receipt["outcome"], receipt["proof"]) == (Exit.OK, "committed", "digests")
