"""`Device` by torch's CUDA: the only place that makes and opens interprocess handles.

Field order of `_share_cuda_` and `_new_shared_cuda`: torch/multiprocessing/reductions.py, `reduce_tensor` and
`rebuild_cuda_tensor`; how opens are counted: the note "CUDA IPC Refcounting implementation explained" in torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from transports.media.device_memory import ADVICE, HANDLE_BYTES, Exported, expandable_segments
from updater.core.errors import Aborted, Failure

_cuda: Any = torch.cuda  # whose functions have no types


class CudaDevice:
    """`device`: where buffers are made; by default what is current then."""

    def __init__(self, device: torch.device | int | str | None = None) -> None:
        self._wanted = device
        self._streams: dict[int, Any] = {}

    def refusal(self) -> str:
        if not torch.cuda.is_available():
            return "there is no CUDA device here: push by shared_memory or broadcast"
        if not self._is_here():
            return f"there is no CUDA device {self._wanted!r} here"
        return ADVICE if expandable_segments(_settings(), os.environ) else ""

    def handle_format(self) -> int:
        return _handle_format()

    def uuids(self) -> tuple[str, ...]:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return tuple(_uuid(index) for index in range(count))

    def uuid(self) -> str:
        return _uuid(self._index())

    def allocate(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", self._index()))
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(str(error)[:300]) from None

    def export(self, tensor: torch.Tensor) -> Exported:
        try:
            return _export(tensor)
        except RuntimeError as error:
            raise _unable("make a handle of its memory", error) from None

    def release(self, exported: Exported) -> None:
        _release(exported)

    def open(self, index: int, exported: Exported) -> torch.Tensor:
        _cuda.init()
        try:
            storage: Any = torch.UntypedStorage._new_shared_cuda(
                index,
                exported.handle,
                exported.storage_bytes,
                exported.allocation_offset,
                exported.counter,
                exported.counter_offset,
                exported.event,
                exported.event_required,
            )
        except RuntimeError as error:
            raise _unable("open a handle of the trainer's memory", error) from None
        empty = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index))
        return empty.set_(storage, 0, (exported.storage_bytes,), (1,))

    def filled(self) -> None:
        torch.cuda.current_stream(self._index()).synchronize()

    @contextmanager
    def taking(self, index: int) -> Iterator[None]:
        """On a stream of its own, so that copies do not queue behind a forward pass."""
        with torch.cuda.device(index):
            if index not in self._streams:
                self._streams[index] = _cuda.Stream(index)
            stream = self._streams[index]
            stream.wait_stream(torch.cuda.current_stream(index))
            try:
                with torch.cuda.stream(stream):
                    yield
            finally:
                stream.synchronize()

    def collect(self) -> None:
        if _cuda.is_initialized():
            _cuda.ipc_collect()

    def _is_here(self) -> bool:
        if self._wanted is None:
            return True
        try:
            wanted = torch.device("cuda", self._wanted) if isinstance(self._wanted, int) else torch.device(self._wanted)
        except RuntimeError:  # a name of no kind of device
            return False
        return wanted.type == "cuda" and (wanted.index or 0) in range(torch.cuda.device_count())

    def _index(self) -> int:
        """Fixed at its first use."""
        wanted = self._wanted
        if not isinstance(wanted, int):
            index = None if wanted is None else torch.device(wanted).index
            wanted = torch.cuda.current_device() if index is None else index
        self._wanted = wanted
        return wanted


def _unable(what: str, error: RuntimeError) -> Aborted:
    """What the driver refuses: in a container without the rights, or with an allocator whose memory has no handles."""
    return Aborted(Failure("transport_unsupported", f"this process cannot {what}: {str(error)[:300]}"))


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _settings() -> Mapping[str, object] | None:
    """Of the allocator, as its snapshot tells. None where this torch does not say, or before it has begun."""
    if not _cuda.is_initialized():
        return None
    told = torch.cuda.memory._snapshot()
    settings = told.get("allocator_settings") if isinstance(told, dict) else None
    return settings if isinstance(settings, dict) else None


def _export(tensor: torch.Tensor) -> Exported:
    storage: Any = tensor.untyped_storage()
    shared = storage._share_cuda_()
    _device, handle, storage_bytes, allocation_offset, counter, counter_offset, event, event_required = shared
    return Exported(
        handle=bytes(handle),
        storage_bytes=int(storage_bytes),
        allocation_offset=int(allocation_offset),
        counter=bytes(counter),
        counter_offset=int(counter_offset),
        event=bytes(event or bytes(HANDLE_BYTES)),
        event_required=bool(event_required),
    )


def _release(exported: Exported) -> None:
    torch.UntypedStorage._release_ipc_counter_cuda(exported.counter, exported.counter_offset)


@cache
def _handle_format() -> int:
    """torch tells it only in the first byte of a handle that it writes."""
    probe = torch.zeros(1, dtype=torch.uint8, device="cuda")
    exported = _export(probe)
    _release(exported)
    del probe
    _cuda.ipc_collect()
    return exported.handle[0]
