"""Streams to ranks on the same GPU, or on GPUs of the same machine, through device memory that they open by handle.

Mapped by the device's UUID, whatever CUDA_VISIBLE_DEVICES calls it on either side. `docs/gpu.md` has the limits.
"""

from __future__ import annotations

import torch

from transports.media.cuda import CudaDevice
from transports.media.device_memory import Device, DeviceMemoryReceiver, DeviceMemorySender
from transports.stream.addresses import UnixListener, dial_unix, fresh_address
from transports.stream.messages import PATIENCE_S, Patience
from transports.stream.receiver import MediumHub
from transports.stream.sender import MediumSender

__all__ = ["CudaIpcHub", "CudaIpcSender"]


class CudaIpcSender(MediumSender):
    """`device`: where the two buffers are (default: the current one); tensors may lie anywhere. Other options as those
    of `SharedMemorySender`. Raises Rejected `transport_unsupported` without CUDA or with expandable segments.
    """

    kind = "cuda_ipc"

    def __init__(
        self,
        *,
        device: torch.device | int | str | None = None,
        patience_s: Patience = PATIENCE_S,
        digests: bool = False,
        folder: str | None = None,
        memory: Device | None = None,
    ) -> None:
        """`memory`: a stand-in for the device."""
        medium = DeviceMemorySender(memory or CudaDevice(device))
        super().__init__(medium, lambda: UnixListener(fresh_address(folder)), patience_s=patience_s, digests=digests)


class CudaIpcHub(MediumHub):
    """Options as those of `SharedMemoryHub`. `memory`: a stand-in for the device."""

    def __init__(self, *, patience_s: float | None = None, memory: Device | None = None) -> None:
        device = memory or CudaDevice()
        super().__init__(lambda: DeviceMemoryReceiver(device), dial_unix, patience_s)
