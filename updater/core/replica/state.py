"""What the replica machine remembers, hears and asks for. The front owns one `ReplicaState` and swaps it whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from updater.core.errors import Failure
from updater.core.participant import (
    Claim,
    Fence,
    FrontState,
    FrontStatus,
    PauseReply,
    PlanRequest,
    Released,
    Spare,
    SpareState,
)
from updater.core.release import RELEASE, WIRE


@dataclass(frozen=True, slots=True)
class Held:
    """A version label and the content digest of its bytes."""

    version: str
    digest: str


# --- events


@dataclass(frozen=True, slots=True)
class Asked:
    """A verb of the participant contract arrived; `request` as in `participant.MESSAGES`. Or an operator's: readmit,
    release, whose fence is what the front heard last.
    """

    verb: str
    request: Any

    @property
    def fence(self) -> Fence:
        fence: Fence = self.request.fence
        return fence


@dataclass(frozen=True, slots=True)
class Done:
    """All ranks finished a `Work`; `fence` is that of its request. `reply`: PlanReply, StageReply, VerifyReply or
    PauseReply for those verbs, else None (the machine makes the `Ack`).
    """

    verb: str
    fence: Fence
    reply: Any = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Failed:
    """A `Work` failed on some rank, and every rank has stopped working on it. At least one failure."""

    verb: str
    fence: Fence
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class LeaseTimer:
    """The timer of `SetLease` went off. Early ones are ignored: `now` counts."""


@dataclass(frozen=True, slots=True)
class RankDied:
    """A rank process is gone, or this whole process was replaced in its fleet: only a restart of the replica helps."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class AuditFailed:
    """The bytes of `audited`, which was live when the audit began, are not what was voted."""

    audited: Held
    failure: Failure


@dataclass(frozen=True, slots=True)
class SpareLost:
    """The kept copy, `audited` when the audit began, is not what it was: no way back."""

    audited: Spare
    failure: Failure


@dataclass(frozen=True, slots=True)
class Told:
    """Its coordinator's answer to the call of `incarnation` (I11)."""

    claim: Claim
    fleet: str
    epoch: int
    incarnation: str


ReplicaEvent = Told | Asked | Done | Failed | LeaseTimer | RankDied | AuditFailed | SpareLost

# --- effects, to be performed in order


@dataclass(frozen=True, slots=True)
class Answer:
    """To every caller that waits for (verb, fence)."""

    verb: str
    fence: Fence
    reply: Any


@dataclass(frozen=True, slots=True)
class Refuse:
    """To every caller that waits for (verb, fence): a problem document with these failures."""

    verb: str
    fence: Fence
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """Let all ranks do this, then feed `Done` or `Failed` with the same verb and `request.fence`.

    Verbs: join (set label and namespace, start), plan, stage, verify, pause (quiesce), install, invalidate, restore,
    resume (let the ranks run; ends a quiesce that still runs), discard (cancel and drop staging). restore undoes an
    install wholly or partly done, or none, and drops the staging of the plan too.

    For operators: readmit (restore what is not settled, drop staging, prove the live bytes of all ranks, let them run)
    and release (to live: reset every cache, let them run; to previous: restore, let them run).
    """

    verb: str
    request: Any
    plan: PlanRequest | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """Plan, stage and verify work of this serial must stop soon and let go of what it holds; its `Done` or `Failed` is
    not wanted any more.
    """

    serial: int


@dataclass(frozen=True, slots=True)
class CloseAdmission:
    """From now on no request reaches the ranks: they wait in the bounded queue."""


@dataclass(frozen=True, slots=True)
class OpenAdmission:
    """Requests may run again; replies carry this version."""

    version: str
    digest: str


@dataclass(frozen=True, slots=True)
class SetLease:
    """Feed `LeaseTimer` at this time of the clock that `now` comes from; replaces an earlier one."""

    at: float


@dataclass(frozen=True, slots=True)
class ClearLease:
    pass


