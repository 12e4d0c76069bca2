"""Read calls that bring less than was asked for, or nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from transports.base import Box, Read
from transports.disk import DiskSource
from transports.reader import ReaderOptions, fill
from transports.requests import Limits, Place
from transports.testing import refused, write_checkpoint
from updater.manifest import TensorSpec

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

    options = ReaderOptions(threads=3, limits=Limits(request=64))
    with DiskSource.open(str(tmp_path), (str(tmp_path),), options=options) as source:
        with refused("read_failed"):
            source.read([Read("t", Box.whole((64, 64)), torch.empty(64, 64))], progress=progress)


def test_pages_may_be_given_back(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model.safetensors", {"t": torch.arange(4096.0)})
    with DiskSource.open(str(tmp_path), (str(tmp_path),), options=ReaderOptions(drop_cache=True)) as source:
        target = torch.zeros(4096)
        source.read([Read("t", Box.whole((4096,)), target)])
        assert torch.equal(target, torch.arange(4096.0))
