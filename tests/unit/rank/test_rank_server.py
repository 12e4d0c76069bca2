"""A rank's server over a real socket: which thread a verb runs on, and who is known to wait for it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from engine_adapter.rank.channel import Frame, FrameKind, RankChannel
from engine_adapter.rank.host import RankServer
from engine_adapter.rank.messages import RankAudit, RankAuditReply, RankDigests, RankDigestsReply, RankStatus
from updater.core.errors import Failure, LiveweightsError


class Rank:
    """An audit lasts until somebody waits for its thread; every other verb is refused at once."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.front = RankChannel(ours)
        self._back = RankChannel(theirs)
        self.server = RankServer(self._back, self._handle)
        self.audits = threading.Event()
        self.threads: dict[str, str] = {}
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()

    def _handle(self, verb: str, _request: Any) -> Any:
        self.threads[verb] = threading.current_thread().name
        if verb == "digests":
            return RankDigestsReply(())
        if verb != "audit":
            raise LiveweightsError(Failure("wrong_phase", "on order"))
        alone = not self.server.awaited()
        self.audits.set()
        while not self.server.awaited():
            threading.Event().wait(0.001)
        return RankAuditReply(int(alone), ())

    def call(self, number: int, verb: str, request: Any) -> None:
        self.front.send(Frame.of(FrameKind.CALL, number, verb, request))

    def close(self) -> None:
        self.front.close()
        self._thread.join(60)
        self._back.close()
        assert not self._thread.is_alive()


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.close()


def test_a_staging_verb_behind_another_one_is_awaited_and_any_other_verb_is_answered_meanwhile(rank: Rank) -> None:
    rank.call(1, "audit", RankAudit("live"))
    assert rank.audits.wait(60)
    rank.call(2, "status", RankStatus())
    first = rank.front.receive()
    assert (first.header.id, first.header.kind) == (2, FrameKind.REFUSED)
    assert not rank.server.awaited()
    rank.call(3, "digests", RankDigests())
    answers = [rank.front.receive() for _ in range(2)]
    assert [(each.header.id, each.header.kind) for each in answers] == [(1, FrameKind.REPLY), (3, FrameKind.REPLY)]
    assert rank.threads["audit"] == rank.threads["digests"] == "staging" != rank.threads["status"]
