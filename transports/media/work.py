"""A group of processes as the media use it, and what is under way in one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch
import torch.distributed as dist

from transports.stream.medium import Broken


class CollectiveWork:
    """A posted broadcast: a `Travelling` that holds its tensor until it has ended."""

    poll_s: float | None = None

    def __init__(self, work: Any, notify: Callable[[], None]) -> None:
        self._work = work
        self._ended = threading.Event()
        self._notify = notify
        work.get_future().add_done_callback(self._on_end)

    def _on_end(self, _future: Any) -> None:
        self._ended.set()
        self._notify()

    def wait(self, timeout_s: float | None) -> bool:
        """Whether it has ended in time, well or not."""
        return self._ended.wait(timeout_s)

    def done(self) -> bool:
        """Raises Broken when it has failed."""
        if not self._ended.is_set():
            return False
        try:
            self._work.wait()
        except RuntimeError as error:
            raise Broken(first_line(error)) from None
        return True

    def abandon(self) -> None:
        self._notify = nothing


class Polled(CollectiveWork):
    """A collective of a device, whose end is seen by asking for it."""

    poll_s = 0.001

    def __init__(self, work: Any) -> None:
        self._work = work

    def done(self) -> bool:
        try:
            ended = bool(self._work.is_completed())
            if ended and self._work.exception() is not None:
                raise Broken("the collective failed")
        except RuntimeError as error:
            raise Broken(first_line(error)) from None
        return ended

    def abandon(self) -> None:
        pass


class CollectiveGroup(Protocol):
    """One end of a group."""

    def room(self, nbytes: int) -> torch.Tensor:
        """Touched uint8 memory that this group can send from and receive into."""

    def broadcast(self, data: torch.Tensor, notify: Callable[[], None]) -> CollectiveWork:
        """Posts, from rank 0 to all. `notify`: called from another thread when it has ended."""

    def close(self) -> None:
        """At once, whatever is posted."""


def let_go(group: CollectiveGroup | None) -> None:
    """Close a group that is not used again; an error of that is passed over, since its name never comes back."""
    if group is not None:
        with suppress(RuntimeError):
            group.close()


def uses_device() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def nothing() -> None:
    pass


def settle_device() -> None:
    """Until what was queued on this thread's device stream has happened."""
    if uses_device():
        torch.cuda.current_stream().synchronize()


def from_sender() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return options
