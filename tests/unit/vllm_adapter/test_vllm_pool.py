"""vLLM's workers as ranks: real sockets, a client of the engine that a test controls."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine_adapter.hosted.pool import Attach, AttachedPool
from engine_adapter.rank.channel import BytesStaged, ChannelClosed, Frame, FrameKind, RankChannel, RankLabel
from engine_adapter.rank.host import RankServer
from engine_adapter.rank.messages import (
    RankDiscard,
    RankDone,
    RankHello,
    RankInstall,
    RankInvalidate,
    RankInvalidateReply,
    RankPause,
    RankPauseReply,
    RankRestore,
    RankResume,
)
from engine_adapter.vllm.control import Attached, VllmControl
from updater.core.errors import Aborted, Failure, LiveweightsError
from updater.core.participant import RankInfo
from updater.core.policy import CachePolicy, Capabilities, InstallMode
from updater.protocol import wire

INSTALL = RankInstall(3, 1, InstallMode.FLIP, "0-3", "ab", CachePolicy.RESET)


class Rank:
    """A worker's end: real socket, real rank server; replies are what the protocol wants."""

    def __init__(self, number: int, size: int, log: list[Any]) -> None:
        self.number, self.size, self.log = number, size, log
        self.ends: list[socket.socket] = []
        self.channel: RankChannel | None = None
        self.server: RankServer | None = None
        self.refuses: str = ""
        self.holds: threading.Event | None = None  # what a discard waits for, once it said that it began

    def connect(self, address: str, token: str, number: int | None = None) -> None:
        end = socket.socket(socket.AF_UNIX)
        self.ends.append(end)
        end.connect(address)
        self.channel = RankChannel(end)
        attach = Attach(token, self.number if number is None else number, self.size, os.getpid())
        self.channel.send(Frame.of(FrameKind.EVENT, 0, "attach", attach))
        self.server = RankServer(self.channel, self.handle)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()

    def handle(self, verb: str, request: Any) -> Any:
        self.log.append((self.number, verb))
        if verb == self.refuses:
            raise LiveweightsError(Failure("rank_failed", "on order"))
        if verb == "build":
            info = RankInfo(self.number, os.getpid(), 1, 8, "cpu")
            return RankHello(info, self.size, "vllm", Capabilities(cells=()), "")
        if verb == "discard" and self.holds is not None and self.server is not None:
            self.server.event("staged", BytesStaged(request.serial, 0))
            self.holds.wait(60)
        if verb == "pause":
            return RankPauseReply(1, "", request.serial, False)
        return RankInvalidateReply(()) if verb == "invalidate" else RankDone()

    def die(self) -> None:
        assert self.channel is not None
        self.channel._socket.shutdown(socket.SHUT_RDWR)


@dataclass
class Client:
    """vLLM's engine client, as far as the control calls it. `hang`: names of calls that never answer."""

    ranks: list[Rank]
    log: list[Any]
    hang: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    prefix_reset: bool = True
    sleeping: bool = False
    attach_number: int | None = None
    fails_on: int = -1
    strangers: bool = False

    async def _does(self, name: str, *values: Any) -> None:
        self.log.append((name, *values))
        if name in self.broken:
            raise RuntimeError("EngineCore encountered an issue")
        if name in self.hang:
            await asyncio.Event().wait()

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        await self._does(method)
        if method == "liveweights_attach":
            for rank in self.ranks:
                if self.strangers:
                    rank.connect(args[0], "not the token")
                rank.connect(*args, self.attach_number)
        return [
            wire.plain(Attached(rank.number, rank.number != self.fails_on, "on order" * (rank.number == self.fails_on)))
            for rank in self.ranks
        ]

    async def is_sleeping(self) -> bool:
        await self._does("is_sleeping")
        return self.sleeping

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        await self._does("pause", mode, clear_cache)

    async def resume_generation(self) -> None:
        await self._does("resume")

    async def update_weight_version(self, version: str) -> None:
        await self._does("label", version)

    async def reset_prefix_cache(self, *, reset_running_requests: bool, reset_connector: bool) -> bool:
        await self._does("prefix", reset_running_requests, reset_connector)
        return self.prefix_reset

    async def reset_mm_cache(self) -> None:
        await self._does("mm")

    async def reset_encoder_cache(self) -> None:
        await self._does("encoder")


@dataclass
class World:
    client: Client
    pool: AttachedPool
    log: list[Any]
    deaths: list[Failure]
    staged: list[tuple[int, BytesStaged]]
    heard: asyncio.Event  # a rank told how far it has staged


