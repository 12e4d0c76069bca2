"""What was published as right and was not: asked of one live fleet over HTTP, from the command line and from Python.

A toy replica on two ranks, started on query, key and value projections one by one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from engine_adapter.model_files import write_shards
from engine_adapter.testing.toy.checkpoint import make_toy_checkpoint
from engine_adapter.testing.toy.slicer import expected_digests
from tests.cases.live_fleet import LiveFleet, live_fleet
from trainer_side import push
from updater.cli.main import app
from updater.core.errors import LiveweightsError

pytestmark = pytest.mark.engine

FACES = ("curl", "command", "python")
LAYOUT = {"*.qkv_proj.weight": "by_kv_head"}
Tensors = dict[str, torch.Tensor]


class Stage:
    """`start`: what it serves at first and after every test. `plain`: what is published, spelled one way or another."""

    def __init__(self, fleet: LiveFleet, home: Path) -> None:
        self.fleet, self.home = fleet, home
        self.start = make_toy_checkpoint(home / "start", seed=7)
        self.plain = make_toy_checkpoint(home / "plain", seed=8)
        self.step = 0
        fleet.begin("one", self.start, tp=2)
        fleet.admitted("one")

    def folder(self, name: str, tensors: Tensors, shards: int = 1) -> Path:
        made = self.home / name
        if not made.exists():
            made.mkdir()
            (made / "config.json").write_bytes((self.plain / "config.json").read_bytes())
            write_shards(made, tensors, shards)
        return made

    def serves(self, folder: Path) -> bool:
        return self.fleet.digests("one") == [expected_digests(folder, rank, 2) for rank in range(2)]

    @property
    def live(self) -> str:
        return str(self.fleet.get("/v1/version")["version"])


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    home = tmp_path_factory.mktemp("contents")
    with live_fleet(home) as fleet:
        yield Stage(fleet, home)


def ask(stage: Stage, face: str, path: Path, step: int, **policy: Any) -> tuple[str, Mapping[str, Any]]:
    """(code or empty, the receipt or the problem) of a publication by path."""
    if face == "curl":
        answer = stage.fleet.push(path, step, policy=policy)
        document = answer.json()
        return ("" if answer.status_code == 200 else document["code"]), document
    if face == "command":
        options = options_of(policy)
        arguments = ["push", str(path), str(step), "--url", stage.fleet.url, "--json", *options]
        ran = CliRunner().invoke(app, arguments, catch_exceptions=False)
        document = json.loads(ran.stdout)
        return ("" if ran.exit_code == 0 else document["code"]), document
    try:
        receipt = push(path, step, url=stage.fleet.url, token="", **policy)
    except LiveweightsError as error:
        failures = [{"tensor": f.tensor, "file": f.file, "hint": f.hint} for f in error.failures]
        return error.code, {"live_version": error.live_version, "failures": failures}
    return "", receipt.model_dump(mode="json")


def options_of(policy: Mapping[str, Any]) -> list[str]:
    options = [f"--layout={glob}={kind}" for glob, kind in policy.get("layouts", {}).items()]
    return options + [f"--allow-suspicious={glob}" for glob in policy.get("allow_suspicious", ())]


def said_ahead(stage: Stage, path: Path, step: int, policy: Mapping[str, Any]) -> str:
    """The code by which `inspect --against` says that a publication would be refused, or empty."""
    look = ["inspect", str(path), "--against", stage.fleet.url, "--version", str(step), "--json", *options_of(policy)]
    ran = CliRunner().invoke(app, look, catch_exceptions=False)
    code: str = json.loads(ran.stdout)["against"]["code"]
    assert ran.exit_code == (1 if code else 0)
    return code


def refused(stage: Stage, face: str, path: Path, code: str, step: int | None = None, **policy: Any) -> set[str]:
    """Names that the refusal blames, each with a way out; the fleet serves as before."""
    live, bytes_before = stage.live, stage.fleet.digests("one")
    asked = stage.step + 1 if step is None else step
    if face == "command":
        assert said_ahead(stage, path, asked, policy) == code
    found, document = ask(stage, face, path, asked, **policy)
    assert (found, document["live_version"], stage.live) == (code, live, live)
    assert stage.fleet.digests("one") == bytes_before
    assert all(failure["hint"] for failure in document["failures"])
    return {failure["file"] or failure["tensor"] for failure in document["failures"]}


def committed(stage: Stage, face: str, path: Path, **policy: Any) -> Mapping[str, Any]:
    stage.step += 1
    if face == "command":
        assert said_ahead(stage, path, stage.step, policy) == ""
    found, document = ask(stage, face, path, stage.step, **policy)
    assert found == "", document
    return document


def grouped(tensors: Tensors, heads: int = 4, kv_heads: int = 2) -> Tensors:
    """With queries, keys and values in one tensor, by head of keys."""
    held: Tensors = {}
    for name, tensor in tensors.items():
        if "q_proj.weight" in name:
            parts = [tensors[name.replace("q_proj", f"{part}_proj")].unflatten(0, (kv_heads, -1)) for part in "qkv"]
            rows = [part[group] for group in range(kv_heads) for part in parts]
            held[name.replace("q_proj", "qkv_proj")] = torch.cat(rows)
        elif "k_proj.weight" not in name and "v_proj.weight" not in name:
            held[name] = tensor
    return held


@pytest.mark.case("F03")
@pytest.mark.parametrize("face", FACES)
def test_a_folder_of_two_checkpoints(stage: Stage, face: str) -> None:
    old, new = load_file(stage.start / "model.safetensors"), load_file(stage.plain / "model.safetensors")
    folder = stage.folder("both", old, shards=2)
    save_file(new, folder / "model.safetensors")
    assert refused(stage, face, folder, "source_ambiguous") == {"model.safetensors"}
    committed(stage, face, folder / "model.safetensors")
    assert stage.serves(stage.plain)
    committed(stage, face, folder / "model.safetensors.index.json")
    assert stage.serves(stage.start)


@pytest.mark.case("F04")
@pytest.mark.parametrize("face", FACES)
def test_projections_grouped_by_head_of_keys(stage: Stage, face: str) -> None:
    fused = grouped(load_file(stage.plain / "model.safetensors"))
    folder = stage.folder("grouped", fused)
    assert refused(stage, face, folder, "layout_unproved") == {name for name in fused if "qkv_proj" in name}
    receipt = committed(stage, face, folder, layouts=LAYOUT)
    assert stage.serves(stage.plain)
    assert any("by_kv_head" in line.split() for line in receipt["warnings"])
    committed(stage, face, stage.start)


@pytest.mark.case("F04")
@pytest.mark.parametrize("transport", ["shared_memory", "broadcast"])
def test_projections_grouped_by_head_of_keys_over_a_stream(stage: Stage, transport: str) -> None:
    fused = grouped(load_file(stage.plain / "model.safetensors"))

    def send(**more: Any) -> Any:
        return push(fused, stage.step + 1, url=stage.fleet.url, token="", transport=transport, **more)

    with pytest.raises(LiveweightsError) as caught:
        send()
    assert caught.value.code == "layout_unproved"
    receipt = send(layouts=LAYOUT)
    stage.step += 1
    assert stage.serves(stage.plain)
    assert receipt.proof == "digests"
    committed(stage, "python", stage.start)


@pytest.mark.case("F05")
@pytest.mark.parametrize("face", FACES)
def test_a_tensor_of_zeros_that_no_digest_vouches_for(stage: Stage, face: str) -> None:
    tensors = load_file(stage.plain / "model.safetensors")
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    folder = stage.folder("zeros", tensors | {name: torch.zeros_like(tensors[name])})
    assert refused(stage, face, folder, "tensor_suspicious") == {name}
    receipt = committed(stage, face, folder, allow_suspicious=[name])
    assert stage.serves(folder)
    assert any(name in line.split() for line in receipt["warnings"] if line.startswith("allowed"))
    committed(stage, face, stage.start)


@pytest.mark.case("F06")
@pytest.mark.parametrize("face", FACES)
def test_a_folder_that_was_written_over_and_pushed_again(stage: Stage, face: str) -> None:
    folder = stage.folder(f"latest-{face}", load_file(stage.plain / "model.safetensors"))
    first = committed(stage, face, folder)
    again = ask(stage, face, folder, stage.step)
    assert again == ("", first)
    save_file(load_file(stage.start / "model.safetensors"), folder / "model.safetensors")
    assert refused(stage, face, folder, "stale_version", step=stage.step) == {"model.safetensors"}
    committed(stage, face, folder)
    assert stage.serves(stage.start)
