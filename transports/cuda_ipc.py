"""Streams to ranks on the same GPU, or on GPUs of the same machine, through device memory that they open by handle.

Mapped by the device's UUID, whatever CUDA_VISIBLE_DEVICES calls it on either side. `docs/gpu.md` has the limits.
"""

from __future__ import annotations

import torch

from transports.local.cuda import CudaDevice
from transports.local.device import Device, DeviceReceiverMemory, DeviceSenderMemory
from transports.local.hub import LocalHub
from transports.local.messages import PATIENCE_S
from transports.local.sender import LocalSender

__all__ = ["CudaIpcHub", "CudaIpcSender"]


class CudaIpcSender(LocalSender):
    """`device`: where the two buffers are (default: the current one); tensors may lie anywhere. Other options as those
    of `SharedMemorySender`. Raises Rejected `transport_unsupported` without CUDA or with expandable segments.
    """

    def __init__(
        self,
        *,
        device: torch.device | int | str | None = None,
        patience_s: float = PATIENCE_S,
        digests: bool = False,
        folder: str | None = None,
        memory: Device | None = None,
    ) -> None:
        """`memory`: a stand-in for the device."""
        super().__init__(
            DeviceSenderMemory(memory or CudaDevice(device)), patience_s=patience_s, digests=digests, folder=folder
        )


class CudaIpcHub(LocalHub):
    """Options as those of `SharedMemoryHub`. `memory`: a stand-in for the device."""

    def __init__(self, *, patience_s: float | None = None, memory: Device | None = None) -> None:
        super().__init__(DeviceReceiverMemory(memory or CudaDevice()), patience_s=patience_s)
