"""The suite of streams over each medium; device memory is not there."""

from __future__ import annotations

import pytest

from transports.broadcast import BroadcastHub, BroadcastSender
from transports.cuda_ipc import CudaIpcHub, CudaIpcSender
from transports.media.testing import FakeDevice
from transports.shared_memory import SharedMemoryHub, SharedMemorySender
from transports.testing.stream_contract import StreamContract

pytestmark = pytest.mark.slow  # together, not each


class TestSharedMemory(StreamContract):
    def sender(self) -> SharedMemorySender:
        return SharedMemorySender()

    def hub(self, stall_s: float) -> SharedMemoryHub:
        return SharedMemoryHub(patience_s=stall_s)


class TestDeviceMemory(StreamContract):
    def sender(self) -> CudaIpcSender:
        return CudaIpcSender(memory=FakeDevice())

    def hub(self, stall_s: float) -> CudaIpcHub:
        return CudaIpcHub(patience_s=stall_s, memory=FakeDevice())


@pytest.mark.case("B086", "B088", "B090", "B098", "B099")
class TestBroadcast(StreamContract):
    def sender(self) -> BroadcastSender:
        return BroadcastSender()

    def hub(self, stall_s: float) -> BroadcastHub:
        return BroadcastHub(patience_s=stall_s)
