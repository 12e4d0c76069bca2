"""Digests of a rank's own memory: the same as in one pass, and over soon after somebody wants the core."""

from __future__ import annotations

import pytest
import torch

from engine_adapter.rank.plan import CancelToken
from engine_adapter.rank.readback import PIECE_BYTES, parameter_digest, parameter_digests, region_digest_until
from transports.base import Box
from transports.digest import region_digest, tensor_digest
from updater.core.errors import Aborted

FOREVER = float("inf")


class Asked:
    """A clock that counts how often the stop was looked at, and ends the work at the `last` look."""

    def __init__(self, last: int) -> None:
        self.looks, self._last = 0, last
        self.stop = CancelToken(lambda: False, 1.0, self._now)

    def _now(self) -> float:
        self.looks += 1
        return 2.0 if self.looks >= self._last else 0.0


def large(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    made = torch.randint(-100, 100, shape, dtype=torch.int16, generator=torch.Generator().manual_seed(3))
    return made.to(dtype)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((500, 102), torch.bfloat16),
        ((3, 100, 102), torch.float32),  # one slice is over a piece
        ((2, 3, 7001), torch.int16),  # so is one row, and it is odd
        ((50_001,), torch.bfloat16),
        ((1, 1, 30_001), torch.uint8),
        ((40, 40), torch.float64),
        ((), torch.float32),
        ((0, 7), torch.float32),
    ],
)
def test_pieces_add_up_to_one_pass(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = large(*shape, dtype=dtype)
    stop = CancelToken(lambda: False, FOREVER, lambda: 0.0)
    for piece_bytes in (512, 4096, 10_000):
        assert parameter_digest(tensor, stop, piece_bytes) == tensor_digest(tensor)


@pytest.mark.parametrize("transposed", [False, True])
def test_pieces_of_a_region_add_up_whatever_its_strides(transposed: bool) -> None:
    shape, box = (300, 300), Box((7, 51), (290, 201))
    whole = large(*shape)
    region = whole.t().contiguous().t()[box.slices()] if transposed else whole[box.slices()]
    stop = CancelToken(lambda: False, FOREVER, lambda: 0.0)
    assert region_digest_until(region, shape, "BF16", box, stop, 4096) == region_digest(region, shape, "BF16", box)


def test_a_large_tensor_is_given_up_within_one_piece() -> None:
    tensor = large(4, PIECE_BYTES // 2)  # four pieces
    asked = Asked(last=2)
    with pytest.raises(Aborted):
        parameter_digests({"a": tensor}, asked.stop)
    assert asked.looks == 2
    patient = Asked(last=1000)
    assert parameter_digests({"a": tensor}, patient.stop) == {"a": tensor_digest(tensor)}
    assert patient.looks == 4
