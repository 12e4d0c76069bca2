"""The front of a replica: performs what the replica machine asks for and feeds back what the ranks did.

The machine's state is one variable, replaced whole before any effect is performed: the compare-and-set of design
section 4. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from engine_adapter.admission import Gate
from engine_adapter.rank_messages import Hello
from updater.core import replica as machine
from updater.core.errors import Aborted, Failure, LiveweightsError, Unavailable
from updater.core.participant import (
    Description,
    Fence,
    FenceRequest,
    FrontState,
    FrontStatus,
    InvalidateRequest,
    PauseReply,
    PauseRequest,
    PlanReply,
    PlanRequest,
    ResumeRequest,
    StageReply,
    StageRequest,
    VerifyReply,
    VerifyRequest,
)
from updater.core.policy import InFlight
from updater.core.replica_state import (
    Answer,
    Asked,
    Cancel,
    ClearLease,
    CloseAdmission,
    Done,
    Failed,
    LeaseTimer,
    OpenAdmission,
    RankDied,
    Refuse,
    ReplicaEffect,
    ReplicaEvent,
    ReplicaState,
    SetLease,
    ShutDown,
    Work,
    status,
)

_log = logging.getLogger("liveweights.front")


@dataclass(frozen=True, slots=True)
class Identity:
    """What does not change in one life of a front."""

    url: str
    model: str
    hellos: tuple[Hello, ...]


class Ranks(Protocol):
    """All ranks as one thing, one method per `Work` of the machine: `rank_work.RankWork`.

    Each raises LiveweightsError, and then no rank works on it any more.
    """

    async def join(self, version: str, digest: str) -> None: ...

    async def plan(self, request: PlanRequest) -> PlanReply: ...

    async def stage(self, request: StageRequest) -> StageReply: ...

    async def verify(self, request: VerifyRequest) -> VerifyReply: ...

    async def pause(self, request: PauseRequest, digest: str, aborted: int, requeued: int) -> PauseReply: ...

    async def install(self, request: FenceRequest, plan: PlanRequest, digest: str) -> None: ...

    async def invalidate(self, request: InvalidateRequest) -> None: ...

    async def restore(self, request: FenceRequest, version: str, digest: str) -> None: ...

    async def resume(self, request: ResumeRequest) -> None: ...

    async def discard(self, serial: int) -> None: ...

    def cancel(self, serial: int) -> None: ...

    async def audit(self, what: str) -> tuple[Failure, ...]: ...


class Front:
    """`state`: made by `replica_state.started` once the start checkpoint was replayed."""

    def __init__(
        self,
        state: ReplicaState,
        identity: Identity,
        work: Ranks,
        gate: Gate,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = state
        self._identity = identity
        self._work = work
        self._gate = gate
        self._clock = clock
        self._callers: dict[tuple[str, Fence], list[asyncio.Future[Any]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pausing: asyncio.Task[None] | None = None
        self._lease: asyncio.TimerHandle | None = None
        self._stopped_requests = (0, 0)
        self._digests = {state.live.version: state.live.digest}
        self.reopened = asyncio.Event()

    # --- asked from outside

    @property
    def ready(self) -> bool:
        return self.state.state is FrontState.OPEN and self._gate.is_open

    def status(self) -> FrontStatus:
        return status(
            self.state,
            self._clock(),
            in_flight=self._gate.in_flight,
            waiting=self._gate.waiting,
        )

    def describe(self) -> Description:
        first = self._identity.hellos[0]
        return Description(
            status=self.status(),
            engine=first.engine,
            url=self._identity.url,
            capabilities=first.capabilities,
            config_hash=first.config_hash,
            model=self._identity.model,
            ranks=tuple(hello.info for hello in self._identity.hellos),
        )

    def digest_of(self, version: str) -> str:
        """Content digest of a version that this front served, or empty."""
        return self._digests.get(version, "")

    async def ask(self, verb: str, request: Any) -> Any:
        """A verb of the participant contract. Raises LiveweightsError for a refusal.

        A caller that goes away changes nothing: the work goes on and its repeat gets the answer.
        """
        if verb == "status":
            return self.status()
        if verb == "describe":
            return self.describe()
        caller: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._callers.setdefault((verb, request.fence), []).append(caller)
        self.feed(Asked(verb, request))
        return await caller

    # --- the machine

    def feed(self, event: ReplicaEvent) -> None:
        """One step; its effects are performed in order."""
        self.state, effects = machine.step(self.state, event, self._clock())
        for effect in effects:
            self._perform(effect)

    def rank_died(self, failure: Failure) -> None:
        _log.error("rank %s died: %s", failure.rank, failure.message)
        self.feed(RankDied(failure.at(replica=self.state.replica)))

    def _perform(self, effect: ReplicaEffect) -> None:
        match effect:
            case Answer(verb, fence, reply):
                self._answer(verb, fence, lambda caller: caller.set_result(reply))
            case Refuse(verb, fence, failures):
                error = _refusal(failures, self.state)
                self._answer(verb, fence, lambda caller: caller.set_exception(error))
            case Work():
                self._begin(effect)
            case Cancel(serial):
                self._work.cancel(serial)
            case CloseAdmission():
                self._close()
            case OpenAdmission(version, digest):
                self._digests[version] = digest
                self._gate.open(version)
                self.reopened.set()
            case SetLease(at):
                self._set_lease(at)
            case ClearLease():
                self._clear_lease()
            case ShutDown(failure):
                self._gate.break_down(failure)

    def _begin(self, work: Work) -> None:
        """A resume ends the pause that still runs: it must not stop ranks that have been let go."""
        if work.verb == "resume" and self._pausing is not None:
            self._pausing.cancel()
            self._pausing = None
        task = self._spawn(self._run(work))
        if work.verb == "pause":
            self._pausing = task

    def _answer(self, verb: str, fence: Fence, settle: Callable[[asyncio.Future[Any]], None]) -> None:
        for caller in self._callers.pop((verb, fence), ()):
            if not caller.done():
                settle(caller)

    def _close(self) -> None:
        """The mode comes with the pause that closes; a close without one has nobody to let finish."""
        pausing = self.state.work("pause")
        request = pausing.request if pausing is not None else None
        plan = self.state.plan
        if isinstance(request, PauseRequest) and plan is not None:
            self._stopped_requests = self._gate.close(request.in_flight, plan.version)
        else:
            self._stopped_requests = self._gate.close(InFlight.DRAIN, "")

    def _set_lease(self, at: float) -> None:
        self._clear_lease()
        delay = max(0.0, at - self._clock())
        self._lease = asyncio.get_running_loop().call_later(delay, self.feed, LeaseTimer())

    def _clear_lease(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None

    # --- work on all ranks

    async def _run(self, work: Work) -> None:
        """Ends in exactly one `Done` or `Failed`: this is the boundary where exceptions become failures."""
        verb, request = work.verb, work.request
        began = time.monotonic()
        try:
            reply = await self._do(work)
        except LiveweightsError as error:
            failures = tuple(failure.at(replica=self.state.replica) for failure in error.failures)
            self.feed(Failed(verb, request.fence, failures))
        except Exception as error:
            _log.exception("%s failed", verb)
            failure = Failure("internal", f"{type(error).__name__}: {error}", replica=self.state.replica)
            self.feed(Failed(verb, request.fence, (failure,)))
        else:
            self.feed(Done(verb, request.fence, reply, time.monotonic() - began))
            if verb == "resume" and request.published:
                self._spawn(self._audit())

    async def _do(self, work: Work) -> Any:
        request, ranks = work.request, self._work
        match work.verb:
            case "join":
                return await ranks.join(request.version, request.digest)
            case "plan":
                return await ranks.plan(request)
            case "stage":
                return await ranks.stage(request)
            case "verify":
                return await ranks.verify(request)
            case "pause":
                return await ranks.pause(request, self.state.digest, *self._stopped_requests)
            case "install" if work.plan is not None:
                return await ranks.install(request, work.plan, self.state.digest)
            case "invalidate":
                return await ranks.invalidate(request)
            case "restore":
                old = self.state.old or self.state.live
                return await ranks.restore(request, old.version, old.digest)
            case "resume":
                return await ranks.resume(request)
            case "discard":
                return await ranks.discard(request.fence.serial)
        raise Aborted(Failure("internal", f"the machine asked for {work.verb!r}"))

    async def _audit(self) -> None:
        """After a publication: live must be what was voted. A mismatch takes the replica out of service (I1, I2)."""
        label = self.state.live
        try:
            failures = await self._work.audit("live")
            if failures and self.state.live == label:
                _log.error("the audit of %s failed: %s", label.version, failures[0].message)
                self.feed(RankDied(failures[0].at(replica=self.state.replica)))
                return
            # A spare that differs is emptied by its rank: the next rollback is then refused by the vote.
            if await self._work.audit("spare"):
                _log.error("the kept copy beside %s is not what it was: no rollback", label.version)
        except LiveweightsError as error:
            _log.warning("the audit of %s could not run: %s", label.version, error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def idle(self) -> None:
        """Until nothing that was asked of the ranks is under way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def stop(self) -> None:
        """Shut for good: callers and clients are told; work that runs is given up."""
        self._clear_lease()
        failure = Failure("shut", "the replica is stopping", replica=self.state.replica)
        self._gate.break_down(failure)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for callers in self._callers.values():
            for caller in callers:
                if not caller.done():
                    caller.set_exception(Unavailable(failure))
        self._callers.clear()


def _refusal(failures: tuple[Failure, ...], state: ReplicaState) -> LiveweightsError:
    placed = tuple(failure.at(replica=state.replica) for failure in failures)
    return Aborted(*placed, live_version=state.live.version)
