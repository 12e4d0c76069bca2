"""The rank's half of the transaction: every verb of `rank_messages`, over one engine and its spare.

Staging verbs run on one thread of their own while the engine serves; they touch the spare and never a live tensor.
The others run on the control thread. `cancel` may be called from anywhere.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from engine_adapter.base import PausePoint, RankEngine
from engine_adapter.rank_messages import (
    CacheTier,
    NamedDigest,
    RankAudit,
    RankAuditReply,
    RankCheckPrevious,
    RankDigests,
    RankDigestsReply,
    RankDiscard,
    RankDone,
    RankInstall,
    RankInvalidate,
    RankInvalidateReply,
    RankPause,
    RankPauseReply,
    RankPlan,
    RankPlanReply,
    RankRestore,
    RankResume,
    RankStage,
    RankStageReply,
    RankStatus,
    RankStatusReply,
    RankVerify,
    RankVerifyReply,
)
from engine_adapter.rank_plan import Opener, Plan, make_plan
from engine_adapter.rank_readback import parameter_digests, read_back
from engine_adapter.rank_replay import Stop, replay
from engine_adapter.spare import Spare
from transports.base import Source
from transports.digest import to_hex
from transports.disk import DiskSource
from transports.scans import is_zero
from updater.core.errors import Aborted, Failure, Quarantined
from updater.core.participant import SpareState
from updater.core.policy import CachePolicy, InstallMode

#: Verbs that may take long while the engine serves: they belong on the staging thread, one at a time.
STAGING_VERBS = frozenset({"plan", "stage", "verify", "check_previous", "audit", "digests"})

_FOREVER = float("inf")
_YIELD_S = 30.0  # how long a control verb waits for a cancelled staging verb to let go


def open_disk(path: str, roots: tuple[str, ...], manifest: str) -> Source:
    """The opener of the disk transport."""
    return DiskSource.open(path, roots, manifest)


@dataclass(slots=True)
class _Install:
    """An install that is neither settled nor undone. What `before` names is what `restore` brings back."""

    serial: int
    attempt: int
    cache: CachePolicy
    before_state: tuple[SpareState, int, str, str]
    before_label: tuple[str, str]
    done: bool = False


class RankAgent:
    """`handle(verb, request) -> reply`; raises `LiveweightsError` with failures where a verb is refused.

    Allocates and touches the spare at once. `clock`: monotonic seconds. `poison`: fill the spare with NaN before
    every staging; without it only where nobody promised digests, so that what a source never wrote is still seen.
    """

    def __init__(
        self,
        engine: RankEngine,
        *,
        open_source: Opener = open_disk,
        clock: Callable[[], float] = time.monotonic,
        poison: bool = False,
    ) -> None:
        self._engine = engine
        self._open_source = open_source
        self._clock = clock
        self._poison = poison
        self._spare = Spare(engine.parameters())
        self._label = ("start", "")
        self._plan: Plan | None = None
        self._planning: tuple[int, threading.Event] | None = None
        self._stage_reply: RankStageReply | None = None
        self._verified: tuple[RankVerify, RankVerifyReply] | None = None
        self._voted: tuple[int, str] | None = None  # serial and fingerprint of the last yes
        self._live_digests: dict[str, int] | None = None
        self._spare_digests: dict[str, int] | None = None
        self._point: PausePoint | None = None  # while paused
        self._install: _Install | None = None
        self._last_install: tuple[int, int] | None = None
        self._undone: tuple[int, int] | None = None
        self._staging = threading.Lock()
        self._verbs: dict[str, Callable[[Any], Any]] = {
            "plan": self.plan,
            "stage": self.stage,
            "verify": self.verify,
            "check_previous": self.check_previous,
            "pause": self.pause,
            "install": self.install,
            "restore": self.restore,
            "invalidate": self.invalidate,
            "resume": self.resume,
            "discard": self.discard,
            "status": self.status,
            "audit": self.audit,
            "digests": self.digests,
        }

    @property
    def spare(self) -> Spare:
        """For tests and figures."""
        return self._spare

    def handle(self, verb: str, request: Any) -> Any:
        """The reply type is that of `RANK_MESSAGES[verb]`."""
        return self._verbs[verb](request)

    def cancel(self, serial: int) -> None:
        """Make a running plan, stage or verify of `serial` end soon, with `client_abort`. From any thread."""
        for running in (self._planning, self._plan and (self._plan.request.serial, self._plan.cancelled)):
            if running and running[0] == serial:
                running[1].set()

    def label(self, version: str, digest: str) -> None:
        """Name the live bytes without changing them. Only while the engine is paused or has not started."""
        self._engine.set_version(version, digest, CachePolicy.RESET)
        self._label = (version, digest)

    # staging thread

    def plan(self, request: RankPlan) -> RankPlanReply:
        """Opens the source and proves the placement; the spare and its state stay as they are."""
        with self._staging:
            if self._plan is not None and self._plan.request == request:
                return self._plan.reply
            self._drop_plan()
            cancelled = threading.Event()
            self._planning = (request.serial, cancelled)
            try:
                plan = make_plan(self._engine, self._spare.live, request, self._open_source)
                plan.cancelled = cancelled
                if cancelled.is_set():
                    plan.close()
                    raise Stop(cancelled, _FOREVER, self._clock).error()
                self._plan = plan
            finally:
                self._planning = None
            return self._plan.reply

    def stage(self, request: RankStage) -> RankStageReply:
        """Spends `previous`, replays the rows. A failure leaves the state `staging`, until `discard`."""
        with self._staging:
            plan = self._planned(request.serial)
            if self._stage_reply is not None:
                return self._stage_reply
            self._refuse_unsettled()
            begun, stop = self._clock(), self._stop(plan, request.deadline_s)
            stop.check()
            self._spare.set_state(SpareState.STAGING, serial=request.serial)
            self._spare_digests = self._voted = None
            if self._poison or not plan.has_digests:
                self._spare.poison()
            asked = replay(plan, self._spare.live, self._spare.spare, stop)
            self._stage_reply = RankStageReply(asked, self._clock() - begun)
            return self._stage_reply

    def verify(self, request: RankVerify) -> RankVerifyReply:
        """Reads the spare back. On return the spare is `staged` and the source is closed."""
        with self._staging:
            if self._verified is not None and self._verified[0] == request:
                return self._verified[1]
            plan = self._planned(request.serial)
            if self._stage_reply is None:
                raise _wrong_phase(f"update {request.serial} is not staged here")
            begun, stop = self._clock(), self._stop(plan, request.deadline_s)
            plan.source.recheck()
            proof = read_back(plan, self._spare.spare, request.cuts, stop)
            if self._live_digests is None or plan.request.start:
                self._live_digests = parameter_digests(self._spare.live, stop)
            changed = tuple(n for n, digest in proof.parameters.items() if self._live_digests.get(n) != digest)
            reply = RankVerifyReply(
                atoms=proof.atoms,
                parameters=len(proof.parameters),
                changed=tuple(sorted(changed)),
                zero=tuple(sorted(n for n, t in self._spare.spare.items() if t.numel() and is_zero(t))),
                differs_from_live=tuple(sorted(changed)) if plan.request.start else (),
                seconds=self._clock() - begun,
            )
            self._spare_digests = dict(proof.parameters)
            self._spare.set_state(SpareState.STAGED, serial=request.serial)
            self._vote(request.serial)
            self._verified = (request, reply)
            plan.close()
            return reply

    def check_previous(self, request: RankCheckPrevious) -> RankDone:
        """Rollback's vote: `no_rollback` unless the spare still holds what was live under this label."""
        with self._staging:
            begun, spare = self._clock(), self._spare
            held = (spare.state, spare.version)
            if held != (SpareState.PREVIOUS, request.version) or spare.digest not in ("", request.digest):
                raise _failed("no_rollback", f"the spare is {spare.state.value} {spare.version or '-'}")
            stop = Stop(threading.Event(), _FOREVER, self._clock)
            if self._spare_digests is None or _differing(parameter_digests(spare.spare, stop), self._spare_digests):
                self._empty_spare()
                raise _failed("no_rollback", "the spare's bytes are no longer what they were when they were live")
            self._vote(request.serial)
            return RankDone(self._clock() - begun)

    def audit(self, request: RankAudit) -> RankAuditReply:
        """Digests `live` or `spare` again. A spare that differs is no way back any more."""
        with self._staging:
            known = self._live_digests if request.what == "live" else self._spare_digests
            tensors = self._spare.live if request.what == "live" else self._spare.spare
            if known is None:
                return RankAuditReply(0, ())
            found = parameter_digests(tensors, Stop(threading.Event(), _FOREVER, self._clock))
            wrong = _differing(found, known)
            if wrong and request.what == "spare":
                self._empty_spare()
            return RankAuditReply(len(found), wrong)

    def digests(self, request: RankDigests) -> RankDigestsReply:
        """Parameter digests of what is live, freshly computed."""
        with self._staging:
            found = parameter_digests(self._spare.live, Stop(threading.Event(), _FOREVER, self._clock))
            return RankDigestsReply(tuple(NamedDigest(name, to_hex(value)) for name, value in found.items()))

    # control thread

    def pause(self, request: RankPause) -> RankPauseReply:
        """Stops the engine between two steps. Refused, and not paused, if memory moved since the vote."""
        if self._install is not None:
            raise _wrong_phase("an install is under way")
        if self._point is None:
            try:
                self._point = self._engine.pause(request.deadline_s)
            except TimeoutError as error:
                raise _failed("quiesce_timeout", f"the engine did not stop: {error}") from None
        fingerprint = self._fingerprint()
        voted = self._voted is not None and self._voted[0] == request.serial
        if voted and self._voted != (request.serial, fingerprint) and not self._spare.asleep:
            self._unpause(request.deadline_s)
            raise _failed("rank_failed", "parameters moved in memory between the vote and the pause")
        return RankPauseReply(
            step=self._point.step,
            running=self._point.running,
            staged_serial=request.serial if voted else 0,
            fingerprint=fingerprint,
            asleep=self._spare.asleep,
        )

    def install(self, request: RankInstall) -> RankDone:
        """All or nothing: a failure is undone here before it is reported; if that fails too, `restore` goes on."""
        if (request.serial, request.attempt) == self._last_install:
            return RankDone()
        undone = self._undone
        if undone is not None and undone[0] == request.serial and request.attempt <= undone[1]:
            raise _failed("replica_fenced", "this attempt was taken back")
        if self._point is None:
            raise _wrong_phase("the engine is not paused")
        if self._voted is None or self._voted[0] != request.serial:
            raise _wrong_phase(f"nothing was voted for update {request.serial}")
        begun = self._clock()
        with self._quiet():
            self._refuse_unsettled()
            spare = self._spare
            before = (spare.state, spare.serial, spare.version, spare.digest)
            record = _Install(request.serial, request.attempt, request.cache, before, self._label)
            self._install = record
            try:
                spare.install(self._mode(request.mode))
                self._refresh()
                self._engine.set_version(request.version, request.digest, request.cache)
            except Exception as error:  # becomes a typed failure once the old bytes are back
                self._take_back(record, error)
            self._label = (request.version, request.digest)
            spare.set_state(SpareState.PREVIOUS, version=record.before_label[0], digest=record.before_label[1])
            self._live_digests, self._spare_digests = self._spare_digests, self._live_digests
            self._last_install, record.done = (request.serial, request.attempt), True
        return RankDone(self._clock() - begun)

    def restore(self, request: RankRestore) -> RankDone:
        """Idempotent by (serial, attempt); goes on from where an interrupted install or restore stopped."""
        begun, pair = self._clock(), (request.serial, request.attempt)
        record = self._install
        if record is None or (record.serial, record.attempt) != pair:
            if self._last_install == pair:
                raise _wrong_phase("this install was settled: the engine has run on it")
            self._undone = pair
            return RankDone()
        with self._quiet():
            self._undo(record, request.version, request.digest)
        return RankDone(self._clock() - begun)

    def invalidate(self, request: RankInvalidate) -> RankInvalidateReply:
        """Only `reset` clears anything; the other policies keep what is there, under its namespace or on request."""
        if self._point is None:
            raise _wrong_phase("the engine is not paused")
        if request.cache is not CachePolicy.RESET:
            return RankInvalidateReply(())
        tiers = self._engine.reset_cache()
        return RankInvalidateReply(tuple(CacheTier(name, bool(cleared)) for name, cleared in tiers.items()))

    def resume(self, request: RankResume) -> RankDone:
        """From here on an install stands. Refused while one is stuck in the middle (I1)."""
        begun, record = self._clock(), self._install
        if record is not None:
            if not record.done:
                raise _wrong_phase("an install is half done: restore first")
            self._spare.settle()
            self._install = None
            self._end_update()
        if self._point is not None:
            self._unpause(request.deadline_s)
        return RankDone(self._clock() - begun)

    def discard(self, request: RankDiscard) -> RankDone:
        """Ends a running staging verb of this update first. `previous` survives if nothing was staged over it."""
        begun = self._clock()
        self.cancel(request.serial)
        with self._quiet():
            record = self._install
            if record is not None and record.serial == request.serial:
                raise _wrong_phase("this update is installed: restore first")
            if self._plan is not None and self._plan.request.serial == request.serial:
                self._drop_plan()
            spare = self._spare
            if spare.serial == request.serial and spare.state in (SpareState.STAGING, SpareState.STAGED):
                self._empty_spare()
            if self._voted is not None and self._voted[0] == request.serial:
                self._voted = None
        return RankDone(self._clock() - begun)

    def status(self, request: RankStatus) -> RankStatusReply:
        spare = self._spare
        return RankStatusReply(
            live_version=self._label[0],
            spare_state=spare.state.value,
            spare_serial=spare.serial,
            spare_version=spare.version,
            spare_digest=spare.digest,
            paused=self._point is not None,
            spare_bytes=spare.nbytes,
        )

    # helpers

    def _mode(self, mode: InstallMode) -> InstallMode:
        return self._engine.capabilities.install[0] if mode is InstallMode.AUTO else mode

    def _refresh(self) -> None:
        for derived in self._engine.derived():
            derived.refresh()

    def _take_back(self, record: _Install, error: Exception) -> NoReturn:
        try:
            self._undo(record, *record.before_label)
        except Exception as second:
            self._spare.set_state(SpareState.UNKNOWN)
            why = f"install failed ({_name(error)}), and so did taking it back ({_name(second)})"
            raise Quarantined(Failure("rank_failed", why, rank=self._engine.rank)) from error
        raise Aborted(Failure("rank_failed", f"install failed: {_name(error)}", rank=self._engine.rank)) from error

    def _undo(self, record: _Install, version: str, digest: str) -> None:
        """Bytes, derived values, label; the record goes last, so that a failure can be tried again."""
        self._spare.undo()
        self._refresh()
        self._engine.set_version(version, digest, record.cache)
        self._label = (version, digest)
        if record.done:
            self._live_digests, self._spare_digests = self._spare_digests, self._live_digests
        state, serial, held, held_digest = record.before_state
        self._spare.set_state(state, serial=serial, version=held, digest=held_digest)
        self._install = self._last_install = None
        self._undone = (record.serial, record.attempt)

    def _unpause(self, deadline_s: float) -> None:
        try:
            self._engine.unpause(deadline_s)
        except TimeoutError as error:
            raise _failed("phase_timeout", f"the engine did not go on: {error}") from None
        self._point = None

    def _vote(self, serial: int) -> None:
        """A new transaction: what is remembered of earlier ones must not answer for it, whatever their numbers."""
        self._voted = (serial, self._fingerprint())
        self._last_install = self._undone = None

    def _planned(self, serial: int) -> Plan:
        if self._plan is None or self._plan.request.serial != serial:
            raise _wrong_phase(f"update {serial} is not planned here")
        return self._plan

    def _stop(self, plan: Plan, deadline_s: float) -> Stop:
        return Stop(plan.cancelled, self._clock() + deadline_s, self._clock)

    def _refuse_unsettled(self) -> None:
        if self._install is not None:
            raise _wrong_phase("the last install is neither settled nor restored")

    def _drop_plan(self) -> None:
        if self._plan is not None:
            self._plan.close()
        self._plan = self._stage_reply = self._verified = None

    def _end_update(self) -> None:
        """I6: an ended update leaves no file open and no plan behind."""
        self._drop_plan()
        self._voted = None

    def _empty_spare(self) -> None:
        self._spare.set_state(SpareState.EMPTY)
        self._spare_digests = self._voted = None

    def _fingerprint(self) -> str:
        return hashlib.sha256(repr(self._spare.fingerprint()).encode()).hexdigest()

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """No staging verb runs meanwhile. Raises `phase_timeout` if one does not let go."""
        if not self._staging.acquire(timeout=_YIELD_S):
            raise _failed("phase_timeout", "the staging thread is still at work")
        try:
            yield
        finally:
            self._staging.release()


def _differing(found: Mapping[str, int], known: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(sorted(name for name, digest in found.items() if known.get(name) != digest))


def _name(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _failed(code: str, message: str) -> Aborted:
    return Aborted(Failure(code, message))


def _wrong_phase(message: str) -> Aborted:
    return _failed("wrong_phase", message)
