"""The digest against an independent definition, over random shapes, dtypes, boxes and strides."""

from __future__ import annotations

from math import prod

import digest_reference
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from transports.base import Box
from transports.digest import MASK, add, region_digest, tensor_digest
from transports.dtypes import TORCH_DTYPES, itemsize

NAMES = sorted(name for name in TORCH_DTYPES if name != "F4")
small = st.lists(st.integers(1, 9), max_size=4).map(tuple)
wide = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(63, 66))
shapes = st.one_of(small, small, wide)


def random_tensor(name: str, shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, bytes]:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (prod(shape) * itemsize(name),), dtype=torch.uint8, generator=generator)
    if name == "BOOL":  # torch itself makes other bytes 1 when it copies
        data &= 1
    return data.view(TORCH_DTYPES[name]).reshape(shape), bytes(data.tolist())


@st.composite
def tensors(draw: st.DrawFn) -> tuple[str, tuple[int, ...], torch.Tensor, bytes]:
    name, shape = draw(st.sampled_from(NAMES)), draw(shapes)
    tensor, data = random_tensor(name, shape, draw(st.integers(0, 2**32)))
    return name, shape, tensor, data


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    start = tuple(draw(st.integers(0, size)) for size in shape)
    return Box(start, tuple(draw(st.integers(0, size - at)) for size, at in zip(shape, start, strict=True)))


@given(st.data(), tensors())
@settings(max_examples=120, deadline=None)
def test_any_box_equals_the_reference(data: st.DataObject, drawn) -> None:
    name, shape, tensor, raw = drawn
    box = data.draw(boxes(shape))
    wanted = digest_reference.digest(raw, shape, itemsize(name), box.start, box.size)
    assert region_digest(tensor[box.slices()] if shape else tensor, shape, name, box) == wanted


@given(st.data(), tensors())
@settings(max_examples=80, deadline=None)
def test_a_cut_anywhere_adds_up(data: st.DataObject, drawn) -> None:
    name, shape, tensor, _ = drawn
    assume(shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(0, shape[dim]))
    low = Box((0,) * len(shape), tuple(cut if at == dim else n for at, n in enumerate(shape)))
    high = Box(
        tuple(cut if at == dim else 0 for at in range(len(shape))),
        tuple(n - cut if at == dim else n for at, n in enumerate(shape)),
    )
    halves = [region_digest(tensor[box.slices()], shape, name, box) for box in (low, high)]
    assert add(*halves) == tensor_digest(tensor, name)


@given(st.data(), tensors())
@settings(max_examples=80, deadline=None)
def test_strides_do_not_matter(data: st.DataObject, drawn) -> None:
    name, shape, tensor, _ = drawn
    order = data.draw(st.permutations(range(len(shape))))
    back = sorted(range(len(shape)), key=lambda at: order[at])
    strided = tensor.permute(order).contiguous().permute(back)
    assert region_digest(strided, shape, name, Box.whole(shape)) == tensor_digest(tensor, name)


@given(st.data(), tensors())
@settings(max_examples=80, deadline=None)
def test_one_flipped_bit_shows(data: st.DataObject, drawn) -> None:
    name, _, tensor, _ = drawn
    flipped = tensor.clone().contiguous()
    raw = flipped.view(-1).view(torch.uint8)
    at = data.draw(st.integers(0, raw.numel() - 1))
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    assert tensor_digest(flipped, name) != tensor_digest(tensor, name)


@given(st.integers(2, 40), st.integers(2, 40), st.integers(0, 2**32), st.data())
@settings(max_examples=60, deadline=None)
def test_swapped_rows_and_columns_show(rows: int, columns: int, seed: int, data: st.DataObject) -> None:
    tensor, _ = random_tensor("BF16", (rows, columns), seed)
    bits = tensor.view(torch.int16)
    for dim, extent in ((0, rows), (1, columns)):
        one, two = data.draw(st.integers(0, extent - 1)), data.draw(st.integers(0, extent - 1))
        order = list(range(extent))
        order[one], order[two] = order[two], order[one]
        swapped = bits.index_select(dim, torch.tensor(order))
        changed = not torch.equal(swapped, bits)
        assert (tensor_digest(swapped.view(torch.bfloat16)) != tensor_digest(tensor)) == changed


@given(st.integers(1, 20), st.integers(1, 30), st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_swapped_k_and_v_show(rows: int, columns: int, seed: int) -> None:
    k, _ = random_tensor("BF16", (rows, columns), seed)
    v, _ = random_tensor("BF16", (rows, columns), seed + 1)
    assume(not torch.equal(k.view(torch.int16), v.view(torch.int16)))
    right, wrong = torch.cat([k, v]), torch.cat([v, k])
    assert tensor_digest(right) != tensor_digest(wrong)
    whole = (2 * rows, columns)
    top, bottom = Box((0, 0), (rows, columns)), Box((rows, 0), (rows, columns))
    parts = region_digest(k, whole, "BF16", top) + region_digest(v, whole, "BF16", bottom)
    assert parts & MASK == tensor_digest(right)
