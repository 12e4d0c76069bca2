"""A worker extension whose ranks fail on order, inside the real worker processes of a real vLLM engine.

`--worker-extension-cls engine_adapter.vllm.testing.FaultyWorker`, with the orders in the file that the environment
variable `LIVEWEIGHTS_FAULTS` names: `ACTION:before|after:VERB:RANK`, one for each word.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine_adapter.rank.channel import Build, RankChannel
from engine_adapter.testing.toy.faults import InjectedFault
from engine_adapter.vllm.engine import VllmRankEngine
from engine_adapter.vllm.worker import LiveweightsWorker, WorkerRank
from updater.core.policy import CachePolicy

ORDERS = "LIVEWEIGHTS_FAULTS"
EXTENSION = "engine_adapter.vllm.testing.FaultyWorker"
#: The rank protocol's verbs; beside them `stand`, at the pause, and `set_version`, in the middle of an install.
ACTIONS = ("raise", "once", "die", "hang")
_LOOK_EVERY_S = 0.02
_done: set[str] = set()  # orders that happen once, and did


class FaultyWorker(LiveweightsWorker):
    """As `LiveweightsWorker`."""

    def liveweights_rank(self, channel: RankChannel) -> WorkerRank:
        return FaultyRank(self, channel)


class FaultyRank(WorkerRank):
    """As `WorkerRank`, with faults around every verb."""

    def make_engine(self, request: Build) -> VllmRankEngine:
        return _FaultyEngine(self.worker, request.spec)

    def handle(self, verb: str, request: Any) -> Any:
        with around(verb, int(self.worker.rank)):
            return super().handle(verb, request)

    def stand(self, number: int) -> None:
        with around("stand", int(self.worker.rank)):
            super().stand(number)


class _FaultyEngine(VllmRankEngine):
    def set_version(self, version: str, digest: str, cache: CachePolicy) -> None:
        with around("set_version", self.rank):
            super().set_version(version, digest, cache)


@contextmanager
def around(verb: str, rank: int) -> Iterator[None]:
    _at("before", verb, rank)
    yield
    _at("after", verb, rank)


def _at(when: str, verb: str, rank: int) -> None:
    for action in ACTIONS:
        order = f"{action}:{when}:{verb}:{rank}"
        if order in _orders():
            _happen(action, order)


def _orders() -> list[str]:
    path = Path(os.environ.get(ORDERS, ""))
    return path.read_text().split() if path.is_file() else []


def _happen(action: str, order: str) -> None:
    if action == "die":
        os._exit(66)
    if action == "once":
        if order in _done:
            return
        _done.add(order)
    while action == "hang":
        if order not in _orders():
            return
        time.sleep(_LOOK_EVERY_S)
    raise InjectedFault(order)
