"""safetensors dtype names as torch dtypes, and the byte view of packed types."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from transports.base import Box
from updater.protocol.manifest import DTYPE_BITS

_NAMES: dict[str, str] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
    "F4": "float4_e2m1fn_x2",
}

#: safetensors name -> torch dtype, for what this torch can hold. Packed six-bit types are absent: read them as bytes.
TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, attribute) for name, attribute in _NAMES.items() if hasattr(torch, attribute)
}

#: The inverse, for tensors that are to be described.
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def carrier(itemsize: int) -> torch.dtype:
    """An integer dtype of `itemsize` bytes (1, 2, 4, 8) through which bytes are copied unchanged."""
    return _CARRIERS[itemsize]


def is_packed(dtype: str) -> bool:
    """Whether several elements share a byte."""
    return DTYPE_BITS[dtype] < 8


def itemsize(dtype: str) -> int:
    """Bytes of one element; packed types count as bytes."""
    return max(DTYPE_BITS[dtype], 8) // 8


def byte_shape(shape: Sequence[int], dtype: str) -> tuple[int, ...]:
    """`shape`, with the last dimension of a packed type counted in bytes.

    A packed row that ends inside a byte makes the tensor one row of bytes.
    """
    if not is_packed(dtype):
        return tuple(shape)
    bits = DTYPE_BITS[dtype]
    if shape and shape[-1] * bits % 8 == 0:
        return (*shape[:-1], shape[-1] * bits // 8)
    return (-(-prod(shape) * bits // 8),)


def byte_box(box: Box, shape: Sequence[int], dtype: str) -> Box:
    """`box` in the coordinates of `byte_shape`. Raises ValueError where a packed byte would be cut."""
    if not is_packed(dtype):
        return box
    target = byte_shape(shape, dtype)
    if box == Box.whole(shape):
        return Box.whole(target)
    bits = DTYPE_BITS[dtype]
    if len(target) != len(shape) or box.start[-1] * bits % 8 or box.size[-1] * bits % 8:
        raise ValueError(f"box {box} cuts a byte of packed {dtype}")
    return Box((*box.start[:-1], box.start[-1] * bits // 8), (*box.size[:-1], box.size[-1] * bits // 8))
