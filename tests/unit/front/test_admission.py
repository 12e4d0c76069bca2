"""The gate: who starts, who waits, who is refused, and which version made which token."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from engine_adapter.base import GenerateRequest
from engine_adapter.replica.admission import Gate, Limits
from engine_adapter.replica.replies import ReplyPiece, RunningReply, Span, VersionWish, Wanted
from engine_adapter.testing.requests import HandEngine
from updater.core.errors import Failure, LiveweightsError, Rejected
from updater.core.policy import InFlight
from updater.core.version import Version

Scene = Callable[[HandEngine, Gate], Awaitable[None]]


def play(scene: Scene, limits: Limits | None = None) -> None:
    async def run() -> None:
        engine = HandEngine()
        gate = engine.gate = Gate(engine, limits)
        async with asyncio.timeout(120):
            await scene(engine, gate)

    asyncio.run(run())


def request(gate: Gate, *prompt: int, max_tokens: int = 8) -> GenerateRequest:
    return GenerateRequest(gate.next_id(), prompt or (1, 2, 3), max_tokens)


async def start(gate: Gate, wanted: Wanted | None = None, max_tokens: int = 8) -> RunningReply:
    return await gate.admit(request(gate, max_tokens=max_tokens), wanted or Wanted())


async def pieces(running: RunningReply) -> list[ReplyPiece]:
    return [piece async for piece in running.pieces()]


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def code_of(work: Awaitable[object]) -> str:
    with pytest.raises(LiveweightsError) as caught:
        await work
    return caught.value.code


def test_a_request_runs_on_the_open_version_and_carries_one_span() -> None:
    async def scene(engine: HandEngine, gate: Gate) -> None:
        gate.open("0-1")
        running = await start(gate)
        engine.emit("r1", 5, 6, version="0-1", cached=2)
        engine.emit("r1", 7, version="0-1", finish="stop")
        assert [piece.tokens for piece in await pieces(running)] == [(5, 6), (7,)]
        assert running.spans == [Span("0-1", 0, 3)]
        assert (running.tokens, running.cached_tokens, running.finish_reason) == ([5, 6, 7], 2, "stop")
        assert gate.in_flight == 0

    play(scene)


def test_a_shut_gate_lets_nothing_to_the_engine_until_it_opens() -> None:
    async def scene(engine: HandEngine, gate: Gate) -> None:
        waiting = asyncio.ensure_future(start(gate))
        await settle()
        assert (gate.waiting, engine.submitted) == (1, {})
        gate.open("0-1")
        running = await waiting
        assert (gate.waiting, gate.in_flight, running.version) == (0, 1, "0-1")

    play(scene)


def test_waiting_ends_with_a_503() -> None:
    async def scene(engine: HandEngine, gate: Gate) -> None:
        assert await code_of(start(gate)) == "shut"
        assert gate.waiting == 0

    play(scene, Limits(max_waiting=1, wait_s=0.05))


def test_the_queue_is_bounded() -> None:
    async def scene(engine: HandEngine, gate: Gate) -> None:
        first = asyncio.ensure_future(start(gate))
        await settle()
        assert await code_of(start(gate)) == "queue_full"
        assert gate.waiting == 1
        gate.open("0-1")
        assert (await first).version == "0-1"

    play(scene, Limits(max_waiting=1))


def test_who_waits_keeps_its_place_when_the_gate_shuts_for_another_update() -> None:
    async def scene(engine: HandEngine, gate: Gate) -> None:
        first = asyncio.ensure_future(start(gate))
        await settle()
        newcomer = asyncio.ensure_future(start(gate))  # runs before the one that the close wakes
        gate.close(InFlight.DRAIN, "0-2")
        await settle()
        gate.open("0-2")
        assert (await first).version == "0-2"
        newcomer.cancel()

    play(scene, Limits(max_waiting=1))


def test_a_waiter_that_gives_up_leaves_the_queue() -> None:
    async def scene(engine: HandEngine, gate: Gate) -> None:
        waiting = asyncio.ensure_future(start(gate))
        await settle()
        waiting.cancel()
        await settle()
        assert gate.waiting == 0
        gate.open("0-1")
        await settle()
        assert engine.submitted == {}

    play(scene)


@pytest.mark.parametrize(
    ("wanted", "served"),
    [
        (Wanted(minimum=Version(0, 1)), True),
        (Wanted(minimum=Version(0, 2)), False),
        (Wanted(exact=Version(0, 1)), True),
        (Wanted(exact=Version(0, 0)), False),
    ],
)
def test_an_open_gate_serves_what_is_wanted_or_refuses_at_once(wanted: Wanted, served: bool) -> None:
    async def scene(engine: HandEngine, gate: Gate) -> None:
        gate.open("0-1")
        if served:
            assert (await start(gate, wanted)).version == "0-1"
        else:
            assert await code_of(start(gate, wanted)) == "version_not_served"
            assert engine.submitted == {}

    play(scene)


def test_a_wanted_version_waits_only_while_the_update_that_brings_it_has_shut_the_gate() -> None:
    async def scene(engine: HandEngine, gate: Gate) -> None:
        wanted = Wanted(exact=Version(0, 2))
        assert await code_of(start(gate, wanted)) == "version_not_served"  # shut, and nothing is coming
        gate.open("0-1")
        gate.close(InFlight.DRAIN, "0-2")
        waiting = asyncio.ensure_future(start(gate, wanted))
        other = asyncio.ensure_future(code_of(start(gate, Wanted(minimum=Version(0, 3)))))
        await settle()
        assert gate.waiting == 1
        assert await other == "version_not_served"
        gate.open("0-2")
        assert (await waiting).version == "0-2"

    play(scene)


def test_a_wanted_version_that_was_rolled_back_is_refused_when_the_gate_reopens() -> None:
    async def scene(engine: HandEngine, gate: Gate) -> None:
        gate.open("0-1")
        gate.close(InFlight.DRAIN, "0-2")
        waiting = asyncio.ensure_future(code_of(start(gate, Wanted(minimum=Version(0, 2)))))
        await settle()
        gate.open("0-1")
        assert await waiting == "version_not_served"

    play(scene)


@pytest.mark.case("B208")
def test_drain_waits_for_what_runs_and_times_out_by_its_own_deadline() -> None:
    async def scene(engine: HandEngine, gate: Gate) -> None:
        gate.open("0-1")
        running = await start(gate)
        assert gate.close(InFlight.DRAIN, "0-2") == (0, 0)
        assert await code_of(gate.quiesce(InFlight.DRAIN, 0.05)) == "quiesce_timeout"
        assert engine.cancelled == []
        quiescing = asyncio.ensure_future(gate.quiesce(InFlight.DRAIN, 10.0))
        await settle()
        assert not quiescing.done()
        engine.emit("r1", 5, version="0-1", finish="length")
        await quiescing
        assert (await pieces(running))[-1].finish_reason == "length"

    play(scene)


def test_abort_ends_requests_with_what_they_have_and_says_that_an_update_did_it() -> None:
    async def scene(engine: HandEngine, gate: Gate) -> None:
        gate.open("0-1")
        running = await start(gate)
        engine.emit("r1", 5, version="0-1")
        assert gate.close(InFlight.ABORT, "0-2") == (1, 0)
        assert engine.cancelled == ["r1"]
        quiescing = asyncio.ensure_future(gate.quiesce(InFlight.ABORT, 10.0))
        await settle()
        assert not quiescing.done()  # the engine has not let go of it yet
        engine.emit("r1", version="0-1", finish="abort")
        await quiescing
        assert (running.finish_reason, running.ended_by_update, running.tokens) == ("abort", True, [5])

    play(scene)


def test_recompute_goes_on_where_it_stopped_with_two_spans() -> None:
    async def scene(engine: HandEngine, gate: Gate) -> None:
        gate.open("0-1")
        running = await start(gate, max_tokens=4)
        engine.emit("r1", 5, version="0-1")
        assert gate.close(InFlight.RECOMPUTE, "0-2") == (0, 1)
        engine.emit("r1", 6, version="0-1", finish="abort")
        await gate.quiesce(InFlight.RECOMPUTE, 1.0)
        assert (running.finish_reason, gate.in_flight) == (None, 1)
        gate.open("0-2")
        await settle()
        assert engine.submitted["r1.1"] == GenerateRequest("r1.1", (1, 2, 3, 5, 6), 2)
        engine.emit("r1.1", 7, 8, version="0-2", finish="length")
        assert running.tokens == [5, 6, 7, 8]
        assert running.spans == [Span("0-1", 0, 2), Span("0-2", 2, 4)]
        assert (running.finish_reason, running.version, gate.mixed) == ("length", "0-2", 0)

    play(scene)


def test_recompute_of_a_finished_request_does_not_run_it_again() -> None:
    async def scene(engine: HandEngine, gate: Gate) -> None:
        gate.open("0-1")
        done, full = await start(gate), await start(gate, max_tokens=1)
        gate.close(InFlight.RECOMPUTE, "0-2")
        engine.emit("r1", 5, version="0-1", finish="stop")
        engine.emit("r2", 6, version="0-1", finish="abort")
        gate.open("0-2")
        await settle()
        assert (done.finish_reason, full.finish_reason) == ("stop", "length")
        assert set(engine.submitted) == {"r1", "r2"}

    play(scene)


def test_recompute_goes_back_to_the_old_version_when_the_update_failed() -> None:
    async def scene(engine: HandEngine, gate: Gate) -> None:
        gate.open("0-1")
        running = await start(gate, max_tokens=3)
        engine.emit("r1", 5, version="0-1")
        gate.close(InFlight.RECOMPUTE, "0-2")
        engine.emit("r1", version="0-1", finish="abort")
        gate.open("0-1")
        await settle()
        engine.emit("r1.1", 6, 7, version="0-1", finish="length")
        assert running.spans == [Span("0-1", 0, 3)]

    play(scene)


def test_recompute_goes_on_even_if_the_gate_reopens_before_the_engine_let_go() -> None:
    async def scene(engine: HandEngine, gate: Gate) -> None:
        gate.open("0-1")
        running = await start(gate, max_tokens=3)
        engine.emit("r1", 5, version="0-1")
        gate.close(InFlight.RECOMPUTE, "0-2")
        gate.open("0-1")
        engine.emit("r1", 6, version="0-1", finish="abort")
        assert engine.submitted["r1.1"] == GenerateRequest("r1.1", (1, 2, 3, 5, 6), 1)
        engine.emit("r1.1", 7, version="0-2", finish="length")
        assert (running.finish_reason, running.tokens, gate.mixed) == ("error", [5, 6], 1)

    play(scene)


@pytest.mark.case("B196")
@pytest.mark.parametrize("told_before", [True, False])
@pytest.mark.parametrize("mode", [InFlight.RECOMPUTE, InFlight.KEEP])
def test_an_exact_version_is_checked_again_at_the_switch(mode: InFlight, told_before: bool) -> None:
    async def scene(engine: HandEngine, gate: Gate) -> None:
        gate.open("0-1")
        exact, free = await start(gate, Wanted(exact=Version(0, 1))), await start(gate)
        engine.emit("r1", 5, version="0-1")
        gate.close(mode, "0-2")
        if mode is InFlight.RECOMPUTE:
            engine.emit("r1", version="0-1", finish="abort")
            engine.emit("r2", version="0-1", finish="abort")
        if told_before:
            gate.before_switch("0-2")
        else:
            gate.open("0-2")
        assert (exact.finish_reason, exact.ended_by_update, exact.tokens) == ("abort", True, [5])
        gate.open("0-2")
        await settle()
        assert free.finish_reason is None
        assert free.engine_id in engine.submitted
        assert "r1" in engine.cancelled
        assert "r1.1" not in engine.submitted

    play(scene)


def test_keep_continues_with_a_second_span_and_no_third() -> None:
    async def scene(engine: HandEngine, gate: Gate) -> None:
        gate.open("0-1")
        running = await start(gate)
        engine.emit("r1", 5, version="0-1")
        gate.close(InFlight.KEEP, "0-2")
        await gate.quiesce(InFlight.KEEP, 1.0)
        engine.emit("r1", 6, version="0-2")
        gate.open("0-2")
        engine.emit("r1", 7, version="0-2")
        assert running.spans == [Span("0-1", 0, 1), Span("0-2", 1, 3)]
        engine.emit("r1", 8, version="0-1")
        assert (running.finish_reason, running.tokens, gate.mixed) == ("error", [5, 6, 7], 1)

    play(scene)


@pytest.mark.parametrize("mode", [InFlight.DRAIN, InFlight.ABORT])
def test_under_drain_and_abort_a_second_version_ends_the_reply_before_the_foreign_token(mode: InFlight) -> None:
    async def scene(engine: HandEngine, gate: Gate) -> None:
        gate.open("0-1")
        running = await start(gate)
        engine.emit("r1", 5, version="0-1")
        gate.close(mode, "0-2")
        engine.emit("r1", 6, version="0-2")
        assert (running.finish_reason, running.tokens, gate.mixed) == ("error", [5], 1)
        assert running.spans == [Span("0-1", 0, 1)]
        engine.emit("r1", version="0-2", finish="abort")
        await gate.quiesce(mode, 1.0)

    play(scene)


def test_quiescing_waits_for_requests_whose_clients_have_gone() -> None:
    async def scene(engine: HandEngine, gate: Gate) -> None:
        gate.open("0-1")
        gate.give_up(await start(gate))
        gate.close(InFlight.DRAIN, "0-2")
        assert (gate.in_flight, engine.cancelled) == (0, ["r1"])
        assert await code_of(gate.quiesce(InFlight.DRAIN, 0.05)) == "quiesce_timeout"
        engine.emit("r1", version="0-1", finish="abort")
        await gate.quiesce(InFlight.DRAIN, 1.0)

    play(scene)


def test_a_refused_submission_is_the_requests_own_error() -> None:
    async def scene(engine: HandEngine, gate: Gate) -> None:
        gate.open("0-1")
        engine.refuse_submits = True
        assert await code_of(start(gate)) == "rank_failed"
        assert gate.in_flight == 0

    play(scene)


def test_a_broken_engine_ends_everything_and_lets_nobody_in() -> None:
    async def scene(engine: HandEngine, gate: Gate) -> None:
        gate.open("0-1")
        running = await start(gate)
        gate.close(InFlight.DRAIN, "0-2")
        waiting = asyncio.ensure_future(code_of(start(gate)))
        await settle()
        gate.break_down(Failure("rank_died", "gone", rank=1))
        assert await waiting == "shut"
        assert (running.finish_reason, running.failure and running.failure.rank) == ("error", 1)
        gate.open("0-2")
        assert await code_of(start(gate)) == "shut"

    play(scene)


def test_what_ran_when_the_gate_broke_has_left_the_engine_before_it_is_mended() -> None:
    async def scene(engine: HandEngine, gate: Gate) -> None:
        gate.open("0-1")
        running = await start(gate)
        gate.break_down(Failure("tensor_digest", "other bytes", rank=1))
        assert engine.cancelled == [running.engine_id]
        assert await code_of(gate.quiesce(InFlight.ABORT, 0.01)) == "quiesce_timeout"
        engine.emit(running.engine_id, 7, version="0-1", finish="abort")
        await gate.quiesce(InFlight.ABORT, 1.0)
        assert (running.tokens, running.finish_reason) == ([], "error")
        gate.mend()
        assert not gate.is_open
        gate.open("0-1")
        assert (await start(gate)).version == "0-1"

    play(scene)


def test_a_bare_step_is_of_the_current_run() -> None:
    def minimum(label: str | int, current: str) -> Version | None:
        return VersionWish(min_version=label).wanted(current).minimum

    assert minimum(7, "3-1") == Version(3, 7)
    assert minimum(7, "") == minimum(7, "start") == Version(0, 7)
    assert minimum("2-5", "3-1") == Version(2, 5)
    with pytest.raises(Rejected):
        minimum("x", "3-1")
