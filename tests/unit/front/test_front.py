"""The front performs what the replica machine asks for: answers, leases, gates, and the boundary of exceptions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from engine_adapter.replica.admission import Gate
from engine_adapter.replica.front import KEPT_DIGESTS, Front, Identity
from engine_adapter.testing.fronts import code_of
from engine_adapter.testing.requests import HandEngine, HandWork
from updater.core.errors import Aborted, Failure
from updater.core.participant import (
    DiscardRequest,
    DiskOffer,
    Fence,
    FenceRequest,
    FrontState,
    InvalidateRequest,
    JoinRequest,
    Kind,
    PauseRequest,
    PlanRequest,
    Released,
    ReleaseTo,
    ResumeRequest,
    SpareState,
    StageRequest,
    VerifyRequest,
)
from updater.core.policy import CachePolicy, InFlight, InstallMode
from updater.core.replica.state import OpenAdmission, started


@dataclass
class Play:
    """A front over ranks played by hand, with a clock that a test moves."""

    now: list[float] = field(default_factory=lambda: [1000.0])
    work: HandWork = field(default_factory=HandWork)

    def __post_init__(self) -> None:
        self.gate = Gate(HandEngine())
        state = started("r0", "i", "start", "d0")
        self.rejoined = 0
        identity = Identity("http://r0", "model", ())
        self.front = Front(state, identity, self.work, self.gate, lambda: self.now[0], self.rejoin)

    def rejoin(self) -> None:
        self.rejoined += 1

    def fence(self, serial: int = 1, attempt: int = 0) -> Fence:
        return Fence("f", 1, serial, attempt, "i")

    async def join(self) -> None:
        await self.front.ask("lead", FenceRequest(self.fence(0)))
        await self.front.ask("join", JoinRequest(self.fence(0), "start", "d0"))

    async def plan(self) -> object:
        return await self.front.ask(
            "plan",
            PlanRequest(
                self.fence(),
                Kind.UPDATE,
                "u",
                "0-1",
                DiskOffer("/x"),
                "",
                "",
                InFlight.DRAIN,
                CachePolicy.RESET,
                InstallMode.FLIP,
                False,
                (),
                False,
            ),
        )

    async def vote(self) -> None:
        await self.plan()
        await self.front.ask("stage", StageRequest(self.fence(), 10.0))
        await self.front.ask("verify", VerifyRequest(self.fence(), 10.0))

    async def pause(self, attempt: int = 1, lease_s: float = 30.0) -> object:
        return await self.front.ask("pause", PauseRequest(self.fence(1, attempt), InFlight.DRAIN, 10.0, lease_s))

    async def publish(self) -> None:
        await self.vote()
        await self.pause()
        await self.front.ask("install", FenceRequest(self.fence(1, 1)))
        await self.front.ask("invalidate", InvalidateRequest(self.fence(1, 1), CachePolicy.RESET))
        await self.resume(True, "0-1", "d1")

    async def resume(self, published: bool, version: str, digest: str, attempt: int = 1) -> object:
        return await self.front.ask("resume", ResumeRequest(self.fence(1, attempt), published, version, digest))


def play(scene: Callable[[Play], Awaitable[None]]) -> None:
    async def run() -> None:
        one = Play()
        async with asyncio.timeout(120):
            await scene(one)
            await one.front.stop()

    asyncio.run(run())


def test_a_joiner_is_shut_until_it_was_admitted() -> None:
    async def scene(p: Play) -> None:
        assert (p.front.ready, p.gate.is_open) == (False, False)
        await p.join()
        assert (p.front.ready, p.gate.version, p.front.digest_of("start")) == (True, "start", "d0")

    play(scene)


def test_a_publication_goes_through_the_ranks_in_order_and_is_audited_afterwards() -> None:
    async def scene(p: Play) -> None:
        await p.join()
        await p.publish()
        await p.work.until_called("audit spare")
        steps = ["join", "plan", "stage", "verify", "pause", "install", "invalidate", "resume"]
        assert p.work.calls == [*steps, "audit live", "audit spare"]
        assert (p.gate.is_open, p.gate.version, p.front.digest_of("0-1")) == (True, "0-1", "d1")

    play(scene)


def test_live_bytes_that_fail_the_audit_take_the_replica_out_of_service() -> None:
    async def scene(p: Play) -> None:
        await p.join()
        p.work.mismatched = {"live": (Failure("tensor_digest", "differs", rank=1, tensor="w"),)}
        p.work.hold("audit live")
        await p.publish()
        await p.work.until_called("audit live")
        assert p.front.ready
        p.work.release("audit live")
        await p.front.idle()
        status = p.front.status()
        assert (status.state, p.front.ready, p.gate.is_open) == (FrontState.QUARANTINED, False, False)
        assert status.failure == Failure("tensor_digest", "differs", replica="r0", rank=1, tensor="w")

    play(scene)


def test_a_kept_copy_that_fails_the_audit_does_not_stop_serving_and_is_no_way_back() -> None:
    async def scene(p: Play) -> None:
        await p.join()
        p.work.mismatched = {"spare": (Failure("tensor_digest", "differs", rank=1, tensor="w"),)}
        p.work.hold("audit spare")
        await p.publish()
        await p.work.until_called("audit spare")
        assert p.front.status().spare.state is SpareState.PREVIOUS
        p.work.release("audit spare")
        await p.front.idle()
        assert p.front.ready
        assert p.front.status().spare.state is SpareState.EMPTY

    play(scene)


def test_a_readmitted_replica_asks_to_join_in_another_life() -> None:
    async def scene(p: Play) -> None:
        await p.join()
        p.work.mismatched = {"live": (Failure("tensor_digest", "differs", rank=1),)}
        await p.publish()
        await p.front.idle()
        assert await code_of(p.front.ask("join", JoinRequest(p.fence(2), "0-1", "d1"))) == "tensor_digest"
        p.work.hold("readmit 0-1")
        readmitting = asyncio.ensure_future(p.front.readmit())
        await p.work.until_called("readmit 0-1")
        assert await code_of(p.front.readmit()) == "busy"
        p.work.release("readmit 0-1")
        status = await readmitting
        assert (status.state, status.failure) == (FrontState.JOINING, None)
        assert status.incarnation != "i"
        assert (p.rejoined, p.front.reopened.is_set(), p.front.ready) == (1, False, False)
        fence = replace(p.fence(2), incarnation=status.incarnation)
        await p.front.ask("join", JoinRequest(fence, "0-1", "d1"))
        assert (p.front.ready, p.front.reopened.is_set(), p.gate.version) == (True, True, "0-1")

    play(scene)


def test_what_the_readmission_finds_is_told_and_it_stays_out_of_service() -> None:
    async def scene(p: Play) -> None:
        await p.join()
        p.work.mismatched = {"live": (Failure("tensor_digest", "differs", rank=1),)}
        await p.publish()
        await p.front.idle()
        p.work.fail["readmit 0-1"] = Aborted(Failure("expected_mismatch", "holds another", rank=0))
        assert await code_of(p.front.readmit()) == "expected_mismatch"
        assert (p.front.status().state, p.rejoined) == (FrontState.QUARANTINED, 0)
        failure = p.front.status().failure
        assert (failure and failure.code, failure and failure.rank) == ("expected_mismatch", 0)

    play(scene)


def test_a_release_serves_what_the_operator_chose_and_says_so() -> None:
    async def scene(p: Play) -> None:
        await p.join()
        await p.vote()
        await p.pause()
        await p.front.ask("install", FenceRequest(p.fence(1, 1)))
        assert await code_of(p.front.release(ReleaseTo.LIVE)) == "wrong_phase"
        p.now[0] += 31.0
        status = await p.front.release(ReleaseTo.LIVE)
        assert (status.state, status.live_version, p.work.calls[-1]) == (FrontState.OPEN, "0-1", "serve 0-1")
        assert status.released == Released(ReleaseTo.LIVE, "0-1", 1, 1)
        assert (p.gate.is_open, p.gate.version) == (True, "0-1")

    play(scene)


def test_a_release_to_previous_takes_the_installation_back() -> None:
    async def scene(p: Play) -> None:
        await p.join()
        await p.vote()
        await p.pause()
        await p.front.ask("install", FenceRequest(p.fence(1, 1)))
        p.now[0] += 31.0
        status = await p.front.release(ReleaseTo.PREVIOUS)
        assert (status.state, status.live_version, p.gate.version) == (FrontState.OPEN, "start", "start")
        assert (p.work.calls[-2:], p.work.undone) == (["restore start", "resume"], [(1, 1)])

    play(scene)


def test_ranks_are_told_the_serial_that_they_know_whatever_the_message_comes_under() -> None:
    """I6: an update is cleaned up under a later serial when a coordinator comes back."""

    async def scene(p: Play) -> None:
        await p.join()
        await p.vote()
        await p.front.ask("discard", DiscardRequest(p.fence(8)))
        assert p.work.discarded == [1]

    async def installed(p: Play) -> None:
        await p.join()
        await p.vote()
        await p.pause()
        await p.front.ask("install", FenceRequest(p.fence(1, 1)))
        await p.front.ask("restore", FenceRequest(p.fence(8)))
        assert p.work.undone == [(1, 1)]

    play(scene)
    play(installed)


def test_whatever_the_ranks_raise_reaches_every_caller_as_a_refusal() -> None:
    async def scene(p: Play) -> None:
        await p.join()
        p.work.fail["plan"] = Aborted(Failure("tensor_missing", "no such tensor", rank=1))
        assert await code_of(p.plan()) == "tensor_missing"
        p.work.fail = {}
        await p.front.ask("discard", DiscardRequest(p.fence()))
        assert p.gate.is_open

    play(scene)


def test_an_unforeseen_exception_is_a_typed_failure_and_not_a_hang() -> None:
    async def scene(p: Play) -> None:
        await p.join()
        p.work.fail["plan"] = ZeroDivisionError("a bug")
        assert await code_of(p.plan()) == "internal"
        assert p.gate.is_open

    play(scene)


def test_a_caller_that_goes_away_does_not_stop_the_work_and_its_repeat_gets_the_answer() -> None:
    async def scene(p: Play) -> None:
        await p.join()
        p.work.hold("plan")
        first = asyncio.ensure_future(p.plan())
        await p.work.until_called("plan")
        first.cancel()
        second = asyncio.ensure_future(p.plan())
        await asyncio.sleep(0)
        p.work.release("plan")
        assert (await second) is not None
        assert p.work.calls.count("plan") == 1

    play(scene)


def test_a_lease_that_is_over_reopens_even_if_its_timer_never_went_off() -> None:
    async def scene(p: Play) -> None:
        await p.join()
        await p.vote()
        await p.pause(lease_s=30.0)
        assert not p.gate.is_open
        p.now[0] += 31.0
        assert await code_of(p.front.ask("install", FenceRequest(p.fence(1, 1)))) in ("wrong_phase", "replica_fenced")
        await p.front.idle()
        assert (p.front.ready, p.gate.version) == (True, "start")
        assert "install" not in p.work.calls

    play(scene)


def test_a_resume_ends_the_quiesce_and_its_late_end_pauses_no_replica() -> None:
    async def scene(p: Play) -> None:
        await p.join()
        await p.vote()
        p.work.hold("pause")
        pausing = asyncio.ensure_future(code_of(p.pause()))
        await p.work.until_called("pause")
        await p.resume(False, "start", "d0")
        p.work.release("pause")
        assert await pausing in ("lease_expired", "replica_fenced")
        await p.front.idle()
        assert p.front.ready
        assert "pause went on" not in p.work.calls

    play(scene)


def test_a_restore_names_the_version_that_was_live_before_the_install() -> None:
    async def scene(p: Play) -> None:
        await p.join()
        await p.vote()
        await p.pause()
        await p.front.ask("install", FenceRequest(p.fence(1, 1)))
        await p.front.ask("restore", FenceRequest(p.fence(1, 1)))
        assert "restore start" in p.work.calls
        await p.resume(False, "start", "d0")
        assert p.gate.version == "start"

    play(scene)


def test_a_dead_rank_answers_everybody_who_waits() -> None:
    async def scene(p: Play) -> None:
        await p.join()
        p.work.hold("plan")
        planning = asyncio.ensure_future(code_of(p.plan()))
        await p.work.until_called("plan")
        p.front.rank_died(Failure("rank_died", "gone", rank=0))
        assert await planning == "rank_died"
        assert await code_of(p.plan()) == "rank_died"

    play(scene)


def test_stopping_answers_everybody_who_waits() -> None:
    async def scene(p: Play) -> None:
        await p.join()
        p.work.hold("plan")
        planning = asyncio.ensure_future(code_of(p.plan()))
        await p.work.until_called("plan")
        await p.front.stop()
        assert await planning == "replica_lost"

    play(scene)


def test_a_long_life_remembers_only_the_digests_of_its_last_versions() -> None:
    async def scene(p: Play) -> None:
        await p.join()
        for number in range(1, 41):
            p.front._perform(OpenAdmission(f"0-{number}", f"d{number}"))
        known = [number for number in range(1, 41) if p.front.digest_of(f"0-{number}")]
        assert known == list(range(41 - KEPT_DIGESTS, 41))
        p.front._perform(OpenAdmission(f"0-{known[0]}", "back"))
        p.front._perform(OpenAdmission("0-41", "d41"))
        assert (p.front.digest_of(f"0-{known[0]}"), p.front.digest_of(f"0-{known[1]}")) == ("back", "")

    play(scene)
