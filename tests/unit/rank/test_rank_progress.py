"""How far a staging is, from the thread that reads to what a front says."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import torch

from engine_adapter.placement.atoms import make_cuts
from engine_adapter.placement.declared.rules import Rules
from engine_adapter.rank.agent import RankAgent
from engine_adapter.rank.channel import BytesStaged, ChannelError, Frame, FrameKind, FrontChannel, RankChannel
from engine_adapter.rank.main import RankProcess
from engine_adapter.rank.messages import RankPlan, RankRefused, RankStage, RankStatus, RankVerify
from engine_adapter.rank.staging import EVERY_S, Meter
from engine_adapter.replica.ranks import RankCalls, RankLine
from engine_adapter.testing.bare import BareEngine
from engine_adapter.testing.small_models import manifest_of
from transports.testing import MemorySource
from updater.core.participant import DiskOffer
from updater.protocol import wire


def test_a_meter_speaks_now_and_then_and_says_the_sum() -> None:
    now, told = [5.0], list[int]()
    meter = Meter(told.append, lambda: now[0])
    for seconds in (0.0, EVERY_S / 2, EVERY_S / 2, EVERY_S / 2, EVERY_S):
        now[0] += seconds
        meter(10)
    assert told == [30, 50]


def test_a_rank_tells_while_it_stages() -> None:
    tensors = {"a": torch.ones(3, 4), "b": torch.ones(5)}
    ticks = iter(range(1000))
    told: list[tuple[int, int]] = []
    engine = BareEngine({"a": (3, 4), "b": (5,)}, Rules(), dtypes=dict.fromkeys("ab", torch.float32))
    agent = RankAgent(
        engine,
        open_source=lambda *_: MemorySource(tensors, manifest_of(tensors, True)),
        clock=lambda: float(next(ticks)),  # every look is a second later
        tell=lambda serial, done: told.append((serial, done)),
    )
    plan = agent.plan(RankPlan(3, DiskOffer("/x"), ("/",), ""))
    reply = agent.stage(RankStage(3, 900.0))
    assert told[-1] == (3, reply.bytes_read)
    assert plan.bytes_to_read == reply.bytes_read
    agent.verify(RankVerify(3, make_cuts(plan.tensors, [plan.boxes]), 900.0))


def test_what_a_rank_tells_reaches_its_front() -> None:
    async def main() -> list[tuple[int, BytesStaged]]:
        heard: list[tuple[int, BytesStaged]] = []
        ours, theirs = socket.socketpair()
        calls = RankCalls(on_staged=lambda rank, staged: heard.append((rank, staged)))
        reading = asyncio.create_task(calls.read(RankLine(4, await FrontChannel.over(ours))))
        rank = RankProcess(RankChannel(theirs))
        rank._tell(3, 100)
        rank._tell(3, 200)
        theirs.close()
        async with asyncio.timeout(120):
            await reading
        return heard

    assert asyncio.run(main()) == [(4, BytesStaged(3, 100)), (4, BytesStaged(3, 200))]


class Narrow(RankChannel):
    """Refuses the first frame, as one that is too long."""

    refused = False

    def send(self, frame: Any) -> None:
        if not self.refused:
            self.refused = True
            raise ChannelError("too long")
        super().send(frame)


def test_an_answer_that_is_too_long_is_a_refusal() -> None:
    """Else the front would wait for its deadline, and the thread that answers would be gone."""
    ours, theirs = socket.socketpair()
    rank = RankProcess(Narrow(theirs))
    front = RankChannel(ours)
    rank.server.answer(Frame.of(FrameKind.CALL, 7, "status", RankStatus()))
    answer = front.receive()
    assert (answer.header.kind, answer.header.id) == (FrameKind.REFUSED, 7)
    assert wire.decode(RankRefused, answer.body).failures[0].code == "body_too_large"
    ours.close()
    theirs.close()
