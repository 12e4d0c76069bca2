"""Nothing of ours is inside torch when the interpreter ends.

While it is finalised, CPython ends every other thread that asks for it by unwinding that thread's stack. Inside torch
this meets a frame that must not be unwound, and the process dies of SIGABRT: "terminate called without an active
exception" (pytorch issue 190489). A thread of a gloo group asks for the interpreter after every collective, once to say
that it has ended and once to let go of its tensors; how late, is for the scheduler to say. So whatever is held here
leaves before: at exit, when all threads that are waited for have ended, and with all of Python still in place.

That has a deadline, since a peer that is frozen keeps a collective until the group's own limit. Then the interpreter
ends all the same. What is still inside torch is never freed, which would wait there for it without a deadline, and does
no harm, unless the peer or that limit ends the collective in the very moments of the end.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import time
import weakref
from contextlib import suppress
from typing import Protocol

#: Seconds that the end of a process waits for all of them together. A peer that is dead takes milliseconds.
EXIT_S = 10.0


class Inside(Protocol):
    """Something that has threads inside torch."""

    def leave(self) -> None:
        """Begin to. Never waits, and starts no thread: at exit there may be no new ones. Called again: nothing."""

    def left(self, timeout_s: float) -> bool:
        """Whether, after `leave`, no thread of it is inside torch any more. Waits for that, but not longer."""


_inside: weakref.WeakSet[Inside] = weakref.WeakSet()


def leaves_at_exit(each: Inside) -> None:
    _inside.add(each)


def _leave() -> None:
    """All begin before any is waited for: one may be what another waits for."""
    deadline = time.monotonic() + EXIT_S
    inside = list(_inside)
    for each in inside:
        with suppress(RuntimeError):
            each.leave()
    for each in inside:
        if not each.left(max(deadline - time.monotonic(), 0.0)):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))  # what is still referred to is not freed


atexit.register(_leave)
os.register_at_fork(after_in_child=_inside.clear)  # a child has none of these threads


class HoldsDescriptors(Protocol):
    def drop(self) -> None:
        """Close the descriptors of this process, and nothing else. After `close`: nothing."""


_held: weakref.WeakSet[HoldsDescriptors] = weakref.WeakSet()


def close_on_fork(each: HoldsDescriptors) -> None:
    _held.add(each)


def _drop_all() -> None:
    for each in list(_held):
        with suppress(OSError):
            each.drop()


os.register_at_fork(after_in_child=_drop_all)
