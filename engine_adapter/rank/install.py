"""The installing half of a rank: pause, install, restore, invalidate, resume. Runs on the control thread."""

from __future__ import annotations

from typing import NoReturn

from engine_adapter.rank.messages import (
    CacheTier,
    RankDone,
    RankInstall,
    RankInvalidate,
    RankInvalidateReply,
    RankPause,
    RankPauseReply,
    RankRestore,
    RankResume,
)
from engine_adapter.rank.state import Install, RankState, failed, wrong_phase
from updater.core.errors import Aborted, Failure, Quarantined
from updater.core.participant import SpareState
from updater.core.policy import CachePolicy, InstallMode


class InstallHalf:
    _state: RankState

    def pause(self, request: RankPause) -> RankPauseReply:
        """Stops the engine between two steps. Refused, and not paused, if memory moved since the vote."""
        state = self._state
        if state.install is not None:
            raise wrong_phase("an install is under way")
        state.auditing.set()  # it would take memory bandwidth from what is to come
        if state.point is None:
            try:
                state.point = state.engine.pause(request.deadline_s)
            except TimeoutError as error:
                raise failed("quiesce_timeout", f"the engine did not stop: {error}") from None
        voted = state.voted is not None and state.voted[0] == request.serial
        if voted and state.voted != (request.serial, state.fingerprint()) and not state.spare.asleep:
            self._unpause(request.deadline_s)
            raise failed("rank_failed", "parameters moved in memory between the vote and the pause")
        return RankPauseReply(
            step=state.point.step,
            running=state.point.running,
            staged_serial=request.serial if voted else 0,
            asleep=state.spare.asleep,
        )

    def install(self, request: RankInstall) -> RankDone:
        """All or nothing: a failure is undone here before it is reported; if that fails too, `restore` goes on."""
        state, pair = self._state, (request.serial, request.attempt)
        if pair == state.last_install:
            return RankDone()
        if state.undone is not None and state.undone[0] == request.serial and request.attempt <= state.undone[1]:
            raise failed("replica_fenced", "this attempt was taken back")
        if state.point is None:
            raise wrong_phase("the engine is not paused")
        if state.voted is None or state.voted[0] != request.serial:
            raise wrong_phase(f"nothing was voted for update {request.serial}")
        with state.quiet():
            state.refuse_unsettled()
            self._switch(request)
        return RankDone()

    def _switch(self, request: RankInstall) -> None:
        """Bytes, derived values, label and namespace at one point (I3)."""
        state, spare = self._state, self._state.spare
        before = (spare.state, spare.serial, spare.version, spare.digest)
        record = Install(request.serial, request.attempt, request.cache, before, state.label)
        state.install = record
        try:
            spare.install(self._mode(request.mode))
            state.derived.install()
            state.engine.set_version(request.version, request.digest, request.cache)
        except Exception as error:  # becomes a typed failure once the old bytes are back
            self._take_back(record, error)
        state.label = (request.version, request.digest)
        spare.set_state(SpareState.PREVIOUS, version=record.before_label[0], digest=record.before_label[1])
        state.swap_digests()
        state.last_install, record.done = (request.serial, request.attempt), True

    def restore(self, request: RankRestore) -> RankDone:
        """Idempotent by (serial, attempt); goes on from where an interrupted install or restore stopped."""
        state, pair = self._state, (request.serial, request.attempt)
        record = state.install
        if record is None or (record.serial, record.attempt) != pair:
            if state.last_install == pair:
                raise wrong_phase("this install was settled: the engine has run on it")
            state.undone = pair
            return RankDone()
        with state.quiet():
            self._undo(record, request.version, request.digest)
        return RankDone()

    def invalidate(self, request: RankInvalidate) -> RankInvalidateReply:
        """Only `reset` clears anything; the other policies keep what is there, under its namespace or on request."""
        if self._state.point is None:
            raise wrong_phase("the engine is not paused")
        if request.cache is not CachePolicy.RESET:
            return RankInvalidateReply(())
        tiers = self._state.engine.reset_cache()
        return RankInvalidateReply(tuple(CacheTier(name, bool(cleared)) for name, cleared in tiers.items()))

    def resume(self, request: RankResume) -> RankDone:
        """From here on an install stands. Refused while one is stuck in the middle (I1)."""
        state = self._state
        record = state.install
        if record is not None:
            if not record.done:
                raise wrong_phase("an install is half done: restore first")
            state.spare.settle()
            state.derived.settle()
            state.install = state.voted = None
            state.drop_plan()
        if state.point is not None:
            self._unpause(request.deadline_s)
        return RankDone()

    def _mode(self, mode: InstallMode) -> InstallMode:
        return self._state.engine.capabilities.install[0] if mode is InstallMode.AUTO else mode

    def _take_back(self, record: Install, error: Exception) -> NoReturn:
        state = self._state
        try:
            self._undo(record, *record.before_label)
        except Exception as second:
            state.spare.set_state(SpareState.UNKNOWN)
            why = f"install failed ({_name(error)}), and so did taking it back ({_name(second)})"
            raise Quarantined(Failure("rank_failed", why, rank=state.engine.rank)) from error
        raise Aborted(Failure("rank_failed", f"install failed: {_name(error)}", rank=state.engine.rank)) from error

    def _undo(self, record: Install, version: str, digest: str) -> None:
        """Bytes, derived values, label; the record goes last, so that a failure can be tried again."""
        state = self._state
        state.spare.undo()
        state.derived.undo()
        state.engine.set_version(version, digest, record.cache)
        state.label = (version, digest)
        if record.done:
            state.swap_digests()
        kind, serial, held, held_digest = record.before_state
        state.spare.set_state(kind, serial=serial, version=held, digest=held_digest)
        state.install = state.last_install = None
        state.undone = (record.serial, record.attempt)

    def _unpause(self, deadline_s: float) -> None:
        try:
            self._state.engine.unpause(deadline_s)
        except TimeoutError as error:
            raise failed("phase_timeout", f"the engine did not go on: {error}") from None
        self._state.point = None


def _name(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
