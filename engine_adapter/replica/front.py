"""The front of a replica: performs what the replica machine asks for and feeds back what the ranks did.

The machine's state is one variable, replaced whole before any effect is performed: the compare-and-set of design
section 4. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from engine_adapter.rank.messages import RankHello
from engine_adapter.replica.admission import AdmissionController
from engine_adapter.replica.interfaces import RankVerbs
from updater.core.errors import Aborted, Failure, LiveweightsError
from updater.core.participant import (
    Claimed,
    Description,
    Fence,
    FrontState,
    FrontStatus,
    PauseRequest,
    ReadmitRequest,
    ReleaseRequest,
    ReleaseTo,
    ResumeRequest,
)
from updater.core.policy import InFlight
from updater.core.replica import machine
from updater.core.replica.state import (
    Answer,
    Asked,
    AuditFailed,
    Cancel,
    ClearLease,
    CloseAdmission,
    Done,
    Failed,
    LeaseTimer,
    OpenAdmission,
    RankDied,
    Refuse,
    Rejoin,
    ReplicaEffect,
    ReplicaEvent,
    ReplicaState,
    SetLease,
    ShutDown,
    SpareLost,
    Told,
    Work,
    status,
)
from updater.protocol import wire

_log = logging.getLogger("liveweights.front")
#: Versions whose digest an answer can name: the live one, and those that a request has run through until now.
KEPT_DIGESTS = 16


@dataclass(frozen=True, slots=True)
class Identity:
    """What does not change in one life of a front."""

    url: str
    model: str
    hellos: tuple[RankHello, ...]


class Front:
    """`state`: made by `updater.core.replica.machine.started` once the start checkpoint was replayed. `rejoin`: called
    when an operator had this replica readmitted; `reopened` is then unset until a coordinator admits it.
    """

    def __init__(
        self,
        state: ReplicaState,
        identity: Identity,
        work: RankVerbs,
        gate: AdmissionController,
        clock: Callable[[], float] = time.monotonic,
        rejoin: Callable[[], None] = lambda: None,
    ) -> None:
        self._rejoin = rejoin
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
        said = status(self.state, self._clock(), in_flight=self._gate.in_flight, waiting=self._gate.waiting)
        return replace(said, progress=self._work.progress())

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
            dtypes=self._work.dtypes,
            document=wire.encode(first.model).decode() if first.model is not None else "",
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

    async def readmit(self) -> FrontStatus:
        """An operator's word after a quarantine: proves the live bytes of all ranks and joins again. Raises
        LiveweightsError with what the ranks found; it then stays shut.
        """
        return await self._operate("readmit", ReadmitRequest(self.state.last_heard(), secrets.token_hex(8)))

    async def release(self, to: ReleaseTo) -> FrontStatus:
        """An operator's word where the coordinator is gone for long and this replica has installed."""
        return await self._operate("release", ReleaseRequest(self.state.last_heard(), to))

    async def _operate(self, verb: str, request: ReadmitRequest | ReleaseRequest) -> FrontStatus:
        if self.state.work(verb) is not None:
            raise Aborted(Failure("busy", f"{verb} is under way", replica=self.state.replica))
        _log.warning("an operator asks for: %s (%s)", verb, getattr(request, "to", "after an audit"))
        await self.ask(verb, request)
        status = self.status()
        _log.warning("%s done: %s on %s", verb, status.state.value, status.live_version)
        return status

    # --- the machine

    def feed(self, event: ReplicaEvent) -> None:
        """One step; its effects are performed in order."""
        self.state, effects = machine.step(self.state, event, self._clock())
        for effect in effects:
            self._perform(effect)

    def told(self, claimed: Claimed, incarnation: str) -> None:
        """What its coordinator says to the call of that incarnation."""
        before = self.state
        self.feed(Told(claimed.claim, claimed.fleet, claimed.epoch, incarnation))
        after = self.state
        if after.unclaimed != before.unclaimed:
            text = "unclaimed: the coordinator does not know this replica; it serves on and obeys nothing from there"
            _log.warning(text if after.unclaimed else "claimed again")
        if after.state is FrontState.ORPHANED is not before.state and after.failure is not None:
            _log.error("orphaned: %s; %s", after.failure.message, after.failure.hint)

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
                self._remember(version, digest)
                self._gate.open(version)
                self.reopened.set()
            case SetLease(at):
                self._set_lease(at)
            case ClearLease():
                self._clear_lease()
            case ShutDown(failure):
                _log.error("out of service, %s: %s", self.state.state.value, failure.message)
                self._gate.break_down(failure)
            case Rejoin():
                self._gate.mend()
                self.reopened.clear()
                self._rejoin()

    def _remember(self, version: str, digest: str) -> None:
        """For as long as an answer may name it; a life may see any number of versions."""
        self._digests.pop(version, None)
        self._digests[version] = digest
        if len(self._digests) > KEPT_DIGESTS:
            del self._digests[next(iter(self._digests))]

    def _begin(self, work: Work) -> None:
        """A resume ends the pause that still runs: it must not stop ranks that have been let go."""
        if work.verb in ("resume", "readmit") and self._pausing is not None:
            self._pausing.cancel()
            self._pausing = None
        task = self._spawn(self._run(work, self.state))
        if work.verb == "pause":
            self._pausing = task

    def _answer(self, verb: str, fence: Fence, settle: Callable[[asyncio.Future[Any]], None]) -> None:
        for caller in self._callers.pop((verb, fence), ()):
            if not caller.done():
                settle(caller)

    def _close(self) -> None:
        """The mode comes with the pause that closes; a close without one has no request to let finish."""
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

    async def _run(self, work: Work, state: ReplicaState) -> None:
        """Ends in exactly one `Done` or `Failed`: this is the boundary where exceptions become failures."""
        verb, request = work.verb, work.request
        began = time.monotonic()
        try:
            reply = await perform(self._work, work, state, self._stopped_requests)
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

    async def _audit(self) -> None:
        """After a publication: live must be what was voted, the spare what was live before (I1, I2)."""
        label, kept = self.state.live, self.state.spare
        try:
            failures = await self._work.audit("live")
            if failures:
                self.feed(AuditFailed(label, failures[0].at(replica=self.state.replica)))
                return
            lost = await self._work.audit("spare")
            if lost:
                _log.error("the kept copy beside %s is not what it was: no rollback", label.version)
                self.feed(SpareLost(kept, lost[0].at(replica=self.state.replica)))
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
        # To the coordinator this is a member that fails now, not a service to ask again.
        lost = Failure("replica_lost", failure.message, replica=self.state.replica)
        for callers in self._callers.values():
            for caller in callers:
                if not caller.done():
                    caller.set_exception(Aborted(lost))
        self._callers.clear()


