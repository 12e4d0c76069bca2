"""Errors that are copied, and carried between processes (a Ray actor's to its caller), stay whole."""

from __future__ import annotations

import copy
import importlib
import pickle
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import trainer_side
import updater
from updater.coordinator.journal.journal import JournalError, OwnershipLost
from updater.coordinator.journal.schema import JournalRefused
from updater.core.errors import Failure, LiveweightsError, Rejected
from updater.protocol.problems import RejectedWith

FAILURES = tuple(
    Failure("busy", f"it is busy with {count}", replica="one", rank=count, tensor="t", file="f", hint="wait for it")
    for count in range(3)
)
#: How those are made that are not made of failures alone.
MADE: dict[type[LiveweightsError], Callable[[], LiveweightsError]] = {
    JournalError: lambda: JournalError("no space"),
    OwnershipLost: lambda: OwnershipLost("another one has it"),
    JournalRefused: lambda: JournalRefused("number 9", Path("journal.sqlite3"), "run a later release"),
    RejectedWith: lambda: RejectedWith(*FAILURES, live_version="0-1", members={"phase": "ready"}),
}


def kinds(kind: type[LiveweightsError] = LiveweightsError) -> Iterator[type[LiveweightsError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from kinds(each)


def every_kind() -> list[type[LiveweightsError]]:
    """Those of the packages that a coordinator and a trainer load."""
    for package in (updater, trainer_side):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not any(part in module.name for part in ("ray", "testing", "demo", "megatron", "trl", "__main__")):
                importlib.import_module(module.name)
    return [kind for kind in dict.fromkeys(kinds()) if kind.__module__.split(".")[0] in ("updater", "trainer_side")]


def whole(kind: type[LiveweightsError]) -> LiveweightsError:
    made = MADE.get(kind)
    if made is not None:
        return made()
    return kind(*FAILURES, live_version="0-7", receipt={"outcome": "aborted", "members": [1]}, retryable=False)


@pytest.mark.case("F14")
def test_every_error_survives_copies_and_another_process_whole() -> None:
    found = every_kind()
    assert {Rejected, JournalError, JournalRefused, RejectedWith} <= set(found)
    for kind in found:
        error = whole(kind)
        error.add_note("at the coordinator")
        for again in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
            assert type(again) is kind
            assert vars(again) == vars(error)
            assert (str(again), again.args) == (str(error), error.args)
            assert (again.code, again.hint, again.status) == (error.code, error.hint, error.status)
