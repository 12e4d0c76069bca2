"""The digest's test vectors, its refusals, and types that need care."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from transports.base import Box
from transports.digest import (
    COLUMN_SEED,
    ROW_SEED,
    add,
    from_hex,
    multiplier,
    multipliers,
    region_digest,
    tensor_digest,
    to_hex,
)

DOCUMENT = Path(__file__).parents[3] / "docs" / "digest.md"
BF16 = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.bfloat16)


def test_the_documented_vectors() -> None:
    wanted = re.findall(r"\| `([0-9a-f]{16})` \|", DOCUMENT.read_text())
    found = [
        tensor_digest(BF16),
        region_digest(BF16[:, :1], (1, 3), "BF16", Box((0, 0), (1, 1))),
        region_digest(BF16[:, 1:], (1, 3), "BF16", Box((0, 1), (1, 2))),
        tensor_digest(torch.arange(12.0).view(3, 4)),
        tensor_digest(torch.arange(32, dtype=torch.uint8).view(2, 2, 8)),
    ]
    assert [to_hex(digest) for digest in found] == wanted
    assert add(found[1], found[2]) == found[0]


@pytest.mark.parametrize("seed", [ROW_SEED, COLUMN_SEED])
@pytest.mark.parametrize("first", [0, 1000, (1 << 18) - 3, 1 << 40])
def test_vectorised_multipliers(seed: int, first: int) -> None:
    found = multipliers(seed, first, 7, torch.device("cpu")).tolist()
    assert [value & (1 << 64) - 1 for value in found] == [multiplier(seed, first + at) for at in range(7)]
    assert all(value & 1 for value in found)


def test_zeros_count_and_emptiness_does_not() -> None:
    digests = {tensor_digest(torch.zeros(size)) for size in (1, 2, 3, 4)}
    assert len(digests) == 4
    assert 0 not in digests
    assert tensor_digest(torch.empty(0, 5)) == 0
    assert tensor_digest(torch.empty(5, 0)) == 0


def test_joined_columns_taken_apart_in_every_dimension() -> None:
    """A convolution kernel: its trailing dimensions are one row, and a box cuts all of them."""
    kernel = torch.randn(5, 3, 4, 3)
    total = 0
    for d0, s0 in ((0, 2), (2, 3)):
        for d1, s1 in ((0, 1), (1, 2)):
            for d2, s2 in ((0, 3), (3, 1)):
                for d3, s3 in ((0, 1), (1, 2)):
                    box = Box((d0, d1, d2, d3), (s0, s1, s2, s3))
                    total = add(total, region_digest(kernel[box.slices()], kernel.shape, "F32", box))
    assert total == tensor_digest(kernel)


def test_rows_of_every_expert() -> None:
    """A box over a middle dimension: its rows are not consecutive."""
    experts = torch.randn(3, 6, 70, dtype=torch.float16)
    boxes = [Box((0, low, 0), (3, size, 70)) for low, size in ((0, 2), (2, 4))]
    for regions in ([experts[box.slices()] for box in boxes], [experts[box.slices()].contiguous() for box in boxes]):
        parts = [region_digest(part, experts.shape, "F16", box) for part, box in zip(regions, boxes, strict=True)]
        assert add(*parts) == tensor_digest(experts)


def test_memory_that_begins_inside_a_word() -> None:
    flat = torch.randint(0, 1 << 15, (1 + 6 * 10,), dtype=torch.int16)
    assert tensor_digest(flat[1:].view(6, 10)) == tensor_digest(flat[1:].clone().view(6, 10))
    room = torch.randint(0, 1 << 15, (6, 11), dtype=torch.int16)
    assert tensor_digest(room[:, :10]) == tensor_digest(room[:, :10].clone())


def test_more_words_than_one_tile_and_one_table() -> None:
    """Long rows, many rows: every loop of the fast path goes round more than once."""
    long = torch.randint(0, 256, (1_300_001,), dtype=torch.uint8)
    cut = 1_100_003
    halves = [
        region_digest(long[low : low + size], long.shape, "U8", Box((low,), (size,)))
        for low, size in ((0, cut), (cut, long.numel() - cut))
    ]
    assert add(*halves) == tensor_digest(long)
    tall = torch.randint(0, 1 << 15, (300_000, 3), dtype=torch.int16)
    top, rest = Box((0, 0), (7, 3)), Box((7, 0), (299_993, 3))
    halves = [region_digest(tall[box.slices()], tall.shape, "I16", box) for box in (top, rest)]
    assert add(*halves) == tensor_digest(tall)


def test_packed_elements_are_bytes() -> None:
    packed = torch.randint(0, 256, (6, 40), dtype=torch.uint8)
    shape = (6, 80)
    whole = tensor_digest(packed, "F4", shape)
    assert whole == tensor_digest(packed)
    left = region_digest(packed[:, :9], shape, "F4", Box((0, 0), (6, 18)))
    right = region_digest(packed[:, 9:], shape, "F4", Box((0, 18), (6, 62)))
    assert add(left, right) == whole
    with pytest.raises(ValueError):
        region_digest(packed[:, :9], shape, "F4", Box((0, 0), (6, 17)))


@pytest.mark.parametrize(
    ("region", "shape", "dtype", "box"),
    [
        (torch.zeros(2, 2), (4, 4), "F32", Box((3, 0), (2, 2))),
        (torch.zeros(2, 3), (4, 4), "F32", Box((0, 0), (2, 2))),
        (torch.zeros(4), (2, 2), "F32", Box((0, 0), (2, 2))),
        (torch.zeros(2, 2), (4, 4), "BF16", Box((0, 0), (2, 2))),
    ],
)
def test_what_does_not_fit_is_refused(region: torch.Tensor, shape: tuple[int, ...], dtype: str, box: Box) -> None:
    with pytest.raises(ValueError):
        region_digest(region, shape, dtype, box)


def test_hex_goes_both_ways() -> None:
    for value in (0, 1, (1 << 64) - 1, 1 << 63):
        assert from_hex(to_hex(value)) == value
    for text in ("", "0" * 15, "g" * 16):
        with pytest.raises(ValueError):
            from_hex(text)


def test_a_tensor_that_requires_gradients() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 3))
    assert tensor_digest(weight) == tensor_digest(torch.ones(3, 3))
