"""How a group forms, in a thread of its own and through a store whose entries travel as `Key` messages.

A store on sockets of torch's own would block for as long as the process behind it is frozen; every wait here has an
end (I9).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Store

from transports.media.work import CollectiveGroup, first_line, let_go, uses_device
from transports.stream.guards import leaves_at_exit
from transports.stream.medium import Broken


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
        """Whatever waits here gives up."""
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
                raise RuntimeError(f"no side said {list(keys)}")


class GroupInit:
    """A group that forms in a thread of its own, so that the side that waits for it can give up."""

    def __init__(self, make: Callable[[Relay], CollectiveGroup], notify: Callable[[], None]) -> None:
        self.relay = Relay(notify)
        self._make, self._notify = make, notify
        self._group: CollectiveGroup | None = None
        self._error = ""
        self._given_up = False
        self._lock = threading.Lock()
        self._device = torch.cuda.current_device() if uses_device() else None
        self._thread = threading.Thread(target=self._run, name="group-init", daemon=True)
        self._thread.start()
        leaves_at_exit(self)

    def _run(self) -> None:
        group, error = None, ""
        try:
            if self._device is not None:  # which device is a thread's own business
                torch.cuda.set_device(self._device)
            group = self._make(self.relay)
        except (RuntimeError, Broken, OSError) as failure:
            error = first_line(failure)
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

    def group(self) -> CollectiveGroup | None:
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

    def leave(self) -> None:
        self.give_up()

    def left(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
