"""A tensor that lies whole on this rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from trainer_side.sources.casts import cast
from transports.digest import tensor_digest
from transports.dtypes import DTYPE_NAMES, is_packed
from updater.core.errors import Failure
from updater.protocol.manifest import TensorSpec


@dataclass(frozen=True, slots=True)
class WholePart:
    """`tensor`: detached, any device and strides. Where several ranks hold it they hold the same; one counts it."""

    spec: TensorSpec
    tensor: torch.Tensor

    @property
    def watched(self) -> Sequence[torch.Tensor]:
        return (self.tensor,)

    def share(self, sender: bool) -> int | None:
        return tensor_digest(cast(self.tensor, self.spec.dtype), self.spec.dtype) if sender else 0

    def whole(self, sender: bool) -> torch.Tensor | None:
        return cast(self.tensor, self.spec.dtype) if sender else None


def faults(name: str, tensor: object) -> Iterator[Failure]:
    """What is wrong with one entry of a state dict; a sharded tensor is judged by its whole shape."""
    if not isinstance(tensor, torch.Tensor):
        yield Failure("bad_request", f"a {type(tensor).__name__}, not a tensor", tensor=name)
    elif (kind := without_bytes(tensor)) is not None:
        yield Failure("bad_request", f"{kind}: it holds no plain bytes", tensor=name)
    elif tensor.numel() == 0:
        # What a sharded optimiser leaves on ranks that do not own the parameter (B104).
        text = f"shape {list(tensor.shape)} holds nothing: an un-gathered parameter?"
        yield Failure("tensor_shape", text, tensor=name)
    elif tensor.dtype not in DTYPE_NAMES or is_packed(DTYPE_NAMES[tensor.dtype]):
        yield Failure("tensor_dtype", f"{tensor.dtype} has no safetensors type", tensor=name)


def without_bytes(tensor: torch.Tensor) -> str | None:
    """What kind of tensor this is, if there is no memory that holds its elements one after the other; else None.

    A sharded tensor is judged by the shard of this rank.
    """
    tensor = getattr(tensor, "_local_tensor", tensor)
    if isinstance(tensor, FakeTensor):
        return "a fake tensor, which has a shape and no memory"
    if is_lazy(tensor):
        return "a parameter that was not initialised yet"
    if torch._is_functional_tensor(tensor):
        return "a functional tensor, which exists only while a function is traced"
    if tensor.is_nested:
        return "a nested tensor"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "a tensor of a function transform (vmap, grad)"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a {type(tensor).__name__}, which computes its elements from other tensors"
    if tensor.is_meta or tensor.layout is not torch.strided:
        return f"a tensor on device {tensor.device.type} with layout {tensor.layout}"
    if tensor.numel() and tensor.dtype in DTYPE_NAMES and _end(tensor) > tensor.untyped_storage().nbytes():
        return "a tensor whose memory was freed (a parameter that was not gathered?)"
    return None


def _end(tensor: torch.Tensor) -> int:
    """Byte of its storage behind its last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + last + 1) * tensor.element_size()


def tie_key(tensor: torch.Tensor) -> object:
    """Equal for two names of one storage that show the same values."""
    return (_place(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())


def find_ties(keys: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    """(alias, canonical), sorted. The first name of a storage is canonical: the embedding comes before its head."""
    first: dict[object, str] = {}
    return tuple(sorted((name, first[key]) for name, key in keys.items() if first.setdefault(key, name) != name))


def overlaps(tensors: Mapping[str, torch.Tensor]) -> list[Failure]:
    """Contiguous views that share some of their bytes and not all: two names that fight over one memory."""
    views = sorted((_place(tensor), name) for name, tensor in tensors.items() if tensor.is_contiguous())
    found = []
    reach: tuple[tuple[str, int, int], str] | None = None  # the view that ends last so far, on this device
    for place, name in views:
        if reach is None or place[0] != reach[0][0] or place[1] >= reach[0][2]:
            reach = (place, name)
        elif place != reach[0]:
            found.append(Failure("tensor_duplicate", f"shares part of its memory with {reach[1]}", tensor=name))
            reach = max(reach, (place, name), key=lambda item: item[0][2])
    return found


def _place(tensor: torch.Tensor) -> tuple[str, int, int]:
    """Device and byte range of a contiguous view."""
    start = tensor.data_ptr()
    return (str(tensor.device), start, start + tensor.numel() * tensor.element_size())