def run(main: Callable[[World], Awaitable[None]], size: int = 2, **client: Any) -> None:
    async def bounded() -> None:
        log: list[Any] = []
        deaths: list[Failure] = []
        staged: list[tuple[int, BytesStaged]] = []
        heard = asyncio.Event()

        def told(rank: int, done: BytesStaged) -> None:
            staged.append((rank, done))
            heard.set()

        made = Client([Rank(number, size, log) for number in range(size)], log, **client)
        pool = AttachedPool(
            VllmControl(made),
            "/model",
            size,
            on_death=deaths.append,
            on_staged=told,
            relabelled=lambda *said: log.append(("relabelled", *said)),
        )
        try:
            await asyncio.wait_for(main(World(made, pool, log, deaths, staged, heard)), 60)
        finally:
            await pool.stop()
            for end in (end for rank in made.ranks for end in rank.ends):
                end.close()

    asyncio.run(bounded())


async def _transaction(pool: AttachedPool) -> None:
    await pool.call("pause", RankPause(3, 20), deadline_s=20)
    await pool.call("install", INSTALL, deadline_s=20)
    await pool.call("invalidate", RankInvalidate(3, 1, CachePolicy.RESET), deadline_s=20)
    await pool.call("resume", RankResume(3, 20), deadline_s=20)


def test_workers_attach_and_answer_in_rank_order() -> None:
    async def main(world: World) -> None:
        world.client.ranks.reverse()  # they connect in any order
        hellos = await world.pool.start(20)
        assert [hello.info.rank for hello in hellos] == [0, 1]

    run(main)


def test_who_does_not_bring_the_token_is_nobody() -> None:
    async def main(world: World) -> None:
        await world.pool.start(20)
        assert len(world.pool.hellos) == 2

    run(main, strangers=True)


def test_a_worker_that_cannot_attach_is_named() -> None:
    async def main(world: World) -> None:
        with pytest.raises(Aborted) as caught:
            await world.pool.start(20)
        assert [(failure.code, failure.rank) for failure in caught.value.failures] == [("rank_failed", 1)]

    run(main, fails_on=1)


def test_two_workers_of_one_number_are_refused() -> None:
    async def main(world: World) -> None:
        with pytest.raises(Aborted):
            await world.pool.start(20)
        for rank in world.client.ranks:  # let go, and nothing is held (I6)
            await asyncio.to_thread(rank.thread.join, 30)
            assert not rank.thread.is_alive()

    run(main, attach_number=0)


def test_a_pause_stops_the_engine_before_it_asks_the_ranks_and_a_resume_lets_it_go_after_them() -> None:
    async def main(world: World) -> None:
        await world.pool.start(20)
        world.log.clear()
        await world.pool.call("pause", RankPause(3, 20), deadline_s=20)
        stopped = [("is_sleeping",), ("pause", "keep", False), ("liveweights_stand",)]
        assert world.log[:3] == stopped
        assert sorted(world.log[3:]) == [(0, "pause"), (1, "pause")]
        world.log.clear()
        await world.pool.call("pause", RankPause(3, 20), deadline_s=20)  # a later attempt: our own pause is no sleep
        assert world.log[:2] == stopped[1:]
        world.log.clear()
        await world.pool.call("resume", RankResume(3, 20), deadline_s=20)
        assert (sorted(world.log[:2]), world.log[2:]) == ([(0, "resume"), (1, "resume")], [("resume",)])
        await world.pool.call("resume", RankResume(3, 20), deadline_s=20)
        assert world.log.count(("resume",)) == 1

    run(main)


def test_an_engine_that_sleeps_is_not_touched() -> None:
    async def main(world: World) -> None:
        await world.pool.start(20)
        world.log.clear()
        with pytest.raises(Aborted) as caught:
            await world.pool.call("pause", RankPause(3, 20), deadline_s=20)
        assert caught.value.code == "replica_asleep"
        assert world.log == [("is_sleeping",)]

    run(main, sleeping=True)


def test_a_pause_that_takes_too_long_is_given_up_and_the_engine_goes_on() -> None:
    async def main(world: World) -> None:
        await world.pool.start(20)
        with pytest.raises(Aborted) as caught:
            await world.pool.call("pause", RankPause(3, 0.1), deadline_s=0.1)
        assert caught.value.code == "quiesce_timeout"
        assert world.log[-1] == ("resume",)

    run(main, hang={"pause"})


@pytest.mark.parametrize("call", ["pause", "label", "prefix", "resume"])
def test_what_vllm_raises_becomes_a_typed_failure(call: str) -> None:
    async def main(world: World) -> None:
        await world.pool.start(20)
        with pytest.raises(Aborted) as caught:
            await _transaction(world.pool)
        assert caught.value.code == "rank_failed"

    run(main, broken={call})


