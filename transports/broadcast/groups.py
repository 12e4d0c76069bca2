"""Groups of a broadcast: one sender at rank 0, receiver n at rank n + 1. Never a default group.

A group forms through a store of ours, whose entries travel as `Key` messages: a store on sockets of torch's own would
block for as long as the process behind it is frozen, and every wait here has an end (I9).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from updater.core.errors import refuse


class Broken(Exception):
    """A group or one of its collectives failed. It is not used again."""


class Relay(Store):
    """The store of one forming group. `outbox`: what was set here and is to be told to the others."""

    def __init__(self, notify: Callable[[], None]) -> None:
        super().__init__()
        self.outbox: deque[tuple[str, bytes]] = deque()
        self._notify = notify
        self._known: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False

    def learn(self, name: str, value: bytes) -> None:
        with self._changed:
            self._known[name] = value
            self._changed.notify_all()

    def close(self) -> None:
        """Whoever waits gives up."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # what torch calls, from threads of its own

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.learn(key, data)
        self.outbox.append((key, data))
        self._notify()

    def get(self, key: str) -> bytes:
        self._await([key], 300.0)
        return self._known[key]

    def wait(self, keys: Sequence[str], timeout: timedelta = timedelta(seconds=300)) -> None:
        self._await(keys, timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._known for key in keys)

    def _await(self, keys: Sequence[str], timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.check(keys), timeout_s)
            if self._closed or not self.check(keys):
                raise RuntimeError(f"nobody said {list(keys)}")


class Pending:
    """A posted broadcast. Holds its tensor until it has ended."""

    #: Seconds after which somebody who waits looks again; None: `notify` tells.
    poll_s: float | None = None

    def __init__(self, work: Any, notify: Callable[[], None]) -> None:
        self._work = work
        self._ended = threading.Event()
        self._notify = notify
        work.get_future().add_done_callback(self._on_end)

    def _on_end(self, _future: Any) -> None:
        self._ended.set()
        self._notify()

    def done(self) -> bool:
        """Raises Broken."""
        if not self._ended.is_set():
            return False
        try:
            self._work.wait()
        except RuntimeError as error:
            raise Broken(_first_line(error)) from None
        return True

    def abandon(self) -> None:
        self._notify = _nothing


class _Polled(Pending):
    """A collective of a device, whose end is seen by asking for it."""

    poll_s = 0.001

    def __init__(self, work: Any) -> None:
        self._work = work

    def done(self) -> bool:
        try:
            return bool(self._work.is_completed()) and self._work.exception() is None
        except RuntimeError as error:
            raise Broken(_first_line(error)) from None

    def abandon(self) -> None:
        pass


class Group(Protocol):
    """One end of a group."""

    def room(self, nbytes: int) -> torch.Tensor:
        """Touched uint8 memory that this group can send from and receive into."""

    def broadcast(self, data: torch.Tensor, notify: Callable[[], None]) -> Pending:
        """Posts, from rank 0 to all. `notify`: called from another thread when it has ended."""

    def close(self) -> None:
        """At once, whatever is posted."""


class GlooGroup:
    """Blocks until all ranks are there. `host`: this side's address, where the others can connect to it."""

    def __init__(self, relay: Relay, rank: int, size: int, host: str, timeout_s: float) -> None:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=timeout_s)
        self._group: Any = dist.ProcessGroupGloo(relay, rank, size, options)
        self._last: Pending | None = None

    def room(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def broadcast(self, data: torch.Tensor, notify: Callable[[], None]) -> Pending:
        try:
            self._last = Pending(self._group.broadcast([data], _from_sender()), notify)
        except RuntimeError as error:
            raise Broken(_first_line(error)) from None
        return self._last

    def wait(self, data: torch.Tensor) -> None:
        """A bare broadcast, to its end. For measurements."""
        self._group.broadcast([data], _from_sender()).wait()

    def close(self) -> None:
        """The only way to end a gloo group is to let go of it, which takes until its last collective has ended: the
        others let go of it too, or its time runs out.
        """
        last, self._last = self._last, None
        box, self._group = [self._group], None
        if last is None or last._ended.is_set():
            box.clear()
            return
        last.abandon()
        threading.Thread(target=box.clear, name="broadcast-group-end", daemon=True).start()


class NcclGroup:
    """Experimental: written to the rules of docs/adr/0009, and not yet run on two devices.

    Few channels and a stream of low priority, since serving goes on; ended by an explicit abort.
    """

    def __init__(self, relay: Relay, rank: int, size: int, host: str, timeout_s: float) -> None:
        if not torch.cuda.is_available() or not dist.is_nccl_available():
            raise Broken("nccl needs a CUDA device and a torch that was built with it")
        self._device = torch.device("cuda", torch.cuda.current_device())
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=False)
        options._timeout = timedelta(seconds=timeout_s)
        options.config.min_ctas, options.config.max_ctas = 1, 2
        self._group: Any = dist.ProcessGroupNCCL(relay, rank, size, options)
        self._meet(timeout_s)

    def _meet(self, timeout_s: float) -> None:
        """A first tiny broadcast makes the communicator, while the relay still carries what that needs."""
        first = self.broadcast(self.room(1), _nothing)
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
            return _Polled(self._group.broadcast([data], _from_sender()))
        except RuntimeError as error:
            raise Broken(_first_line(error)) from None

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()


BACKENDS: dict[str, Callable[[Relay, int, int, str, float], Group]] = {"gloo": GlooGroup, "nccl": NcclGroup}


def check_backend(backend: str) -> None:
    """Raises Rejected `transport_unsupported`."""
    if backend not in BACKENDS:
        raise refuse("transport_unsupported", f"backend {backend!r} is none of {', '.join(BACKENDS)}")


class Forming:
    """A group that forms in a thread of its own, so that whoever waits for it can give up."""

    def __init__(self, make: Callable[[Relay], Group], notify: Callable[[], None]) -> None:
        self.relay = Relay(notify)
        self._make, self._notify = make, notify
        self._group: Group | None = None
        self._error = ""
        self._given_up = False
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="broadcast-group", daemon=True).start()

    def _run(self) -> None:
        group, error = None, ""
        try:
            group = self._make(self.relay)
        except (RuntimeError, Broken, OSError) as failure:
            error = _first_line(failure)
        with self._lock:
            self._group, self._error = group, error
            unwanted = self._given_up
        if unwanted:
            let_go(group)
        self._notify()

    def outgoing(self) -> list[tuple[str, bytes]]:
        """What is to be told to the others."""
        found = []
        while self.relay.outbox:
            found.append(self.relay.outbox.popleft())
        return found

    def group(self) -> Group | None:
        """None: not yet. Raises Broken."""
        with self._lock:
            if self._error:
                raise Broken(self._error)
            return self._group

    def give_up(self) -> None:
        with self._lock:
            self._given_up = True
            group, self._group = self._group, None
        self.relay.close()
        let_go(group)


def let_go(group: Group | None) -> None:
    """Whatever a group says to its end: it is not used again, and its name never comes back."""
    if group is not None:
        with suppress(RuntimeError):
            group.close()


def device_name() -> str:
    """UUID of this process's CUDA device, or empty where it uses none."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def settle_device() -> None:
    """Until what was queued on this thread's device stream has happened."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()


def _from_sender() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return options


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _nothing() -> None:
    pass
