"""Groups of a broadcast: one sender at rank 0, receiver n at rank n + 1. Never a default group."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from transports.broadcast.forming import Relay
from transports.broadcast.pending import Broken, Group, Pending, Polled, first_line, nothing, uses_device
from transports.control.exits import leaves_at_exit
from updater.core.errors import refuse


class GlooGroup:
    """Blocks until all ranks are there. `host`: this side's address, where the others can connect to it."""

    def __init__(self, relay: Relay, rank: int, size: int, host: str, timeout_s: float) -> None:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=timeout_s)
        self._group: Any = dist.ProcessGroupGloo(relay, rank, size, options)
        self._last: Pending | None = None
        self._closed = False
        self._ending: threading.Thread | None = None
        self._lock = threading.Lock()  # nothing is posted while the group is let go of
        leaves_at_exit(self)

    def room(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def broadcast(self, data: torch.Tensor, notify: Callable[[], None]) -> Pending:
        with self._lock:
            if self._closed:
                raise Broken("the group has been closed")
            try:
                self._last = Pending(self._group.broadcast([data], _from_sender()), notify)
            except RuntimeError as error:
                raise Broken(first_line(error)) from None
            return self._last

    def wait(self, data: torch.Tensor) -> None:
        """A bare broadcast, to its end. For measurements."""
        self._group.broadcast([data], _from_sender()).wait()

    def close(self) -> None:
        """The only way to end a gloo group is to let go of it, when its last collective has ended: the others let go of
        it too, or its time runs out. A thread waits for that here and not in torch, where none may be at exit.
        """
        if self._closed:
            return
        self.leave()
        if not self._let_go(0.0):
            ending = threading.Thread(target=self._let_go, args=(None,), name="broadcast-group-end", daemon=True)
            ending.start()
            self._ending = ending

    def leave(self) -> None:
        with self._lock:
            self._closed = True
            if self._last is not None:
                self._last.abandon()

    def left(self, timeout_s: float) -> bool:
        if self._ending is None:
            return self._let_go(timeout_s)
        self._ending.join(timeout_s)
        return not self._ending.is_alive()

    def _let_go(self, timeout_s: float | None) -> bool:
        """Whether its last collective ended in time. None: that of its limit."""
        last = self._last
        if last is not None and not last.wait(timeout_s):
            return False
        with self._lock:  # the second caller returns when it is done
            last = self._group = self._last = None  # torch joins the group's threads
        return True


class NcclGroup:
    """Experimental: written to the rules of docs/adr/0009-broadcast.md, and not yet run on two devices.

    Few channels and a stream of low priority, since serving goes on; ended by an explicit abort. torch's own watchdog
    ends the whole process when a collective is late, so it is given no time to: the deadlines are ours.
    """

    def __init__(self, relay: Relay, rank: int, size: int, host: str, timeout_s: float) -> None:
        if not _nccl_works():
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

    def broadcast(self, data: torch.Tensor, notify: Callable[[], None]) -> Pending:
        try:
            return Polled(self._group.broadcast([data], _from_sender()))
        except RuntimeError as error:
            raise Broken(first_line(error)) from None

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()


BACKENDS: dict[str, Callable[[Relay, int, int, str, float], Group]] = {"gloo": GlooGroup, "nccl": NcclGroup}


def check_backend(backend: str) -> None:
    """Raises Rejected `transport_unsupported`."""
    if backend not in BACKENDS:
        raise refuse("transport_unsupported", f"backend {backend!r} is none of {', '.join(BACKENDS)}")
    if backend == "nccl" and not _nccl_works():
        raise refuse("transport_unsupported", "nccl needs a CUDA device and a torch that was built with it")


def _nccl_works() -> bool:
    return torch.cuda.is_available() and dist.is_nccl_available()


def device_name() -> str:
    """UUID of this process's CUDA device, or empty where it uses none."""
    if not uses_device():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def settle_device() -> None:
    """Until what was queued on this thread's device stream has happened."""
    if uses_device():
        torch.cuda.current_stream().synchronize()


def _from_sender() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return options
