"""Scans of staged bytes: is anything not finite, is everything zero, is there a normal number."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from transports.dtypes import TORCH_DTYPES
from updater.protocol.manifest import TensorSpec

_BLOCK = 1 << 20  # elements: large beside a call's cost, small beside a closer look
_FIRST = 4096

#: Types whose sum torch forms at full speed without overflowing early.
_SUMMED = (torch.bfloat16, torch.float32, torch.float64)


def nonfinite(tensor: torch.Tensor) -> bool:
    """Whether a NaN or an infinity is in it. Any shape, strides and dtype; integers never are.

    Sums block by block, because a sum of finite numbers is finite unless it overflows; only a block whose sum is not
    finite is looked at element by element.
    """
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    if not values.is_floating_point() or values.dtype == getattr(torch, "float4_e2m1fn_x2", None):
        return False
    return any(_block_nonfinite(block) for block in _blocks(values, _BLOCK))


def _block_nonfinite(block: torch.Tensor) -> bool:
    if block.dtype in _SUMMED:
        if bool(torch.isfinite(block.sum())):
            return False
        return not bool(torch.isfinite(block).all())
    wide = block.to(torch.float32)
    return not bool(torch.isfinite(wide.sum())) and not bool(torch.isfinite(wide).all())


def is_zero(tensor: torch.Tensor) -> bool:
    """Whether every element equals zero (minus zero too). An empty tensor is not zero: it holds nothing."""
    values = tensor.detach()
    if values.numel() == 0:
        return False
    if values.dtype == getattr(torch, "float4_e2m1fn_x2", None):
        values = values.view(torch.uint8)
    return not any(_any(block) for block in _blocks(values, _FIRST, grow=True))


#: Floating dtypes of a source in which a tensor without a normal number says that something went wrong.
_JUDGED = frozenset({"F16", "BF16", "F32", "F64"})


def judged(spec: TensorSpec) -> bool:
    """Whether a source tensor has to hold a normal number: floats of 16 bits and more, of two dimensions or more."""
    return spec.dtype in _JUDGED and len(spec.shape) >= 2


def has_normal(tensor: torch.Tensor, wire: str) -> bool:
    """Whether a number that is normal in the dtype `wire` (a safetensors name) is in it: not zero, subnormal or NaN.

    `tensor`: any shape, strides and floating dtype, cast from the wire's; others are not judged.

    Small blocks come first: weights have a normal number at once, and only what has none is read whole.
    """
    values = tensor.detach()
    if not values.is_floating_point():
        return True
    mine, least = torch.finfo(values.dtype), torch.finfo(TORCH_DTYPES[wire]).tiny
    least = max(least, mine.tiny * mine.eps)  # what this dtype cannot hold would be compared with zero
    return any(bool((block.abs() >= least).any()) for block in _blocks(values, _FIRST, grow=True))


def _any(block: torch.Tensor) -> bool:
    if block.is_floating_point() and block.element_size() == 1:
        block = block.to(torch.float32)
    return bool((block != 0).any())


def _blocks(values: torch.Tensor, size: int, *, grow: bool = False) -> Iterator[torch.Tensor]:
    """Contiguous tensors in flat blocks of `size`; others by their first dimension. `grow`: small ones first."""
    if values.is_contiguous():
        flat, low = values.view(-1), 0
        while low < flat.numel():
            yield flat[low : low + size]
            low += size
            size = min(size * 4, _BLOCK) if grow else size
    elif values.numel() <= size or values.dim() == 0:
        yield values
    else:
        each, low = max(values[0].numel(), 1), 0
        while low < values.shape[0]:
            rows = max(1, size // each)
            yield values[low : low + rows]
            low += rows
            size = min(size * 4, _BLOCK) if grow else size
