"""A trainer forks workers that inherit its sockets: with them open, the ranks would not see the trainer's death.

Whatever is held here is closed in every child that is forked; one that is started by exec inherits nothing anyway.
"""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from typing import Protocol


class Held(Protocol):
    def drop(self) -> None:
        """Close the descriptors of this process, and nothing else. After `close`: nothing."""


_held: weakref.WeakSet[Held] = weakref.WeakSet()


def close_on_fork(each: Held) -> None:
    _held.add(each)


def _drop_all() -> None:
    for each in list(_held):
        with suppress(OSError):
            each.drop()


os.register_at_fork(after_in_child=_drop_all)
