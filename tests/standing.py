"""A process that stands still, for tests of who waits for it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

_HANG_S = 240.0


def stand_still(pid: int) -> None:
    """SIGSTOP, and back only when every thread of it stands.

    The signal is taken by one thread, when it next runs: on a busy machine the others go on for a while.
    """
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + _HANG_S
    while not all(_state(task) in "TtZX" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < end, "it does not stop"


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # the thread has ended meanwhile
        return "X"
