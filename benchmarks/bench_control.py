"""What an update costs in control: CPU seconds, holds of the event loop, bytes of messages, memory. No weights move.

One process plays a front (its real work, calls and channels), others play its ranks: they answer with plans and votes
of as many tensors as asked. Then a real coordinator publishes a manifest of as many tensors to simulated fronts.

A hold is the CPU time of one turn of an event loop: that long, nothing else on that loop is served.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import selectors
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.common import Report
from engine_adapter.placement.boxes import cells_within
from engine_adapter.placement.values import AtomDigest, RankVerifyReply, SourceBoxes, WireTensor
from engine_adapter.rank.channel import Frame, FrontChannel, RankChannel
from engine_adapter.rank.host import RankServer
from engine_adapter.rank.messages import (
    RankAuditReply,
    RankDone,
    RankHello,
    RankInvalidateReply,
    RankPauseReply,
    RankPlanReply,
    RankStageReply,
)
from engine_adapter.replica.admission import Gate
from engine_adapter.replica.rank_work import RankWork
from engine_adapter.replica.ranks import RankCalls, RankLine
from engine_adapter.testing.requests import HandEngine
from transports.base import Box
from updater.coordinator.clock import LoopClock
from updater.core.participant import (
    DiskOffer,
    Fence,
    FenceRequest,
    InvalidateRequest,
    Kind,
    PauseRequest,
    PlanReply,
    PlanRequest,
    RankInfo,
    ResumeRequest,
    StageRequest,
    VerifyRequest,
)
from updater.core.policy import CachePolicy, Capabilities, InFlight, InstallMode
from updater.protocol import wire
from updater.protocol.manifest import Manifest, TensorEntry
from updater.settings import Deadlines
from updater.testing.fronts import SimulatedFleet, settle
from updater.testing.service import LocalService

_DEADLINE_S = 600.0
_SIDE = 32  # elements of a dimension, times the ranks where it is cut
_CUTS = (0, 1, None)  # dimension along which every third tensor is cut: rows, columns, not at all
_RANK_PROCESSES = 2


class Turns(selectors.EpollSelector):
    """The selector of an event loop. `longest`: CPU seconds between two waits, since it was last set to 0."""

    def __init__(self) -> None:
        super().__init__()
        self.longest, self._since = 0.0, time.thread_time()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.longest = max(self.longest, time.thread_time() - self._since)
        try:
            return super().select(timeout)
        finally:
            self._since = time.thread_time()


@dataclass(slots=True)
class Meter:
    """CPU seconds of this process, all threads, and the longest hold of its loop, between two looks."""

    turns: Turns
    _began: float = field(default_factory=time.process_time)

    async def look(self) -> tuple[float, float]:
        """(CPU seconds, longest hold in ms) since the last look."""
        await asyncio.sleep(0)  # ends the turn that runs
        now = time.process_time()
        found = now - self._began, 1e3 * self.turns.longest
        self._began, self.turns.longest = now, 0.0
        return found


@contextmanager
def measured_loop() -> Iterator[tuple[asyncio.Runner, Turns]]:
    turns = Turns()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(turns)) as runner:
        yield runner, turns


# --- ranks


def tensors_of(count: int, ranks: int) -> list[WireTensor]:
    """`count` tensors of a checkpoint, with the digests that the votes of the ranks below add up to."""
    return [
        WireTensor(
            f"model.layers.{i // 1000}.mlp.experts.{i % 1000}.w", "BF16", (ranks * _SIDE,) * 2, _digest(i, ranks)
        )
        for i in range(count)
    ]


def _digest(number: int, ranks: int) -> str:
    return f"{1 if _CUTS[number % 3] is None else ranks:016x}"


def _box(number: int, rank: int, ranks: int) -> Box:
    """What a rank holds of a tensor."""
    sides = [(0, ranks * _SIDE)] * 2
    cut = _CUTS[number % 3]
    if cut is not None:
        sides[cut] = (rank * _SIDE, _SIDE)
    return Box(tuple(start for start, _ in sides), tuple(size for _, size in sides))


class Rank:
    """Answers a front as a rank would that holds its part of every tensor."""

    def __init__(self, rank: int, ranks: int, count: int) -> None:
        self._rank, self._ranks, self._count = rank, ranks, count

    def handle(self, verb: str, request: Any) -> Any:
        match verb:
            case "plan":
                return self._plan()
            case "verify":
                return self._verify(request)
            case "stage":
                return RankStageReply(0)
            case "pause":
                return RankPauseReply(1, "", request.serial, False)
            case "invalidate":
                return RankInvalidateReply(())
            case "audit":
                return RankAuditReply(self._count, ())
        return RankDone()

    def _plan(self) -> RankPlanReply:
        tensors = tensors_of(self._count, self._ranks)
        boxes = tuple(SourceBoxes(each.name, (_box(i, self._rank, self._ranks),)) for i, each in enumerate(tensors))
        return RankPlanReply(tuple(tensors) if self._rank == 0 else (), boxes, (), "", 0)

    def _verify(self, request: Any) -> RankVerifyReply:
        one = f"{1:016x}"
        atoms = tuple(
            AtomDigest(each.name, cell, one)
            for i, each in enumerate(request.cuts)
            for cell in cells_within(each.cuts, _box(i, self._rank, self._ranks))
        )
        return RankVerifyReply(atoms, self._count, ("changed",), ())


def play_ranks(ends: Sequence[tuple[int, socket.socket]], ranks: int, count: int) -> None:
    """In a process of its own: some ranks, one after another as their calls come."""
    servers = [RankServer(RankChannel(end), Rank(rank, ranks, count).handle) for rank, end in ends]
    threads = [threading.Thread(target=server.run) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# --- a front


class CountingChannel(FrontChannel):
    """`nbytes`: of all messages, both ways."""

    nbytes = 0

    def send(self, frame: Frame) -> None:
        self.nbytes += len(frame.body)
        super().send(frame)

    async def receive(self) -> Frame:
        frame = await super().receive()
        self.nbytes += len(frame.body)
        return frame


class Ranks(RankCalls):
    """All ranks, played by other processes."""

    async def attach(self, ends: Sequence[socket.socket]) -> None:
        capabilities = Capabilities(((InFlight.DRAIN, CachePolicy.RESET),), (InstallMode.FLIP,))
        for rank, end in enumerate(ends):
            self.lines.append(RankLine(rank, await CountingChannel.over(end)))
        self.hellos = tuple(
            RankHello(RankInfo(rank, 1, 1, 1), len(ends), "played", capabilities, "") for rank in range(len(ends))
        )

    def bytes_per_rank(self) -> float:
        return sum(line.channel.nbytes for line in self.lines) / len(self.lines)  # type: ignore[attr-defined]


async def front(count: int, ends: Sequence[socket.socket], meter: Meter, told: Callable[..., None]) -> None:
    """Two updates; the second is of the same tensors."""
    pool = Ranks()
    await pool.attach(ends)
    readers = [asyncio.create_task(pool.read(line)) for line in pool.lines]
    work = RankWork(pool, Gate(HandEngine()), "/model", ())
    policy = (InFlight.DRAIN, CachePolicy.RESET, InstallMode.FLIP)
    before = 0.0
    for serial in (1, 2):
        await meter.look()
        fence = Fence("f", 1, serial, 1, "i")
        plan = PlanRequest(fence, Kind.UPDATE, "u", f"0-{serial}", DiskOffer("/x"), "", "", *policy, True, (), False)
        steps: dict[str, Callable[[], Any]] = {
            "plan": lambda plan=plan: work.plan(plan),
            "stage": lambda fence=fence: work.stage(StageRequest(fence, _DEADLINE_S)),
            "verify": lambda fence=fence: work.verify(VerifyRequest(fence, _DEADLINE_S)),
            "pause": lambda fence=fence: work.pause(PauseRequest(fence, InFlight.DRAIN, 60.0, 60.0), "d", 0, 0),
            "install": lambda fence=fence, plan=plan: work.install(FenceRequest(fence), plan, "d"),
            "invalidate": lambda fence=fence: work.invalidate(InvalidateRequest(fence, CachePolicy.RESET)),
            "resume": lambda fence=fence: work.resume(ResumeRequest(fence, True, "0-1", "d")),
            "discard": lambda fence=fence: work.discard(fence.serial),
        }
        spent: dict[str, tuple[float, float]] = {}
        for name, step in steps.items():
            await step()
            spent[name] = await meter.look()
        sent = pool.bytes_per_rank()
        told(serial, spent, sent - before)
        before = sent
    for line in pool.lines:
        line.channel.close()
    await asyncio.gather(*readers)


def measure_front(report: Report, count: int, ranks: int) -> None:
    pairs = [socket.socketpair() for _ in range(ranks)]
    context = multiprocessing.get_context("fork")
    processes = []
    for at in range(_RANK_PROCESSES):
        ends = [(rank, pair[1]) for rank, pair in enumerate(pairs) if rank % _RANK_PROCESSES == at]
        processes.append(context.Process(target=_rank_process, args=(pairs, ends, ranks, count)))
        processes[-1].start()
    for _, end in pairs:
        end.close()
    where = f"{count:,} tensors x {ranks} ranks"

    def told(serial: int, spent: dict[str, tuple[float, float]], sent: float) -> None:
        seconds, hold = sum(cpu for cpu, _ in spent.values()), max(hold for _, hold in spent.values())
        detail = ", ".join(f"{verb} {cpu:.2f} s/{held:.0f} ms" for verb, (cpu, held) in spent.items() if cpu > 0.005)
        goal = 2.0 if serial == 2 else None
        report.add(f"front: CPU seconds of update {serial}", seconds, goal=goal, at_most=True, detail=where)
        report.add(f"front: longest hold in update {serial}, ms", hold, goal=50.0, at_most=True, detail=detail)
        report.add(f"front: messages per rank in update {serial}, MB", sent / 1e6, detail="both ways")

    with measured_loop() as (runner, turns):
        runner.run(front(count, [end for end, _ in pairs], Meter(turns), told))
    for process in processes:
        process.join()
    report.add("front: peak memory, MB", _peak_mb(), detail=where)


def _rank_process(
    pairs: Sequence[tuple[socket.socket, socket.socket]],
    mine: Sequence[tuple[int, socket.socket]],
    ranks: int,
    count: int,
) -> None:
    for rank, (front_end, rank_end) in enumerate(pairs):
        front_end.close()
        if rank not in {number for number, _ in mine}:
            rank_end.close()
    play_ranks(mine, ranks, count)


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# --- a coordinator


class Peer:
    """A simulated front as a coordinator reaches one over a wire: every request is encoded, and counted.

    The manifest goes no further: what a front does with it is not this process's work.
    """

    def __init__(self, inner: Any, digest: str, sent: list[int]) -> None:
        self.url, self._inner, self._digest, self._sent = inner.url, inner, digest, sent

    async def call(self, verb: str, request: Any, timeout_s: float) -> Any:
        self._sent[0] += len(wire.encode(request))
        if isinstance(request, PlanRequest):
            request = replace(request, manifest="")
        reply = await self._inner.call(verb, request, timeout_s)
        return replace(reply, manifest_digest=self._digest) if isinstance(reply, PlanReply) else reply

    async def close(self) -> None:
        await self._inner.close()


class PeerFleet(SimulatedFleet):
    """`digest`: of the manifest that is published. `sent`: bytes of requests so far."""

    digest = ""

    def __init__(self, clock: Any) -> None:
        super().__init__(clock)
        self.sent = [0]

    def make(self, replica: str, url: str) -> Any:
        return Peer(super().make(replica, url), self.digest, self.sent)


async def coordinator(count: int, replicas: int, ranks: int, watchers: int, meter: Meter, told: Any) -> None:
    clock = LoopClock()
    entries = tuple(TensorEntry(f"w{i:07}", "BF16", (64, 64), f"{i:016x}") for i in range(count))
    manifest = Manifest(entries)
    text, digest = manifest.to_json().encode(), manifest.digest
    fleet = PeerFleet(clock)
    fleet.digest = digest
    with tempfile.TemporaryDirectory() as folder:
        deadlines = Deadlines(status_s=30.0, plan_s=_DEADLINE_S)
        async with LocalService(Path(folder), fleet=fleet, clock=clock, deadlines=deadlines) as service:
            for front in await service.join(*(f"r{number}" for number in range(replicas))):
                front.ranks = tuple(range(ranks))
            for serial in (1, 2):
                await meter.look()
                fleet.sent[0] = 0
                await service.http.put(f"/v1/manifests/{digest}", content=text, headers=_JSON)
                upload = await meter.look()
                path = service.checkpoint(f"v{serial}")
                body = {"path": path, "version": serial, "manifest": digest}
                answer = await service.post("/v1/updates?wait=true", body)
                if answer.status_code != 200:
                    raise RuntimeError(answer.text[:2000])
                spent = {"upload": upload, "update": await meter.look()}
                told(serial, spent, fleet.sent[0] / (replicas * ranks))
            for clients in (0, watchers):
                await _watched(service, 3 + bool(clients), clients, told)


_JSON = {"Content-Type": "application/json"}


async def _watched(service: LocalService, step: int, clients: int, told: Any) -> None:
    """The pause of an update that so many clients watch."""
    first = service.fleet.make("r0", "http://r0.test")._inner  # type: ignore[attr-defined]
    first.hold["stage"] = asyncio.Event()
    await service.begin(step)
    watching = [asyncio.create_task(service.get(f"/v1/updates/0-{step}/events")) for _ in range(clients)]
    update = service.coordinator.updates.find(f"0-{step}")
    await settle(50 + 10 * clients)
    if update.events.watchers < clients:
        raise RuntimeError(f"{update.events.watchers} of {clients} watch")
    first.hold.pop("stage").set()
    await asyncio.gather(*watching)
    await update.done.wait()
    receipt = update.receipt
    if receipt is None or receipt.pause is None:
        raise RuntimeError(f"no pause: {receipt}")
    told(clients, receipt.pause.closed_ms, None)


def measure_coordinator(report: Report, count: int, replicas: int, ranks: int, watchers: int) -> None:
    where = f"{count:,} tensors, {replicas} replicas of {ranks} ranks"
    pauses: list[float] = []

    def told(number: int, spent: Any, sent: float | None) -> None:
        if sent is None:
            pauses.append(spent)
            if number:
                ratio, both = pauses[1] / pauses[0], f"{pauses[1]:.1f} / {pauses[0]:.1f} ms"
                report.add(f"pause with {number} watchers / without", ratio, goal=1.5, at_most=True, detail=both)
            return
        seconds, hold = sum(cpu for cpu, _ in spent.values()), max(hold for _, hold in spent.values())
        detail = ", ".join(f"{verb} {cpu:.2f} s/{held:.0f} ms" for verb, (cpu, held) in spent.items())
        goal = 2.0 if number == 2 else None
        name = f"coordinator, {replicas * ranks} ranks"
        report.add(f"{name}: CPU seconds of update {number}", seconds, goal=goal, at_most=True, detail=where)
        report.add(f"{name}: longest hold in update {number}, ms", hold, goal=50.0, at_most=True, detail=detail)
        report.add(f"{name}: requests per rank in update {number}, MB", sent / 1e6)

    with measured_loop() as (runner, turns):
        runner.run(coordinator(count, replicas, ranks, watchers, Meter(turns), told))
    report.add("coordinator: peak memory, MB", _peak_mb(), detail=where)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=150_000)
    parser.add_argument("--ranks", type=int, default=16, help="of the front")
    parser.add_argument("--replicas", type=int, default=64, help="of the coordinator, each with as many ranks")
    parser.add_argument("--watchers", type=int, default=500, help="clients of the events of one update")
    options = parser.parse_args()
    report = Report("control work of an update")
    measure_coordinator(report, options.tensors, options.replicas, options.ranks, options.watchers)
    measure_front(report, options.tensors, options.ranks)
    report.finish()


if __name__ == "__main__":
    main()
