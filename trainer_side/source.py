"""A state dict as a source: checked, under clean names, before a byte moves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from transports.dtypes import DTYPE_NAMES, is_packed
from updater.core.errors import Failure, Rejected
from updater.manifest import TensorSpec
from updater.names import clean_names


@dataclass(frozen=True, slots=True)
class Weights:
    """A `WeightSource` of this process alone: checked tensors under clean names. Nothing is copied or digested."""

    named: Mapping[str, torch.Tensor]
    ties: tuple[tuple[str, str], ...]
    versions: Mapping[str, int | None]  # `Tensor._version` when they were taken
    is_sender: bool = True
    group: None = None

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Known up front: nothing is copied for them."""
        return {
            name: TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
            for name, tensor in self.named.items()
        }

    def digests(self) -> Mapping[str, str]:
        """None: they are computed as the tensors pass."""
        return {}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        yield from self.named.items()

    def check_untouched(self) -> None:
        """Raise `source_changed` if an optimiser stepped since `take`.

        Sees every in-place operation on the tensors themselves; writes through `.data` leave no trace in torch.
        """
        moved = [name for name, tensor in self.named.items() if _version_of(tensor) != self.versions[name]]
        if moved:
            raise Rejected(
                *(Failure("source_changed", "written to while it was being published", tensor=name) for name in moved)
            )


def take(weights: Mapping[str, torch.Tensor]) -> Weights:
    """Check a state dict and clean its names. Copies nothing. Raises Rejected with every fault, not only the first."""
    if not weights:
        raise Rejected(Failure("bad_request", "no tensors to publish"))
    names = clean_names(weights)
    faults = [fault for name, tensor in weights.items() for fault in _faults(names[name], tensor)]
    if faults:
        raise Rejected(*faults)
    tensors = {names[name]: tensor.detach() for name, tensor in weights.items()}
    faults = _overlaps(tensors)
    if faults:
        raise Rejected(*faults)
    # detach() shares the version counter with its source, so later steps on the parameter are still seen.
    return Weights(tensors, _ties(tensors), {name: _version_of(tensor) for name, tensor in tensors.items()})


def _faults(name: str, tensor: object) -> Iterator[Failure]:
    if not isinstance(tensor, torch.Tensor):
        yield Failure("bad_request", f"a {type(tensor).__name__}, not a tensor", tensor=name)
    elif hasattr(tensor, "device_mesh"):
        yield Failure("tensor_shape", "sharded over a device mesh: gather it before publishing", tensor=name)
    elif tensor.is_meta or tensor.layout is not torch.strided:
        yield Failure("bad_request", f"{tensor.device.type} device, {tensor.layout}: holds no plain bytes", tensor=name)
    elif tensor.numel() == 0:
        # What a sharded trainer leaves on ranks that do not own the parameter (B104).
        yield Failure(
            "tensor_shape", f"shape {list(tensor.shape)} holds nothing: an un-gathered parameter?", tensor=name
        )
    elif tensor.dtype not in DTYPE_NAMES or is_packed(DTYPE_NAMES[tensor.dtype]):
        yield Failure("tensor_dtype", f"{tensor.dtype} has no safetensors type", tensor=name)


def _place(tensor: torch.Tensor) -> tuple[str, int, int]:
    """Device and byte range of a contiguous view."""
    start = tensor.data_ptr()
    return (str(tensor.device), start, start + tensor.numel() * tensor.element_size())


def _ties(tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[str, str], ...]:
    """The first name of a storage is canonical: modules list their embedding before the head that reuses it."""
    first: dict[object, str] = {}
    ties = []
    for name, tensor in tensors.items():
        key = (_place(tensor), tensor.dtype, tensor.shape, tensor.stride())
        if first.setdefault(key, name) != name:
            ties.append((name, first[key]))
    return tuple(sorted(ties))


def _overlaps(tensors: Mapping[str, torch.Tensor]) -> list[Failure]:
    """Contiguous views that share some of their bytes and not all: two names that fight over one memory."""
    views = sorted((_place(tensor), name) for name, tensor in tensors.items() if tensor.is_contiguous())
    faults = []
    reach: tuple[tuple[str, int, int], str] | None = None  # the view that ends last so far, on this device
    for place, name in views:
        if reach is None or place[0] != reach[0][0] or place[1] >= reach[0][2]:
            reach = (place, name)
        elif place != reach[0]:
            faults.append(Failure("tensor_duplicate", f"shares part of its memory with {reach[1]}", tensor=name))
            reach = max(reach, (place, name), key=lambda item: item[0][2])
    return faults


def _version_of(tensor: torch.Tensor) -> int | None:
    """None for inference tensors: they carry no counter, and cannot be written to outside inference mode."""
    return None if tensor.is_inference() else tensor._version
