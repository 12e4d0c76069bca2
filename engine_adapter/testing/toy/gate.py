"""Where the control thread of a rank and its step loop meet: pausing between two steps, on all ranks at one step.

Rank 0 decides: it sends `pause` instead of a step. The others stop when that arrives, and wait for their own
control thread before they run what comes next, so that no rank steps before its own `unpause`.
"""

from __future__ import annotations

import threading


class PauseGate:
    """All methods are safe from both threads; `deadline_s` counts from the call."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._wanted = False
        self._held = False
        self._stopping = False
        self._broken: BaseException | None = None

    # ----- control thread

    def pause(self, deadline_s: float) -> None:
        """Returns when the loop stands still. Raises TimeoutError, and has then withdrawn the wish."""
        with self._changed:
            self._wanted = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._held or self._broken is not None, deadline_s)
            if not self._held:
                self._wanted = False
                self._changed.notify_all()
                raise self._broken or TimeoutError("the loop did not reach a step boundary")

    def unpause(self, deadline_s: float) -> None:
        """Returns when the loop has left. Raises TimeoutError where rank 0 does not go on."""
        with self._changed:
            self._wanted = False
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: not self._held or self._broken is not None, deadline_s):
                raise TimeoutError("the loop did not leave its pause")

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def wake(self) -> None:
        """Something to do came in."""
        with self._changed:
            self._changed.notify_all()

    @property
    def held(self) -> bool:
        with self._changed:
            return self._held

    @property
    def stopping(self) -> bool:
        with self._changed:
            return self._stopping

    # ----- loop thread

    @property
    def wanted(self) -> bool:
        with self._changed:
            return self._wanted and not self._stopping

    def hold(self) -> None:
        """The loop stands between two steps."""
        with self._changed:
            self._held = True
            self._changed.notify_all()

    def wait_wanted(self, timeout_s: float) -> bool:
        """Until the control thread lets go (True), or for `timeout_s` (False)."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._wanted or self._stopping, timeout_s)

    def leave(self) -> None:
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def idle(self, ready: object, timeout_s: float) -> None:
        """Wait for work, a pause, a stop, or `timeout_s`. `ready`: a sized container of new work."""
        with self._changed:
            self._changed.wait_for(lambda: bool(ready) or self._wanted or self._stopping, timeout_s)

    @property
    def failure(self) -> str | None:
        """What ended the loop, or None."""
        with self._changed:
            return None if self._broken is None else f"{type(self._broken).__name__}: {self._broken}"

    def fail(self, error: BaseException) -> None:
        """The loop ended: no thread may wait for it."""
        with self._changed:
            self._broken = error
            self._changed.notify_all()
