"""The steps of a toy engine in a test's hand, through a FIFO that rank 0 reads.

What has to happen while a request runs can then happen at leisure: the request cannot end before the test says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class Pace:
    """Rank 0's end. `path`: a FIFO, or empty: then every step begins at once."""

    def __init__(self, path: str) -> None:
        self._end = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if path else -1
        if path:
            os.set_blocking(self._end, True)

    def wait(self) -> None:
        """Inside a step, before it computes: one byte for each. At once where no process holds the other end."""
        if self._end >= 0:
            os.read(self._end, 1)


@contextmanager
def steps_held(path: Path) -> Iterator[Callable[[int], None]]:
    """While this lasts the engine makes only as many steps as `allow(count)` was told; then it goes on freely.

    Raises OSError where no engine has the FIFO open.
    """
    end = os.open(path, os.O_WRONLY | os.O_NONBLOCK)

    def allow(count: int) -> None:
        os.write(end, b"." * count)

    try:
        yield allow
    finally:
        os.close(end)
