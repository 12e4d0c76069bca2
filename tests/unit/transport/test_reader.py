"""Read calls that bring less than was asked for, or nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from transports.base import Box, Read
from transports.disk.io_plan import Place, ReadLimits
from transports.disk.reader import ReaderOptions, fill
from transports.disk.source import DiskSource
from transports.testing import refused, write_checkpoint
from updater.protocol.manifest import TensorSpec

DATA = bytes(range(256))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    fd = os.open(path, os.O_RDONLY)
    yield Place(fd, "file", TensorSpec("t", "U8", (256,)), 0)
    os.close(fd)


@pytest.mark.parametrize("most", [1, 3, 7, 64, 1000])
def test_short_reads_are_continued(place: Place, most: int) -> None:
    """As a network file system may answer: at most so many bytes, whatever was asked for."""

    def stingy(fd: int, buffers: list[memoryview], offset: int) -> int:
        data = os.pread(fd, min(most, sum(map(len, buffers))), offset)
        rest = data
        for buffer in buffers:
            part = rest[: len(buffer)]
            buffer[: len(part)] = part
            rest = rest[len(part) :]
        return len(data)

    room = bytearray(200)
    view = memoryview(room)
    fill(place, [view[:10], view[10:17], view[17:200]], 40, stingy)
    assert bytes(room) == DATA[40:240]


def test_a_file_that_ends_early(place: Place) -> None:
    with refused("file_truncated", tensors=["t"], files=["file"]):
        fill(place, [memoryview(bytearray(10))], 250)


def test_a_device_that_fails(place: Place) -> None:
    def broken(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with refused("read_failed", tensors=["t"], files=["file"]):
        fill(place, [memoryview(bytearray(10))], 0, broken)


def test_a_callback_that_raises_is_a_typed_error_and_ends_all_threads(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model.safetensors", {"t": torch.ones(64, 64)})

    def progress(_bytes: int) -> None:
        raise ValueError

    options = ReaderOptions(threads=3, limits=ReadLimits(request=64))
    with DiskSource.open(str(tmp_path), (str(tmp_path),), options=options) as source:
        with refused("read_failed"):
            source.read([Read("t", Box.whole((64, 64)), torch.empty(64, 64))], progress=progress)


def test_pages_may_be_given_back(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model.safetensors", {"t": torch.arange(4096.0)})
    with DiskSource.open(str(tmp_path), (str(tmp_path),), options=ReaderOptions(drop_cache=True)) as source:
        target = torch.zeros(4096)
        source.read([Read("t", Box.whole((4096,)), target)])
        assert torch.equal(target, torch.arange(4096.0))


def test_more_rows_than_buffers_of_one_call(tmp_path: Path) -> None:
    tensor = torch.arange(1300 * 8, dtype=torch.int16).view(1300, 8)
    write_checkpoint(tmp_path / "model.safetensors", {"t": tensor})
    target = torch.zeros(1300, 11, dtype=torch.int16)
    options = ReaderOptions(limits=ReadLimits(run=1))
    with DiskSource.open(str(tmp_path), (str(tmp_path),), options=options) as source:
        source.read([Read("t", Box.whole((1300, 8)), target[:, 2:10])])
    assert torch.equal(target[:, 2:10], tensor)
    assert not target[:, :2].any()
    assert not target[:, 10:].any()


def test_more_tensors_than_buffers_of_one_call(tmp_path: Path) -> None:
    tensors = {f"t{at:04d}": torch.tensor([at, at + 1]) for at in range(1300)}
    write_checkpoint(tmp_path / "model.safetensors", tensors)
    targets = {name: torch.zeros(2, dtype=torch.int64) for name in tensors}
    with DiskSource.open(str(tmp_path), (str(tmp_path),)) as source:
        source.read([Read(name, Box.whole((2,)), target) for name, target in targets.items()])
    assert all(torch.equal(targets[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("run", [1, 1000])
def test_columns_into_a_transposed_target(tmp_path: Path, run: int) -> None:
    tensor = torch.arange(6 * 8, dtype=torch.int16).view(6, 8)
    write_checkpoint(tmp_path / "model.safetensors", {"t": tensor})
    target = torch.zeros(4, 6, dtype=torch.int16)
    with DiskSource.open(str(tmp_path), (str(tmp_path),), options=ReaderOptions(limits=ReadLimits(run=run))) as source:
        source.read([Read("t", Box((0, 2), (6, 4)), target, (1, 0))])
    assert torch.equal(target, tensor[:, 2:6].t())


@pytest.mark.parametrize(
    ("box", "asked"),
    [
        (Box((16, 0), (8, 64)), 8 * 64),  # rows: exactly the shard
        (Box((0, 16), (32, 32)), 32 * 32),  # long runs: exactly the shard
        (Box((0, 60), (32, 4)), 32 * 4),  # short runs between long gaps: the gaps are left out
        (Box((0, 10), (32, 50)), 32 * 50),  # long runs between short gaps: too
    ],
)
def test_bytes_asked_for_are_those_of_the_shard(tmp_path: Path, box: Box, asked: int) -> None:
    assert asked_for(tmp_path, box, ReadLimits(run=20)) == asked


def test_bytes_asked_for_short_runs_between_short_gaps_are_at_most_the_tensor(tmp_path: Path) -> None:
    assert asked_for(tmp_path, Box((0, 16), (32, 32)), ReadLimits(run=40)) == 32 * 64 - 32


def asked_for(folder: Path, box: Box, limits: ReadLimits) -> int:
    """Of a tensor of 32 x 64 bytes."""
    write_checkpoint(folder / "model.safetensors", {"t": torch.zeros(32, 64, dtype=torch.uint8)})
    with DiskSource.open(str(folder), (str(folder),), options=ReaderOptions(limits=limits)) as source:
        read = Read("t", box, torch.empty(box.size, dtype=torch.uint8))
        return source.read([read]).bytes_asked
