"""Digests of a rank's own memory, made piece by piece so that a thread that needs the core gets it soon.

The tensor digest is additive over disjoint regions, so the pieces add up to what one pass would give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from engine_adapter.placement.regions import pieces
from engine_adapter.rank.replay import Stop
from transports.base import Box
from transports.digest import add, region_digest, tensor_digest
from transports.dtypes import DTYPE_NAMES, is_packed

#: Bytes between two looks at the stop: a few milliseconds of work, and large beside what a call costs.
PIECE_BYTES = 16 << 20


def parameter_digests(tensors: Mapping[str, torch.Tensor], stop: Stop) -> dict[str, int]:
    """The digest of every tensor in its own coordinates. Raises `Aborted` soon after `stop` says so."""
    return {name: parameter_digest(tensor, stop) for name, tensor in tensors.items()}


def parameter_digest(tensor: torch.Tensor, stop: Stop, piece_bytes: int = PIECE_BYTES) -> int:
    """`tensor_digest`, under a stop."""
    dtype, shape = DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)
    if is_packed(dtype):  # a piece must not cut a byte
        stop.check()
        return tensor_digest(tensor)
    return region_digest_until(tensor, shape, dtype, Box.whole(shape), stop, piece_bytes)


def region_digest_until(
    region: torch.Tensor, shape: Sequence[int], dtype: str, box: Box, stop: Stop, piece_bytes: int = PIECE_BYTES
) -> int:
    """`transports.digest.region_digest`, under a stop. Packed types are digested in one piece."""
    if region.nbytes <= piece_bytes or is_packed(dtype):
        stop.check()
        return region_digest(region, shape, dtype, box)
    total = 0
    for piece in pieces(box, piece_bytes // region.element_size()):
        stop.check()
        total = add(total, region_digest(region[piece.within(box).slices()], shape, dtype, piece))
    return total
