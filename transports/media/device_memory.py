"""Device memory as buffers, by what an interprocess handle of CUDA carries, named field by field.

Everything here but the calls behind `Device` runs, and is tested, without a device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from transports.media.shared_buffers import SharedBufferReceiver, SharedBufferSender
from transports.stream.messages import BufferDescriptor, DeviceBuffer, Hello
from updater.core.errors import Aborted, Failure, Rejected

#: torch writes a handle as: format number, kind of the allocation, and for plain ones a `cudaIpcMemHandle_t`.
HANDLE_BYTES = 64
PLAIN = ord("c")
EXPANDABLE = ord("e")
#: Handles of plain allocations look the same in all formats so far; 0 is none.
OLDEST_FORMAT = 1
_COUNTER = re.compile(rb"/[A-Za-z0-9_.-]{1,200}")
ADVICE = (
    "expandable segments cannot be shared with another process: start the trainer without expandable_segments in "
    "PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF, or push by another transport"
)


@dataclass(frozen=True, slots=True)
class Exported:
    """One handle for one opener. Fields as in `messages.DeviceBuffer`."""

    handle: bytes
    storage_bytes: int
    allocation_offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_required: bool


class Device(Protocol):
    """What is asked of CUDA (`transports.media.cuda`), or of a stand-in (`transports.media.testing`)."""

    def refusal(self) -> str:
        """Why this process can share no memory, with advice; empty: it can."""

    def handle_format(self) -> int:
        """The newest format of handles that the runtime knows, which is the one it writes."""

    def uuids(self) -> tuple[str, ...]:
        """Of all devices that this process can see, by their index."""

    def uuid(self) -> str:
        """Of the device where `allocate` does it."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """uint8. Raises MemoryError."""

    def export(self, tensor: torch.Tensor) -> Exported:
        """Of the tensor's storage. Every export is opened once, or released once: the count must end at zero.

        Raises Aborted `transport_unsupported`, as `open` does.
        """

    def release(self, exported: Exported) -> None:
        """In the place of an opener that is dead."""

    def open(self, index: int, exported: Exported) -> torch.Tensor:
        """uint8 over the whole storage, on device `index`; counted down when the last reference is gone."""

    def filled(self) -> None:
        """What was queued so far has been written."""

    def taking(self, index: int) -> AbstractContextManager[None]:
        """Copies inside have been done when it is left, however it is left."""

    def collect(self) -> None:
        """Give back what openers have let go of."""


class DeviceMemoryBuffer:
    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        try:
            self._tensor: torch.Tensor | None = device.allocate(nbytes)
        except MemoryError as error:
            why = f"a shared buffer needs {nbytes} bytes on the device: {error}"
            raise Aborted(Failure("no_space", why)) from None

    @property
    def tensor(self) -> torch.Tensor:
        if self._tensor is None:
            raise Aborted(Failure("internal", "a closed buffer"))
        return self._tensor

    def describe(self) -> tuple[DeviceBuffer, tuple[int, ...]]:
        """Exported anew for every receiver: a count that two of them decrement never comes to zero."""
        tensor = self.tensor
        exported = self._device.export(tensor)
        descriptor = DeviceBuffer(
            device=self._device.uuid(),
            handle=exported.handle.hex(),
            nbytes=tensor.numel(),
            storage_offset=int(tensor.storage_offset()),
            storage_bytes=exported.storage_bytes,
            allocation_offset=exported.allocation_offset,
            counter=exported.counter.hex(),
            counter_offset=exported.counter_offset,
            event=exported.event.hex(),
            event_required=exported.event_required,
        )
        if exported.handle[1:2] == bytes([EXPANDABLE]):
            self._device.release(exported)
            raise Aborted(Failure("transport_unsupported", ADVICE))
        return descriptor, ()

    def abandon(self, descriptor: BufferDescriptor) -> None:
        if isinstance(descriptor, DeviceBuffer):
            self._device.release(exported_of(descriptor))

    def close(self) -> None:
        self._tensor = None


class DeviceMemorySender(SharedBufferSender):
    kind = "device"

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def check(self) -> None:
        why = self._device.refusal()
        if why:
            raise Rejected(Failure("transport_unsupported", why))

    def allocate(self, nbytes: int) -> DeviceMemoryBuffer:
        why = self._device.refusal()  # the allocator may have been told otherwise since
        if why:
            raise Aborted(Failure("transport_unsupported", why))
        return DeviceMemoryBuffer(self._device, nbytes)

    def accepts(self, hello: Hello) -> Failure | None:
        uuid, own = self._device.uuid(), self._device.handle_format()
        if uuid not in hello.devices:
            why = (
                f"the trainer's device {uuid} is not among the receiver's: {', '.join(hello.devices) or 'none'}; "
                f"the trainer sees {', '.join(self._device.uuids())}. Make it visible to both (CUDA_VISIBLE_DEVICES)"
            )
            return Failure("transport_unsupported", why)
        if own > hello.handle_format:
            why = (
                f"the trainer's torch {torch.__version__} writes memory handles of format {own}, the receiver's "
                f"({hello.runtime or 'unknown'}) opens up to {hello.handle_format}: use one release on both sides"
            )
            return Failure("transport_unsupported", why)
        return None

    def filled(self) -> None:
        self._device.filled()

    def collect(self) -> None:
        self._device.collect()


class DeviceMemoryReceiver(SharedBufferReceiver):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self._index = 0

    def greeting(self) -> tuple[tuple[str, ...], int]:
        uuids = self._device.uuids()
        if not uuids:
            raise Aborted(Failure("transport_unsupported", "this rank sees no CUDA device"))
        return uuids, self._device.handle_format()

    def open(self, descriptor: BufferDescriptor, files: Sequence[int]) -> torch.Tensor:
        if not isinstance(descriptor, DeviceBuffer):
            raise Aborted(Failure("stream_mismatch", f"a {descriptor.kind} buffer in a stream over device memory"))
        uuids = self._device.uuids()
        if descriptor.device not in uuids:
            why = f"memory on device {descriptor.device}; this rank sees {', '.join(uuids) or 'none'}"
            raise Aborted(Failure("transport_unsupported", why))
        check(descriptor, self._device.handle_format())
        self._index = uuids.index(descriptor.device)
        whole = self._device.open(self._index, exported_of(descriptor))
        return whole[descriptor.storage_offset : descriptor.storage_offset + descriptor.nbytes]

    def taking(self) -> AbstractContextManager[None]:
        return self._device.taking(self._index)


def exported_of(descriptor: DeviceBuffer) -> Exported:
    return Exported(
        handle=bytes.fromhex(descriptor.handle),
        storage_bytes=descriptor.storage_bytes,
        allocation_offset=descriptor.allocation_offset,
        counter=bytes.fromhex(descriptor.counter),
        counter_offset=descriptor.counter_offset,
        event=bytes.fromhex(descriptor.event),
        event_required=descriptor.event_required,
    )


def check(descriptor: DeviceBuffer, newest: int) -> None:
    """Nothing malformed reaches the driver. Raises Aborted `transport_unsupported` for a format or a kind of memory
    that cannot be opened here, `stream_mismatch` for what is none.
    """
    raw, event, counter = (bytes.fromhex(text) for text in (descriptor.handle, descriptor.event, descriptor.counter))
    if len(raw) >= 2 and raw[1] == EXPANDABLE:
        raise Aborted(Failure("transport_unsupported", ADVICE))
    if raw and not OLDEST_FORMAT <= raw[0] <= newest:
        why = f"a memory handle of format {raw[0]}; torch {torch.__version__} opens {OLDEST_FORMAT} to {newest}"
        raise Aborted(Failure("transport_unsupported", why))
    wrong = [
        name
        for name, good in (
            ("handle", len(raw) == 2 + HANDLE_BYTES and raw[1] == PLAIN),
            ("event", len(event) == HANDLE_BYTES),
            ("counter", bool(_COUNTER.fullmatch(counter))),
            ("nbytes", 0 < descriptor.nbytes <= descriptor.storage_bytes - descriptor.storage_offset),
        )
        if not good
    ]
    if wrong:
        raise Aborted(*(Failure("stream_mismatch", f"device buffer: field {name} makes no sense") for name in wrong))


def expandable_segments(settings: Mapping[str, object] | None, environment: Mapping[str, str]) -> bool:
    """Whether torch's allocator makes them. `settings`: the allocator's own, where it tells; else what was asked for
    in the environment (of two variables the newer name wins, as in torch).
    """
    if settings is not None and isinstance(settings.get("expandable_segments"), bool):
        return bool(settings["expandable_segments"])
    asked = environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    pairs = (part.partition(":") for part in asked.replace(" ", "").split(","))
    return any(name == "expandable_segments" and value.lower() == "true" for name, _, value in pairs)
