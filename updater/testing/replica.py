"""A simulated replica: the real replica machine over ranks that are a few strings.

A rank's bytes are modelled by the content digest they would have. Work goes rank by rank, one `advance` at a time, so
that every half-done state can be seen; like a real front, control work and staging work are two queues.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from updater.core.errors import Failure
from updater.core.participant import (
    Description,
    Fence,
    FrontState,
    Kind,
    PauseReply,
    PlanReply,
    PlanRequest,
    RankInfo,
    ReleaseTo,
    StageReply,
    VerifyReply,
)
from updater.core.policy import CachePolicy, Capabilities, InFlight, InstallMode
from updater.core.replica import machine as replica_machine
from updater.core.replica.state import (
    Answer,
    Cancel,
    ClearLease,
    CloseAdmission,
    Done,
    Failed,
    OpenAdmission,
    Refuse,
    ReplicaEffect,
    ReplicaEvent,
    ReplicaState,
    SetLease,
    ShutDown,
    Step,
    Work,
)
from updater.testing.values import Job, Rank, Request, SimulatedSource, Token, Violation, source_of

ReplicaStep = Callable[[ReplicaState, ReplicaEvent, float], Step]
STAGING_WORK = frozenset({"plan", "stage", "verify", "discard"})
CELLS = tuple((mode, cache) for mode in (InFlight.DRAIN, InFlight.ABORT) for cache in CachePolicy)


class SimulatedReplica:
    """One front process and its ranks. Dead is dead: make a new one with another incarnation.

    `answer(verb, fence, reply or failures)` is called for every answer; `sources` is the shared disk; `faults` maps a
    verb to the failure that its next work meets after `faults_after` ranks.
    """

    def __init__(
        self,
        name: str,
        incarnation: str,
        sources: Mapping[str, SimulatedSource],
        answer: Callable[[str, Fence, Any], None],
        *,
        ranks: int = 2,
        base: str = "base",
        step: ReplicaStep = replica_machine.step,
    ) -> None:
        self.name, self.incarnation, self.sources, self._answer, self._step = name, incarnation, sources, answer, step
        self.state = replica_machine.started(name, incarnation, "start", base, ranks)
        self.ranks = [Rank(base, namespace=("start", base)) for _ in range(ranks)]
        self.alive = True
        self.admission: tuple[str, str] | None = None
        self.lease_timer: float | None = None
        self.control: list[Job] = []
        self.staging: list[Job] = []
        self.held: set[tuple[str, int]] = set()
        self.cache: dict[tuple[int, tuple[str, str]], str] = {}
        self.requests: list[Request] = []
        self.faults: dict[str, tuple[Failure, int]] = {}
        self.votes: dict[int, str] = {}
        self.must_be_reset = False
        self.asleep = False
        self.log: Callable[[str], None] = lambda line: None
        self.installs_by = InstallMode.FLIP
        self.on_install: Callable[[SimulatedReplica, PlanRequest, Fence], None] = lambda *_: None

    # --- what a front does

    def handle(self, event: ReplicaEvent, now: float) -> None:
        """Swap the state whole, then perform."""
        if not self.alive:
            return
        before, over = self.state.state, self.lease_timer is not None and now >= self.lease_timer
        self.state, effects = self._step(self.state, event, now)
        if self.state.state is not before:
            self.log(f"{self.name}: {before.value} -> {self.state.state.value}")
            if over and self.state.state is FrontState.INSTALLING:
                raise Violation("I9", f"{self.name} installs after its lease")
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: ReplicaEffect) -> None:
        if isinstance(effect, Answer):
            self._answer(effect.verb, effect.fence, effect.reply)
        elif isinstance(effect, Refuse):
            self._answer(effect.verb, effect.fence, effect.failures)
        elif isinstance(effect, Work):
            self._queue(effect)
        elif isinstance(effect, Cancel):
            self.staging = [job for job in self.staging if job.work.verb == "discard"]
            self.held = {each for each in self.held if each[1] != effect.serial}
        elif isinstance(effect, OpenAdmission):
            self.admission = (effect.version, effect.digest)
            if self.must_be_reset and any(made_by != self.ranks[0].live for made_by in self.cache.values()):
                raise Violation("I5", f"{self.name} opens on {effect.version} with blocks of other weights")
            self.log(f"{self.name}: serves {effect.version}")
        elif isinstance(effect, CloseAdmission):
            self.admission = None
        elif isinstance(effect, SetLease):
            self.lease_timer = effect.at
        elif isinstance(effect, ClearLease):
            self.lease_timer = None
        elif isinstance(effect, ShutDown):
            self.admission = None
            for request in self.requests:
                request.done = True
        else:
            self.incarnation = self.state.incarnation
            self.log(f"{self.name}: joins again as another incarnation")

    def _queue(self, work: Work) -> None:
        if work.verb in STAGING_WORK:
            self.staging.append(Job(work))
            return
        if work.verb == "resume":
            self.control = [job for job in self.control if job.work.verb != "pause"]
        if work.verb == "restore":
            self.staging = []
        self.control.append(Job(work))

    def die(self) -> None:
        self.alive, self.admission = False, None
        self.control, self.staging, self.held = [], [], set()

    def describe(self, now: float) -> Description:
        status = replica_machine.status(self.state, now, asleep=self.asleep)
        ranks = tuple(RankInfo(number, 0, 1, 1) for number in range(len(self.ranks)))
        capabilities = Capabilities(CELLS)
        return Description(status, "simulated", f"sim://{self.name}", capabilities, "v2:config", "model", ranks)

    # --- what its ranks do

    @property
    def jobs(self) -> tuple[str, ...]:
        """The queues that have something to do."""
        return tuple(name for name, queue in (("control", self.control), ("staging", self.staging)) if queue)

    def advance(self, queue: str, now: float) -> None:
        """One rank does its part of the first job of a queue; after the last one the front hears of it."""
        jobs = self.control if queue == "control" else self.staging
        job = jobs[0]
        verb = job.work.verb
        failure, after = self.faults.get(verb, (None, 0))
        if failure is not None and job.position >= after:
            del self.faults[verb]
            jobs.pop(0)
            self.handle(Failed(verb, job.work.request.fence, (failure.at(replica=self.name),)), now)
            return
        if job.position < len(self.ranks):
            problem = getattr(self, f"_{verb}")(job.work, self.ranks[job.position])
            if problem is not None:
                jobs.pop(0)
                self.handle(Failed(verb, job.work.request.fence, (problem,)), now)
                return
            job.position += 1
        if job.position == len(self.ranks):
            jobs.pop(0)
            self.handle(Done(verb, job.work.request.fence, self._reply(job.work)), now)

    def _plan(self, work: Work, rank: Rank) -> Failure | None:
        plan: PlanRequest = work.request
        path = source_of(plan.offer)
        if plan.offer is not None and path not in self.sources:
            return Failure("source_missing", path, replica=self.name, file=path)
        self.held.add(("source", plan.fence.serial))
        return None

    def _stage(self, work: Work, rank: Rank) -> Failure | None:
        plan = _plan_of(work)
        path = source_of(plan.offer)
        if path not in self.sources:
            return Failure("source_changed", path, replica=self.name, file=path)
        self.held.add(("staging", plan.fence.serial))
        rank.spare = self.sources[path].content
        return None

    def _verify(self, work: Work, rank: Rank) -> Failure | None:
        """Reads the spare back: the promised digest where there is one, and what a rollback must find."""
        plan = _plan_of(work)
        promised = plan.digest if plan.kind is Kind.ROLLBACK else plan.manifest
        if promised and rank.spare != promised:
            return Failure("tensor_digest", f"{rank.spare} is not {promised}", replica=self.name)
        if rank.spare != self.ranks[0].spare:
            return Failure("copies_differ", "ranks hold different bytes", replica=self.name)
        return None

    def _pause(self, work: Work, rank: Rank) -> Failure | None:
        rank.paused = True
        for request in self.requests:
            request.done = True
        return None

    def _install(self, work: Work, rank: Rank) -> Failure | None:
        plan, fence = _plan_of(work), work.request.fence
        self.on_install(self, plan, fence)
        if not rank.paused:
            raise Violation("I8", f"{self.name} installs while it runs")
        if rank.spare != self.votes.get(plan.fence.serial):
            raise Violation("I2", f"{self.name} installs {rank.spare}, which no rank voted for")
        if (fence.serial, fence.attempt) in rank.installs:
            raise Violation("I7", f"{self.name} installs {(fence.serial, fence.attempt)} twice")
        rank.installs.append((fence.serial, fence.attempt))
        rank.flips.append((fence.serial, fence.attempt))
        rank.live, rank.spare = rank.spare, rank.live
        rank.label, rank.namespace = plan.version, (plan.version, rank.live)
        self.must_be_reset = plan.cache is CachePolicy.RESET
        return None

    def _invalidate(self, work: Work, rank: Rank) -> Failure | None:
        if work.request.cache is CachePolicy.RESET:
            self.cache.clear()
        return None

    def _restore(self, work: Work, rank: Rank) -> Failure | None:
        """Undo what this attempt did to this rank, if anything; let go of the staging."""
        self.held.clear()
        self.must_be_reset = False
        self._take_back(work, rank)
        return None

    def _take_back(self, work: Work, rank: Rank) -> None:
        old = self.state.old or self.state.live
        if rank.flips and work.plan is not None and rank.flips[-1][0] == work.plan.fence.serial:
            rank.flips.pop()
            rank.live, rank.spare = rank.spare, rank.live
            rank.label, rank.namespace = old.version, (old.version, old.digest)

    def _readmit(self, work: Work, rank: Rank) -> Failure | None:
        """Take back what is not settled, prove the live bytes, forget every block, let it run."""
        self.held.clear()
        self.must_be_reset = False
        self._take_back(work, rank)
        for request in self.requests:
            request.done = True
        old = self.state.old or self.state.live
        if rank.live != old.digest:
            return Failure("tensor_digest", f"{rank.live} is not {old.digest}", replica=self.name)
        self.cache.clear()
        rank.paused = False
        return None

    def _resume(self, work: Work, rank: Rank) -> Failure | None:
        rank.paused = False
        if work.request.published:
            self.held.clear()
        return None

    def _release(self, work: Work, rank: Rank) -> Failure | None:
        if self.state.state is FrontState.ORPHANED:
            return self._readmit(work, rank)
        if work.request.to is ReleaseTo.PREVIOUS:
            self._take_back(work, rank)
        self.held.clear()
        self.cache.clear()
        rank.paused = False
        return None

    def _discard(self, work: Work, rank: Rank) -> Failure | None:
        self.held.clear()
        return None

    def _join(self, work: Work, rank: Rank) -> Failure | None:
        if self.state.state is FrontState.ORPHANED and (problem := self._readmit(work, rank)) is not None:
            return problem
        rank.label, rank.namespace = work.request.version, (work.request.version, work.request.digest)
        rank.paused = False
        return None

    def _reply(self, work: Work) -> Any:
        fence = work.request.fence
        if work.verb == "plan":
            return PlanReply(fence, work.request.manifest, 1, 1, self.installs_by)
        if work.verb == "stage":
            return StageReply(fence, len(self.ranks), 0.0)
        if work.verb == "verify":
            self.votes[fence.serial] = self.ranks[0].spare
            return VerifyReply(
                fence, self.ranks[0].spare, "digests" if work.plan and work.plan.manifest else "structure_only", 1
            )
        if work.verb == "pause":
            return PauseReply(fence, fence.serial, "", 7, self.asleep)
        return None

    # --- what clients see

    def generate(self, number: int, prefix: int) -> Token | None:
        """One token of one request that shares prefix blocks number `prefix` with others; None while shut."""
        if self.admission is None or not self.alive:
            return None
        head = self.ranks[0]
        if any(rank.paused for rank in self.ranks):
            raise Violation("I1", f"{self.name} is open while ranks are paused")
        request = next((each for each in self.requests if each.number == number and not each.done), None)
        if request is None:
            request = Request(number, prefix)
            self.requests.append(request)
        made_by = tuple(rank.live for rank in self.ranks)
        key = (prefix, head.namespace)
        if self.cache.setdefault(key, head.live) != head.live:
            raise Violation("I5", f"{self.name} reads blocks of {self.cache[key]} under {head.live}")
        token = Token(head.label, made_by)
        request.tokens.append(token)
        return token

    def check(self) -> None:
        """I1, I3 and I9 as far as one replica can break them."""
        for request in self.requests:
            if len({token.label for token in request.tokens}) > 1:
                raise Violation("I3", f"{self.name}: request {request.number} is a mixed reply")
        if self.admission is not None:
            version, digest = self.admission
            for rank in self.ranks:
                if (rank.live, rank.label, rank.namespace) != (digest, version, (version, digest)):
                    raise Violation(
                        "I1", f"{self.name} is open on {version} and a rank holds {rank.live} as {rank.label}"
                    )
        waits = self.state.state.value in ("closing", "paused") and not self.state.resuming
        if self.alive and waits and (self.state.lease_end is None or self.lease_timer != self.state.lease_end):
            raise Violation("I9", f"{self.name} is shut and no lease bounds it")


def _plan_of(work: Work) -> PlanRequest:
    if work.plan is None:
        raise Violation("I2", f"{work.verb} without a plan")
    return work.plan
