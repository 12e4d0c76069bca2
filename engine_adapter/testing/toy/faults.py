"""Faults that a test orders in a toy engine by its options, so that they happen inside a real rank process."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

ACTIONS = ("raise", "die", "hang")
#: Verbs of a rank engine at which a fault may sit; `rebind` and `bind` happen in the middle of an install.
VERBS = ("placement", "pause", "unpause", "reset_cache", "set_version", "rebind", "build", "bind", "submit", "step")


class InjectedFault(RuntimeError):
    """What a fault with the action `raise` raises."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`action` happens `when` (before, after) the `nth` call (from 1; 0: every call) of `verb` on `rank`."""

    action: str
    when: str
    verb: str
    rank: int
    nth: int

    @classmethod
    def parse(cls, text: str) -> Fault:
        """`action:when:verb:rank:nth`, for example `die:before:set_version:1:2`. Raises ValueError."""
        action, when, verb, rank, nth = text.split(":")
        if action not in ACTIONS or when not in ("before", "after") or verb not in VERBS:
            raise ValueError(f"not a fault: {text!r}")
        return cls(action, when, verb, int(rank), int(nth))


class Faults:
    """The faults of one rank. `text`: faults joined by `;`."""

    def __init__(self, text: str, rank: int) -> None:
        every = (Fault.parse(part) for part in text.split(";") if part)
        self._mine = tuple(fault for fault in every if fault.rank == rank)
        self._calls: Counter[str] = Counter()

    @contextmanager
    def around(self, verb: str) -> Iterator[None]:
        self._calls[verb] += 1
        self._at(verb, "before")
        yield
        self._at(verb, "after")

    def _at(self, verb: str, when: str) -> None:
        for fault in self._mine:
            if (fault.verb, fault.when) == (verb, when) and fault.nth in (0, self._calls[verb]):
                _happen(fault)


def _happen(fault: Fault) -> None:
    if fault.action == "die":
        os._exit(66)
    if fault.action == "hang":
        threading.Event().wait(3600)  # the test's owner ends the process long before
    raise InjectedFault(f"{fault.when} {fault.verb}")
