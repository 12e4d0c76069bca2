"""Where a read lands: its target seen in the order and the coordinates of the source."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transports.base import Box, Read
from transports.dtypes import TORCH_DTYPES, byte_box, byte_shape, carrier, is_packed, itemsize
from updater.core.errors import Aborted, Failure
from updater.protocol.manifest import TensorSpec


@dataclass(frozen=True, slots=True)
class Landing:
    """`shape` and `box`: of the source tensor and of the region, packed types counted in bytes. `view`: the target with
    the box's sizes. `dtype`: how the source's bytes are to be seen when they are copied there; `same`: as they are,
    without a cast.
    """

    shape: tuple[int, ...]
    box: Box
    view: torch.Tensor
    dtype: torch.dtype
    same: bool


def landing(spec: TensorSpec, read: Read, file: str = "") -> Landing:
    """Raises Aborted `tensor_shape` or `tensor_dtype` where target and box do not fit the tensor."""
    target = read.target.detach()
    if not read.box.fits(spec.shape):
        raise _refusal("tensor_shape", f"region {read.box} of a tensor of shape {list(spec.shape)}", spec, file)
    try:
        shape, box = byte_shape(spec.shape, spec.dtype), byte_box(read.box, spec.shape, spec.dtype)
    except ValueError as error:
        raise _refusal("tensor_shape", str(error), spec, file) from None
    dtype = TORCH_DTYPES.get(spec.dtype, torch.uint8)
    same = target.dtype == dtype or (is_packed(spec.dtype) and target.element_size() == 1)
    if same:  # bytes travel unchanged, also of types that torch cannot copy
        dtype = carrier(itemsize(spec.dtype))
        target = target.view(dtype) if target.dtype != dtype else target
    elif is_packed(spec.dtype):
        raise _refusal("tensor_dtype", f"packed {spec.dtype} cannot become {target.dtype}", spec, file)
    view = _in_source_order(target, box.size, read.permute)
    if view is None:
        text = f"target {list(target.shape)} cannot take region {list(box.size)} permuted by {read.permute}"
        raise _refusal("tensor_shape", text, spec, file)
    return Landing(shape, box, view, dtype, same)


def _in_source_order(
    target: torch.Tensor, sizes: tuple[int, ...], permute: tuple[int, ...] | None
) -> torch.Tensor | None:
    """The target with exactly the region's dimensions: the permutation undone, ones put where the region has them."""
    order = tuple(range(len(sizes))) if permute is None else permute
    if sorted(order) != list(range(len(sizes))):
        return None
    wanted = [sizes[dim] for dim in order]
    if [size for size in target.shape if size != 1] != [size for size in wanted if size != 1]:
        return None
    view = target.squeeze()
    for at, size in enumerate(wanted):
        if size == 1:
            view = view.unsqueeze(at)
    return view.permute([order.index(dim) for dim in range(len(sizes))]) if sizes else view


def _refusal(code: str, message: str, spec: TensorSpec, file: str) -> Aborted:
    return Aborted(Failure(code, message, tensor=spec.name, file=file))