@dataclass(frozen=True, slots=True)
class ShutDown:
    """The replica is broken or quarantined: readiness fails from now on."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Rejoin:
    """Not out of service any more: ask to be admitted, as the new incarnation of the state."""


ReplicaEffect = (
    Answer | Refuse | Work | Cancel | CloseAdmission | OpenAdmission | SetLease | ClearLease | ShutDown | Rejoin
)

# --- state

EMPTY = Spare(SpareState.EMPTY)


@dataclass(frozen=True, slots=True)
class Running:
    """Work in progress, and the fences of all callers that wait for it."""

    verb: str
    fence: Fence
    request: Any
    waiters: tuple[Fence, ...]


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """The compare-and-set variable of a front.

    `fleet`, `epoch`, `owner`: who is obeyed; only `lead` changes them. `rival`: the last other owner of this epoch that
    led it or asked to. `unclaimed`: the coordinator does not know it. `mark`: highest (epoch, serial, attempt) that was
    not refused. `dead`: tombstone; (serial, attempt) up to it may never install.
    `origin`: joining or open, where an ended pause leads back to. `key`: (serial, attempt) of the running pause or
    install. `reached`: how far `plan.fence.serial` got: "", planned, staged, voted. `answers`: first answers by
    (verb, epoch, serial, attempt). `resuming`: ranks are being let run. `old`: what served before the install.
    `postponed`: a restore that waits for ranks to stop, or a discard that waits for the reopening. `heard`: when a
    coordinator last asked for something. `released`: an operator opened it, and nothing was published since. `ranks`:
    how many worker processes it has. `one_way`: what is planned installs without keeping what it replaces.
    """

    replica: str
    incarnation: str
    live: Held
    fleet: str = ""
    epoch: int = 0
    owner: str = ""
    rival: str = ""
    unclaimed: bool = False
    mark: tuple[int, int, int] = (0, 0, 0)
    dead: tuple[int, int] = (0, 0)
    state: FrontState = FrontState.JOINING
    origin: FrontState = FrontState.JOINING
    spare: Spare = EMPTY
    plan: PlanRequest | None = None
    reached: str = ""
    digest: str = ""
    key: tuple[int, int] = (0, 0)
    lease_s: float = 0.0
    lease_end: float | None = None
    pause_reply: PauseReply | None = None
    running: tuple[Running, ...] = ()
    answers: tuple[tuple[tuple[str, int, int, int], Any], ...] = ()
    resuming: bool = False
    old: Held | None = None
    postponed: Asked | None = None
    failure: Failure | None = None
    heard: float = 0.0
    released: Released | None = None
    ranks: int = 0
    one_way: bool = False

    def work(self, verb: str) -> Running | None:
        return next((each for each in self.running if each.verb == verb), None)

    def answer(self, verb: str, fence: Fence) -> Any:
        return dict(self.answers).get((verb, *fence.order()))

    def last_heard(self) -> Fence:
        """What an operator's verb carries: nothing that was heard is newer."""
        return Fence(self.fleet, self.epoch, *self.mark[1:], self.incarnation, self.owner)

    def tombstoned(self, fence: Fence) -> bool:
        return (fence.serial, fence.attempt) <= self.dead

    @property
    def held(self) -> Held:
        """What it can serve: of an orphan whose installation was never published, what served before."""
        return self.old or self.live if self.state is FrontState.ORPHANED else self.live

    @property
    def serial(self) -> int:
        """Serial of the update that is planned or further, else 0."""
        return self.plan.fence.serial if self.plan else 0


Step = tuple[ReplicaState, tuple[ReplicaEffect, ...]]


def status(
    state: ReplicaState, now: float, *, in_flight: int = 0, waiting: int = 0, asleep: bool = False
) -> FrontStatus:
    """What `status` and `describe` say."""
    return FrontStatus(
        replica=state.replica,
        incarnation=state.incarnation,
        fleet=state.fleet,
        epoch=state.epoch,
        serial=state.mark[1],
        attempt=state.mark[2],
        state=state.state,
        live_version=state.held.version,
        live_digest=state.held.digest,
        spare=state.spare,
        in_flight=in_flight,
        waiting=waiting,
        asleep=asleep,
        lease_left_s=None if state.lease_end is None else max(0.0, state.lease_end - now),
        staged_serial=state.serial if state.reached == "voted" else 0,
        failure=state.failure,
        released=state.released,
        ranks=state.ranks,
        owner=state.owner,
        rival=state.rival,
        unclaimed=state.unclaimed,
        release=RELEASE,
        wire=WIRE,
    )


def started(replica: str, incarnation: str, version: str, digest: str, ranks: int = 0) -> ReplicaState:
    """A front whose ranks have loaded their start checkpoint: shut, joining. `digest`: observed content digest."""
    return ReplicaState(replica, incarnation, Held(version, digest), ranks=ranks)


def with_running(state: ReplicaState, asked: Asked) -> ReplicaState:
    new = Running(asked.verb, asked.fence, asked.request, (asked.fence,))
    return replace(state, running=(*state.running, new))
