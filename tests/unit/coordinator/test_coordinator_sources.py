"""How a source looks from outside, and what counts as another one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from updater.coordinator.sources import SourceSeen, changed, seen
from updater.protocol.manifest import FILE_NAME

pytestmark = pytest.mark.case("F06")

INDEX = "model.safetensors.index.json"
SHARD = "sub/model-00001-of-00001.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "ckpt"
    for name in (INDEX, SHARD, "config.json", "README.md", FILE_NAME):
        path = made / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return made


def write(name: str, text: str = "other") -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def touch(name: str, time_ns: int = 1) -> Callable[[Path], None]:
    return lambda folder: os.utime(folder / name, ns=(time_ns, time_ns))


@pytest.mark.parametrize(
    ("deed", "file"),
    [
        (write(SHARD), SHARD),
        (touch(SHARD), SHARD),
        (touch(INDEX), INDEX),
        (write("config.json"), "config.json"),
        (write("model.safetensors"), "model.safetensors"),
        (write(FILE_NAME), FILE_NAME),
        (touch(FILE_NAME), ""),  # written again with the same words
        (write("README.md"), ""),
        (write("DONE"), ""),
        (write("tokenizer.json"), ""),  # was not there when it was planned
        (lambda folder: (folder / SHARD).unlink(), ""),  # being pruned
        (lambda folder: (folder / FILE_NAME).unlink(), ""),
        (shutil.rmtree, ""),
        (
            lambda folder: [
                *map(Path.unlink, map(folder.joinpath, (INDEX, SHARD, "config.json"))),
                write(FILE_NAME)(folder),
            ],
            "",
        ),
    ],
)
def test_what_counts_as_another_source(folder: Path, deed: Callable[[Path], None], file: str) -> None:
    was = seen(str(folder))
    assert changed(was, seen(str(folder))) == ""
    deed(folder)
    assert changed(was, seen(str(folder))) == file


def test_an_index_and_a_file_alone_are_looked_at_too(folder: Path) -> None:
    index, alone = str(folder / INDEX), str(folder / SHARD)
    was = seen(index), seen(alone)
    touch(SHARD)(folder)
    assert [changed(before, seen(path)) for before, path in zip(was, (index, alone), strict=True)] == [
        SHARD,
        Path(SHARD).name,
    ]


def test_what_was_never_recorded_is_the_same(folder: Path) -> None:
    assert changed(SourceSeen(), seen(str(folder))) == ""


def test_a_file_of_another_size_is_another_one_whatever_its_time(folder: Path) -> None:
    was, before = seen(str(folder)), (folder / SHARD).stat()
    write(SHARD)(folder)
    touch(SHARD, before.st_mtime_ns)(folder)
    assert changed(was, seen(str(folder))) == SHARD


def test_a_folder_of_very_many_files_is_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert seen(str(tmp_path)) != SourceSeen()
    for number in range(10_000):
        (tmp_path / str(number)).touch()
    assert seen(str(tmp_path)) == SourceSeen()
