"""Which dtypes may meet: an exact widening must come back bit by bit, for every value there is."""

from __future__ import annotations

import pytest
import torch

from engine_adapter.placement.casts import EXACT, Cast, cast_between
from transports.dtypes import TORCH_DTYPES, carrier


def every_value(name: str) -> torch.Tensor:
    """All bit patterns of types up to two bytes, many of wider ones; no NaN, whose payload is not promised."""
    dtype = TORCH_DTYPES[name]
    kind = carrier(dtype.itemsize)
    if dtype.itemsize <= 2:
        bits = torch.arange(256**dtype.itemsize).to(kind)
    else:
        info = torch.iinfo(kind)
        bits = torch.randint(info.min, info.max, (4096,), dtype=kind, generator=torch.Generator().manual_seed(0))
    values = bits.view(dtype)
    return values[~values.isnan()] if dtype.is_floating_point else values


@pytest.mark.parametrize(("source", "target"), [(a, b) for a, targets in EXACT.items() for b in sorted(targets)])
def test_exact_widenings_come_back(source: str, target: str) -> None:
    values = every_value(source)
    back = values.to(TORCH_DTYPES[target]).to(values.dtype)
    kind = carrier(values.element_size())
    assert torch.equal(back.view(kind), values.view(kind))


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("BF16", "BF16", Cast.SAME),
        ("BF16", "F32", Cast.WIDEN),
        ("F32", "BF16", Cast.NARROW),
        ("F16", "BF16", Cast.NARROW),
        ("F8_E4M3", "BF16", Cast.NONE),
        ("BF16", "F8_E4M3", Cast.NONE),
        ("I32", "F32", Cast.NONE),
        ("I32", "I16", Cast.NONE),
        ("F32", "?", Cast.NONE),
    ],
)
def test_pairs(source: str, target: str, expected: Cast) -> None:
    assert cast_between(source, target) is expected
