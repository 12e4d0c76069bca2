"""What the bytes of a checkpoint hold, read once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from transports.digest import tensor_digest, to_hex
from transports.disk.manifests import save_manifest, write_manifest
from transports.disk.source import DiskSource
from updater.cli.against import FileContent, contents
from updater.core.errors import Aborted
from updater.protocol.manifest import Manifest, TensorEntry


def found(folder: Path) -> dict[str, FileContent]:
    with DiskSource.open(str(folder), ("/",)) as source:
        return {each.name: each for each in contents(source)}


def folder_of(home: Path, **tensors: torch.Tensor) -> Path:
    home.mkdir()
    save_file(tensors, home / "model.safetensors")
    return home


@pytest.mark.case("F05")
def test_each_tensor_is_judged_as_ranks_judge_it(tmp_path: Path) -> None:
    odd = torch.ones(4, 4)
    odd[3, 3] = float("inf")
    folder = folder_of(
        tmp_path / "v",
        sound=torch.ones(4, 4),
        odd=odd,
        zero=torch.zeros(4, 4),
        tiny=torch.full((4, 4), 9e-41),
        vector=torch.zeros(4),
        whole=torch.zeros(4, 4, dtype=torch.int32),
        none=torch.zeros(0, 4),
    )
    seen = found(folder)
    assert {name for name, each in seen.items() if each.nonfinite} == {"odd"}
    assert {name for name, each in seen.items() if each.blank} == {"zero", "tiny"}
    assert seen["zero"].digest == to_hex(tensor_digest(torch.zeros(4, 4), "F32"))
    assert seen["sound"].digest == ""
    assert {each.file for each in seen.values()} == {"model.safetensors"}


@pytest.mark.case("F05")
def test_a_large_tensor_with_one_number_at_its_end(tmp_path: Path) -> None:
    """More than one slab of it is read."""
    late = torch.zeros(3, 4 << 20)
    late[2, -1] = 1.0
    seen = found(folder_of(tmp_path / "v", late=late, zero=torch.zeros(3, 4 << 20)))
    assert not seen["late"].blank
    assert seen["zero"].blank
    assert seen["zero"].digest == to_hex(tensor_digest(torch.zeros(3, 4 << 20), "F32"))


def test_promises_are_compared_and_what_is_ignored_is_not_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "v", a=torch.ones(2, 2), b=torch.full((2, 2), float("nan")))
    made = write_manifest(str(folder))
    assert {name: each.digest == each.promised for name, each in found(folder).items()} == {"a": True, "b": True}
    entries = tuple(TensorEntry(each.name, each.dtype, each.shape, "0" * 16) for each in made.tensors)
    save_manifest(Manifest(entries, ignored=("b",)), str(folder))
    seen = found(folder)
    assert set(seen) == {"a"}
    assert seen["a"].digest != seen["a"].promised


def test_files_that_change_meanwhile_are_said(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "v", a=torch.ones(2, 2))
    with DiskSource.open(str(folder), ("/",)) as source:
        walked = contents(source)
        next(walked)
        (folder / "model.safetensors").unlink()
        save_file({"a": torch.zeros(2, 2)}, folder / "model.safetensors")
        with pytest.raises(Aborted):
            list(walked)
