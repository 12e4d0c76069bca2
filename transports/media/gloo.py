"""A gloo group: the sender at rank 0, receiver n at rank n + 1. Never a default group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from transports.media.group_init import Relay
from transports.media.work import CollectiveWork, first_line, from_sender
from transports.stream.guards import leaves_at_exit
from transports.stream.medium import Broken


class GlooGroup:
    """Blocks until all ranks are there. `host`: this side's address, where the others can connect to it."""

    def __init__(self, relay: Relay, rank: int, size: int, host: str, timeout_s: float) -> None:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=timeout_s)
        self._group: Any = dist.ProcessGroupGloo(relay, rank, size, options)
        self._last: CollectiveWork | None = None
        self._closed = False
        self._ending: threading.Thread | None = None
        self._lock = threading.Lock()  # nothing is posted while the group is let go of
        leaves_at_exit(self)

    def room(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def broadcast(self, data: torch.Tensor, notify: Callable[[], None]) -> CollectiveWork:
        with self._lock:
            if self._closed:
                raise Broken("the group has been closed")
            try:
                self._last = CollectiveWork(self._group.broadcast([data], from_sender()), notify)
            except RuntimeError as error:
                raise Broken(first_line(error)) from None
            return self._last

    def wait(self, data: torch.Tensor) -> None:
        """A bare broadcast, to its end. For measurements."""
        self._group.broadcast([data], from_sender()).wait()

    def close(self) -> None:
        """The only way to end a gloo group is to let go of it, when its last collective has ended: the others let go of
        it too, or its time runs out. A thread waits for that here and not in torch, where none may be at exit.
        """
        if self._closed:
            return
        self.leave()
        if not self._let_go(0.0):
            ending = threading.Thread(target=self._let_go, args=(None,), name="group-end", daemon=True)
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
        with self._lock:  # the second thread that comes returns when it is done
            last = self._group = self._last = None  # torch joins the group's threads
        return True