def _refusal(failures: tuple[Failure, ...], state: ReplicaState) -> LiveweightsError:
    placed = tuple(failure.at(replica=state.replica) for failure in failures)
    return Aborted(*placed, live_version=state.live.version)


async def perform(ranks: RankVerbs, work: Work, state: ReplicaState, stopped: tuple[int, int]) -> Any:
    """Returns what `Done` carries. `state`: as it was when the machine asked. `stopped`: requests that the gate
    aborted and requeued when it closed. Raises LiveweightsError.
    """
    request = work.request
    if work.verb == "readmit" or state.state is FrontState.ORPHANED:  # whatever ends that proves the live bytes first
        await _prove(ranks, work, state)
        return await ranks.join(request) if work.verb == "join" else None
    match work.verb:
        case "join" | "plan" | "stage" | "verify" | "invalidate" | "resume":
            return await getattr(ranks, work.verb)(request)
        case "pause":
            return await ranks.pause(request, state.digest, *stopped)
        case "install" if work.plan is not None:
            return await ranks.install(request, work.plan, state.digest)
        case "restore":
            return await _take_back(ranks, state, _serial(work, state), request.fence.attempt)
        case "discard":
            return await ranks.discard(_serial(work, state))
        case "release" if request.to is ReleaseTo.LIVE:
            return await ranks.serve_installed(*state.key, state.live.version)
        case "release":
            await _take_back(ranks, state, *state.key)
            return await ranks.resume(ResumeRequest(request.fence, False, state.live.version, state.live.digest))
    raise Aborted(Failure("internal", f"the machine asked for {work.verb!r}"))


async def _prove(ranks: RankVerbs, work: Work, state: ReplicaState) -> None:
    unsettled = state.key if state.old is not None else None
    held = state.old or state.live
    await ranks.readmit(unsettled, _serial(work, state), held.version, held.digest)


async def _take_back(ranks: RankVerbs, state: ReplicaState, serial: int, attempt: int) -> None:
    """Of a restore, which may come under a later serial than the installation that it undoes."""
    if state.old is not None:
        serial, attempt = state.key
    old = state.old or state.live
    await ranks.restore(serial, attempt, old.version, old.digest)


def _serial(work: Work, state: ReplicaState) -> int:
    """Whose staging the ranks hold. The request may come under a later serial, which ranks never heard of (I6)."""
    if work.plan is not None:
        return work.plan.fence.serial
    serial: int = state.spare.serial or work.request.fence.serial
    return serial
