"""An nccl group, and what it asks of devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from transports.media.group_init import Relay
from transports.media.work import CollectiveWork, Polled, first_line, from_sender, nothing, uses_device
from transports.stream.failures import place
from transports.stream.medium import Broken
from updater.core.errors import Aborted, Failure
from updater.core.participant import StreamOffer


class NcclGroup:
    """Experimental: written to the rules of docs/adr/0009-broadcast.md, and not yet run on two devices.

    Few channels and a stream of low priority, since serving goes on; ended by an explicit abort. torch's own watchdog
    ends the whole process when a collective is late, so it is given no time to: the deadlines are ours.
    """

    def __init__(self, relay: Relay, rank: int, size: int, host: str, timeout_s: float) -> None:
        if not nccl_works():
            raise Broken("nccl needs a CUDA device and a torch that was built with it")
        self._device = torch.device("cuda", torch.cuda.current_device())
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=False)
        options._timeout = timedelta(days=1)
        options.config.min_ctas, options.config.max_ctas = 1, 2
        self._group: Any = dist.ProcessGroupNCCL(relay, rank, size, options)
        self._meet(timeout_s)

    def _meet(self, timeout_s: float) -> None:
        """A first tiny broadcast makes the communicator, while the relay still carries what that needs."""
        first = self.broadcast(self.room(1), nothing)
        deadline = time.monotonic() + timeout_s
        while not first.done():
            if time.monotonic() >= deadline:
                self.close()
                raise Broken("the communicator did not form in time")
            time.sleep(0.002)

    def room(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._device)

    def broadcast(self, data: torch.Tensor, notify: Callable[[], None]) -> CollectiveWork:
        try:
            return Polled(self._group.broadcast([data], from_sender()))
        except RuntimeError as error:
            raise Broken(first_line(error)) from None

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()


def nccl_works() -> bool:
    return torch.cuda.is_available() and dist.is_nccl_available()


def device_name() -> str:
    """UUID of this process's CUDA device, or empty where it uses none."""
    if not uses_device():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def refuse_shared_devices(offer: StreamOffer, own: str, devices: Mapping[int, str]) -> None:
    """nccl takes no two ranks on one device. `own`: UUID of the sender's. Raises Aborted `transport_unsupported`."""
    taken = [own, *devices.values()]
    wrong = [n for n, device in devices.items() if not device or taken.count(device) > 1]
    if wrong:
        failure = Failure(
            "transport_unsupported",
            "nccl needs a device of its own for every rank",
            hint="push by transport='cuda_ipc' where ranks share a card, or with sender_options={'backend': 'gloo'}",
        )
        raise Aborted(*(place(offer, number, failure) for number in sorted(wrong)))
