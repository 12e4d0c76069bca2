"""`inspect` goes on after a fault and counts what is there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from transports.disk.manifests import write_manifest
from transports.disk.report import RankReport, inspect
from transports.disk.source import DiskSource
from transports.testing import HandMadeFile, shard_name, write_checkpoint, write_sharded
from updater.core.errors import refuse

SHARDS = [{"a": torch.ones(4, 4, dtype=torch.bfloat16), "b": torch.ones(3)}, {"c": torch.ones(2, dtype=torch.int8)}]


def test_a_sound_checkpoint(tmp_path: Path) -> None:
    write_sharded(tmp_path, SHARDS)
    report = inspect(str(tmp_path))
    assert report.sound
    assert (report.tensors, report.nbytes, report.manifest) == (3, 32 + 12 + 2, "none")
    assert [(file.file, file.tensors, file.nbytes) for file in report.files] == [
        (shard_name(1, 2), 2, 44),
        (shard_name(2, 2), 1, 2),
    ]
    assert all(file.size == (tmp_path / file.file).stat().st_size for file in report.files)
    found = [(dtype.dtype, dtype.tensors, dtype.nbytes) for dtype in report.dtypes]
    assert found == [("BF16", 1, 32), ("F32", 1, 12), ("I8", 1, 2)]
    manifest = write_manifest(str(tmp_path))
    report = inspect(str(tmp_path))
    assert (report.manifest, report.manifest_digest) == ("digests", manifest.digest)


def test_every_fault_is_reported(tmp_path: Path) -> None:
    write_sharded(tmp_path, [*SHARDS, {"d": torch.ones(1)}])
    write_manifest(str(tmp_path))
    (tmp_path / shard_name(1, 3)).write_bytes(b"short")
    HandMadeFile().data("c", "F7", (1,), b"\0").data("x", "F32", (3,), b"\0").write(tmp_path / shard_name(2, 3))
    (tmp_path / shard_name(3, 3)).unlink()
    report = inspect(str(tmp_path))
    found = {(failure.code, failure.file, failure.tensor) for failure in report.faults}
    assert {
        ("file_truncated", shard_name(1, 3), ""),
        ("file_dtype", shard_name(2, 3), "c"),
        ("file_range", shard_name(2, 3), "x"),
        ("source_missing", shard_name(3, 3), ""),
        ("manifest_mismatch", "", "d"),
    } <= found
    assert [file.readable for file in report.files] == [False, False, False]


def test_an_index_that_does_not_fit_its_shards(tmp_path: Path) -> None:
    write_sharded(tmp_path, SHARDS)
    write_checkpoint(tmp_path / shard_name(2, 2), {"d": torch.ones(1)})
    found = {(failure.code, failure.tensor) for failure in inspect(str(tmp_path)).faults}
    assert found == {("index_mismatch", "c"), ("index_mismatch", "d")}


@pytest.mark.parametrize("name", ["absent", ""])
def test_no_checkpoint_is_a_fault(tmp_path: Path, name: str) -> None:
    report = inspect(str(tmp_path / name))
    assert [failure.code for failure in report.faults] == ["source_missing"]


def test_wrapped_and_colliding_names(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model.safetensors", {"module.a": torch.ones(1)})
    report = inspect(str(tmp_path))
    assert report.sound
    assert len(report.warnings) == 1
    write_checkpoint(tmp_path / "model.safetensors", {"module.a": torch.ones(1), "a": torch.ones(1)})
    assert {(f.code, f.tensor) for f in inspect(str(tmp_path)).faults} == {
        ("tensor_duplicate", "a"),
        ("tensor_duplicate", "module.a"),
    }


def test_what_ranks_would_read_comes_from_the_caller(tmp_path: Path) -> None:
    write_sharded(tmp_path, SHARDS)

    def halves(source: DiskSource, size: int) -> list[RankReport]:
        total = sum(spec.nbytes for spec in source.specs.values())
        return [RankReport(rank, size, len(source.specs), total // size, total // size) for rank in range(size)]

    def refuses(source: DiskSource, size: int) -> list[RankReport]:
        raise refuse("placement_refused", "no rule", tensor="a")

    assert [rank.nbytes for rank in inspect(str(tmp_path), 2, halves).ranks] == [23, 23]
    assert inspect(str(tmp_path), None, halves).ranks == ()
    assert [failure.code for failure in inspect(str(tmp_path), 2, refuses).faults] == ["placement_refused"]
