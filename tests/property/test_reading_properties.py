"""Reading any region of any tensor into any target gives the bytes that indexing gives."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transports.base import Box, Read
from transports.disk.io_plan import ReadLimits
from transports.disk.reader import ReaderOptions
from transports.disk.source import DiskSource
from transports.dtypes import DTYPE_NAMES, TORCH_DTYPES, carrier, itemsize
from transports.testing import write_checkpoint

NAMES = sorted(name for name in TORCH_DTYPES if name != "F4")
CASTS = ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.float32))
SETTINGS = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def content(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = itemsize(DTYPE_NAMES[dtype])
    data = torch.randint(0, 256, (prod(shape) * size,), dtype=torch.uint8, generator=generator)
    return (data & 1 if dtype is torch.bool else data).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(carrier(tensor.element_size()))


@st.composite
def targets(draw: st.DrawFn, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A strided view with these sizes inside a larger tensor filled with 0x55, dimensions in any memory order."""
    order = draw(st.permutations(range(len(sizes))))
    margins = [draw(st.sampled_from((0, 0, 1, 3))) for _ in sizes]
    room = [sizes[dim] + margins[dim] for dim in order]
    raw = torch.full((prod(room) * torch.empty((), dtype=dtype).element_size(),), 0x55, dtype=torch.uint8)
    if dtype is torch.bool:
        raw.fill_(1)
    back = [order.index(dim) for dim in range(len(sizes))]
    return raw.view(dtype).reshape(room).permute(back)[tuple(slice(0, size) for size in sizes)]


@st.composite
def limits(draw: st.DrawFn) -> ReadLimits:
    return ReadLimits(
        draw(st.sampled_from((1, 8, 32))), draw(st.sampled_from((16, 64, 4096))), draw(st.sampled_from((32, 128)))
    )


@given(st.data())
@SETTINGS
def test_any_region_into_any_target(tmp_path: Path, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 7), max_size=4).map(tuple))
    cast = data.draw(st.sampled_from((None, None, *CASTS)))
    stored = cast[0] if cast else TORCH_DTYPES[data.draw(st.sampled_from(NAMES))]
    wanted = cast[1] if cast else stored
    before, tensor = content(torch.uint8, (5,), 1), content(stored, shape, data.draw(st.integers(0, 99)))
    write_checkpoint(tmp_path / "model.safetensors", {"a": before, "b": tensor})
    start = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    least = data.draw(st.sampled_from((0, 1, 1, 1)))
    size = tuple(data.draw(st.integers(least, extent - at)) for extent, at in zip(shape, start, strict=True))
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    region = tensor[Box(start, size).slices()].permute(order) if shape else tensor
    target = data.draw(targets(tuple(region.shape), wanted))
    options = ReaderOptions(threads=data.draw(st.integers(1, 3)), limits=data.draw(limits()), poison=True)
    with DiskSource.open(str(tmp_path), (str(tmp_path),), options=options) as source:
        rest = torch.zeros(5, dtype=torch.uint8)
        reads = [Read("b", Box(start, size), target, order), Read("a", Box.whole((5,)), rest)]
        report = source.read(reads)
        assert report.bytes_asked == source.bytes_to_ask(reads)
        planned = [Read(r.name, r.box, torch.empty_like(r.target, device="meta"), r.permute) for r in reads]
        assert report.bytes_asked == source.bytes_to_ask(planned)
        assert report.bytes_delivered == region.numel() * stored.itemsize + 5
    expected = region.to(wanted)
    if cast:
        # Which NaN a cast makes of a NaN differs between torch's vector and scalar code: any NaN will do there.
        assert torch.equal(target.isnan(), expected.isnan())
        target, expected = target.masked_fill(target.isnan(), 0), expected.masked_fill(expected.isnan(), 0)
    assert torch.equal(bits(target), bits(expected))
    assert torch.equal(rest, before)


@given(st.data())
@SETTINGS
def test_nothing_beside_the_target_is_written(tmp_path: Path, data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    tensor = content(torch.uint8, (rows, columns), 3)
    write_checkpoint(tmp_path / "model.safetensors", {"t": tensor})
    room = torch.full((rows + 2, columns + 2), 0x55, dtype=torch.uint8)
    expected = room.clone()
    expected[1:-1, 1:-1] = tensor
    options = ReaderOptions(threads=1, limits=data.draw(limits()))
    with DiskSource.open(str(tmp_path), (str(tmp_path),), options=options) as source:
        source.read([Read("t", Box.whole((rows, columns)), room[1:-1, 1:-1])])
    assert torch.equal(room, expected)


@pytest.mark.parametrize("permute", [None, (0, 1, 2)])
def test_dimensions_of_size_one_may_differ(tmp_path: Path, permute: tuple[int, ...] | None) -> None:
    tensor = content(torch.float32, (4, 1, 6), 5)
    write_checkpoint(tmp_path / "model.safetensors", {"t": tensor})
    target = torch.zeros(1, 4, 6)
    with DiskSource.open(str(tmp_path), (str(tmp_path),)) as source:
        source.read([Read("t", Box.whole((4, 1, 6)), target, permute)])
    assert torch.equal(bits(target.reshape(4, 1, 6)), bits(tensor))
