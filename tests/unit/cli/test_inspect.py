"""`inspect`: what lies in a checkpoint, what each rank would read, and every fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine_adapter.models import ModelShape, make_model
from transports.disk.source import DiskSource
from updater.cli.inspect import look
from updater.cli.main import app
from updater.cli.steps import Exit

SHAPE = ModelShape(hidden=64, layers=1, heads=4, kv_heads=2, head_dim=8, intermediate=64, vocab=260)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), SHAPE, shards=2)


def shape_bytes(model: Path, *suffixes: str) -> int:
    with DiskSource.open(str(model), ["/"]) as source:
        return sum(spec.nbytes for name, spec in source.specs.items() if name.endswith(suffixes))


def test_a_sound_checkpoint(model: Path) -> None:
    report = look(model, None)
    assert report.sound
    assert [file.file for file in report.files] == [f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)]
    assert report.nbytes == shape_bytes(model, "")
    assert [one.dtype for one in report.dtypes] == ["BF16"]
    assert report.ranks == ()


def test_one_rank_reads_everything_once(model: Path) -> None:
    (whole,) = look(model, 1).ranks
    assert (whole.rank, whole.size, whole.nbytes) == (0, 1, shape_bytes(model, ""))


def test_two_ranks_share_what_is_cut_and_both_read_the_rest(model: Path) -> None:
    ranks = look(model, 2).ranks
    whole = shape_bytes(model, "norm.weight", "embed_tokens.weight")
    cut = shape_bytes(model, "") - whole
    assert [rank.nbytes for rank in ranks] == [whole + cut // 2] * 2


def test_heads_are_replicated_over_more_ranks_than_heads(model: Path) -> None:
    ranks = look(model, 4).ranks
    whole = shape_bytes(model, "norm.weight", "embed_tokens.weight")
    kv = shape_bytes(model, "k_proj.weight", "v_proj.weight")
    rest = shape_bytes(model, "") - whole - kv
    assert [rank.nbytes for rank in ranks] == [whole + kv // 2 + rest // 4] * 4


def test_what_cannot_be_cut_is_a_fault(model: Path) -> None:
    report = look(model, 3)
    assert not report.sound
    assert report.faults[0].code == "placement_refused"


def test_another_family_is_a_warning_and_no_fault(model: Path, tmp_path: Path) -> None:
    copy = make_model(tmp_path / "other", SHAPE)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"model_type": "something_else"}))
    report = look(copy, 2)
    assert report.sound
    assert report.ranks == ()
    assert len(report.warnings) == 1


def test_faults_are_listed_and_set_the_exit_code(tmp_path: Path) -> None:
    broken = make_model(tmp_path / "broken", SHAPE, shards=2)
    for file in broken.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-10])
    ran = CliRunner().invoke(app, ["inspect", str(broken), "--tp", "2", "--json"], catch_exceptions=False)
    assert ran.exit_code == Exit.REFUSED
    report = json.loads(ran.stdout)
    assert report["sound"] is False
    assert {fault["file"] for fault in report["faults"]} == {f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)}
    table = CliRunner().invoke(app, ["inspect", str(broken)], catch_exceptions=False)
    assert table.exit_code == Exit.REFUSED


def test_the_table_of_a_sound_one(model: Path) -> None:
    ran = CliRunner().invoke(app, ["inspect", str(model), "--tp", "2"], catch_exceptions=False)
    assert ran.exit_code == 0
    assert "1 of 2" in ran.stdout