def test_bytes_come_before_the_label_and_both_before_the_namespace() -> None:
    async def main(world: World) -> None:
        await world.pool.start(20)
        world.log.clear()
        await world.pool.call("install", INSTALL, deadline_s=20)
        assert sorted(world.log[:2]) == [(0, "install"), (1, "install")]
        assert world.log[2:] == [("label", "0-3"), ("relabelled", "0-3", "ab", CachePolicy.RESET)]
        world.log.clear()
        await world.pool.call("restore", RankRestore(3, 1, "0-2", "cd"), deadline_s=20)
        assert world.log[2:] == [("label", "0-2"), ("relabelled", "0-2", "cd", CachePolicy.RESET)]
        world.log.clear()
        await world.pool.call("label", RankLabel("0-4", "ef"), deadline_s=20)
        assert world.log[2:] == [("label", "0-4"), ("relabelled", "0-4", "ef", CachePolicy.RESET)]

    run(main)


def test_a_rank_that_does_not_install_leaves_the_label_as_it_was() -> None:
    async def main(world: World) -> None:
        await world.pool.start(20)
        world.client.ranks[1].refuses = "install"
        with pytest.raises(Aborted):
            await world.pool.call("install", INSTALL, deadline_s=20)
        assert not [each for each in world.log if each[0] in ("label", "relabelled")]

    run(main)


@pytest.mark.parametrize("cleared", [True, False])
def test_the_caches_own_answer_is_what_is_told(cleared: bool) -> None:
    async def main(world: World) -> None:
        await world.pool.start(20)
        replies = await world.pool.call("invalidate", RankInvalidate(3, 1, CachePolicy.RESET), deadline_s=20)
        tiers = {tier.name: tier.cleared for reply in replies for tier in reply.tiers}
        assert tiers == {"prefix": cleared, "multimodal": True, "encoder": True}
        assert ("prefix", True, True) in world.log

    run(main, prefix_reset=cleared)


@pytest.mark.parametrize(
    ("policy", "emptied"), [(CachePolicy.NAMESPACE, {"multimodal", "encoder"}), (CachePolicy.KEEP, set())]
)
def test_a_namespace_keeps_prefixes_apart_and_nothing_else(policy: CachePolicy, emptied: set[str]) -> None:
    """I5. What an encoder made of an image is found by the image alone."""

    async def main(world: World) -> None:
        await world.pool.start(20)
        replies = await world.pool.call("invalidate", RankInvalidate(3, 1, policy), deadline_s=20)
        assert {tier.name for reply in replies for tier in reply.tiers if tier.cleared} == emptied
        cleared = {"mm": "multimodal", "encoder": "encoder", "prefix": "prefix"}
        assert {cleared[each[0]] for each in world.log if each[0] in cleared} == emptied

    run(main)


@pytest.mark.case("F44")
def test_workers_are_met_without_a_file_that_could_be_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("a" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

    async def main(world: World) -> None:
        assert len(await world.pool.start(20)) == 2
        assert {bytes(rank.ends[0].getpeername())[:13] for rank in world.client.ranks} == {b"\0liveweights-"}
        assert list(folder.iterdir()) == []

    run(main)


def test_a_worker_that_dies_is_told_once_and_ends_the_calls_that_wait_for_it() -> None:
    async def main(world: World) -> None:
        await world.pool.start(20)
        world.client.ranks[1].holds = threading.Event()
        waiting = asyncio.create_task(world.pool.call("discard", RankDiscard(3), deadline_s=20))
        await world.heard.wait()
        world.client.ranks[1].die()
        with pytest.raises(Aborted) as caught:
            await waiting
        world.client.ranks[1].holds.set()
        assert [(f.code, f.rank) for f in caught.value.failures] == [("rank_died", 1)]
        assert [(death.code, death.rank) for death in world.deaths] == [("rank_died", 1)]

    run(main)


def test_how_far_a_rank_has_staged_is_heard() -> None:
    async def main(world: World) -> None:
        await world.pool.start(20)
        server = world.client.ranks[1].server
        assert server is not None
        server.event("staged", BytesStaged(3, 100))
        await world.heard.wait()
        assert world.staged == [(1, BytesStaged(3, 100))]

    run(main)


def test_stopping_lets_the_workers_go() -> None:
    async def main(world: World) -> None:
        await world.pool.start(20)
        await world.pool.stop()
        channel = world.client.ranks[0].channel
        assert channel is not None
        with pytest.raises((ChannelClosed, OSError)):
            await asyncio.to_thread(channel.receive)
        assert world.deaths == []

    run(main)
