"""What a rank remembers of transactions: shared by its staging half and its installing half; and what is
computed from parameters, kept for both sides.

A packed kernel or a cached head follows the bytes that it was made from. Its states are kept like the two sides of a
spare: one is bound, the other was built from what is staged or was bound before.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from engine_adapter.base import Derived, PausePoint, RankEngine
from engine_adapter.placement.spelling import Proved
from engine_adapter.placement.values import RankVerifyReply
from engine_adapter.rank.messages import RankStageReply, RankVerify
from engine_adapter.rank.plan import Plan
from engine_adapter.rank.spare import RankSpare
from updater.core.errors import Aborted, Failure, LiveweightsError, Rejected
from updater.core.participant import SpareState
from updater.core.policy import CachePolicy
from updater.core.version import START

_YIELD_S = 30.0  # how long a control verb waits for a cancelled staging verb to let go


@dataclass(slots=True)
class Install:
    """An install that is neither settled nor undone. What `before_*` name is what `restore` brings back."""

    serial: int
    attempt: int
    cache: CachePolicy
    before_state: tuple[SpareState, int, str, str]
    before_label: tuple[str, str]
    done: bool = False


@dataclass(slots=True)
class RankState:
    """`label`: version and content digest of what is live. `proved`: the spelling that it started on.

    `voted`: serial and fingerprint of the last yes.

    `live_digests`, `spare_digests`: parameter digests as of the vote, or None if not computed. `point`: where the
    engine stands while it is paused. `last_install`, `undone`: (serial, attempt) since the last vote. `discarded`: the
    last serial that was. `staging` is held by whichever staging verb runs. `auditing`: ends the audit that reads along
    without holding it.
    """

    engine: RankEngine
    spare: RankSpare
    derived: DerivedStates
    clock: Callable[[], float] = time.monotonic
    label: tuple[str, str] = (str(START), "")
    plan: Plan | None = None
    proved: Proved | None = None
    stage_reply: RankStageReply | None = None
    verified: tuple[RankVerify, RankVerifyReply] | None = None
    voted: tuple[int, str] | None = None
    live_digests: dict[str, int] | None = None
    spare_digests: dict[str, int] | None = None
    point: PausePoint | None = None
    install: Install | None = None
    last_install: tuple[int, int] | None = None
    undone: tuple[int, int] | None = None
    discarded: int = -1
    staging: threading.Lock = field(default_factory=threading.Lock)
    auditing: threading.Event = field(default_factory=threading.Event)

    def vote(self, serial: int) -> None:
        """A new transaction: what is remembered of earlier ones must not answer for it, whatever their numbers."""
        self.voted = (serial, self.fingerprint())
        self.last_install = self.undone = None

    def fingerprint(self) -> str:
        return hashlib.sha256(repr(self.spare.fingerprint()).encode()).hexdigest()

    def swap_digests(self) -> None:
        self.live_digests, self.spare_digests = self.spare_digests, self.live_digests

    def planned(self, serial: int) -> Plan:
        if self.plan is None or self.plan.request.serial != serial:
            raise wrong_phase(f"update {serial} is not planned here")
        return self.plan

    def drop_plan(self) -> None:
        """I6: no file stays open."""
        if self.plan is not None:
            self.plan.close()
        self.plan = self.stage_reply = self.verified = None

    def empty_spare(self) -> None:
        self.spare.set_state(SpareState.EMPTY)
        self.derived.drop()
        self.spare_digests = self.voted = None

    def refuse_unsettled(self) -> None:
        if self.install is not None:
            raise wrong_phase("the last install is neither settled nor restored")

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """No staging verb runs meanwhile, and an audit ends. Raises `phase_timeout` if one does not let go."""
        self.auditing.set()
        if not self.staging.acquire(timeout=_YIELD_S):
            raise failed("phase_timeout", "the staging thread is still at work")
        # Again, under the lock: an audit that began since the first word has an end of its own to be told.
        self.auditing.set()
        try:
            yield
        finally:
            self.staging.release()


def failed(code: str, message: str) -> Aborted:
    """One refusal of this rank."""
    return Aborted(Failure(code, message))


def wrong_phase(message: str) -> Aborted:
    return failed("wrong_phase", message)


class DerivedStates:
    """Two states per derived value. `held`: whether the side that is not bound has any.

    Raises `Rejected` (`placement_refused`) at construction for a value that lacks a hook or is computed from something
    that is no parameter.
    """

    def __init__(self, derived: Sequence[Derived], parameters: Mapping[str, object]) -> None:
        _check(derived, parameters)
        self._derived = tuple(derived)
        self._sides: list[dict[str, object] | None] = [{each.name: each.bound() for each in derived}, None]
        self._side = 0  # which is bound, if the last `install` or `undo` returned
        self._from_side: int | None = None  # of the install that is not settled

    @property
    def feeds(self) -> frozenset[str]:
        """Parameters that something is computed from."""
        return frozenset(name for each in self._derived for name in each.feeds)

    @property
    def held(self) -> bool:
        return self._sides[1 - self._side] is not None

    def build(self, tensors: Mapping[str, torch.Tensor], check: Callable[[], None]) -> None:
        """Compute the other side's states from `tensors`, calling `check` before each. Touches nothing live.

        Raises `Aborted` naming the value that could not be computed; nothing is held then.
        """
        self.drop()
        made: dict[str, object] = {}
        for each in self._derived:
            check()
            try:
                made[each.name] = each.build({name: tensors[name] for name in each.feeds})
            except LiveweightsError:
                raise
            except Exception as error:  # an engine's own code, at the boundary of a rank
                why = f"could not be computed from the new weights: {type(error).__name__}: {error}"
                raise Aborted(Failure("rank_failed", why, tensor=each.name)) from error
        self._sides[1 - self._side] = made

    def drop(self) -> None:
        """Let the other side's states go, unless an unsettled install may still have to bind them again."""
        if self._from_side is None:
            self._sides[1 - self._side] = None

    def install(self) -> None:
        """Bind the other side's states. After an exception: `undo`."""
        if not self.held:
            raise RuntimeError("no states were built for what is staged")
        self._from_side = self._side
        self._bind(1 - self._side)

    def undo(self) -> None:
        """Take `install` back, whole or half done; may be repeated until it returns. Without one: nothing."""
        if self._from_side is not None:
            self._bind(self._from_side)
            self._from_side = None

    def settle(self) -> None:
        """The install stands."""
        self._from_side = None

    def _bind(self, side: int) -> None:
        """Binds every value, also those that already are: a repetition ends in the same place."""
        states = self._sides[side]
        for each in self._derived:
            each.bind((states or {})[each.name])
        self._side = side


def _check(derived: Sequence[Derived], parameters: Mapping[str, object]) -> None:
    stuck = [each.name for each in derived if not (callable(each.build) and callable(each.bind))]
    lost = [(each.name, feed) for each in derived for feed in each.feeds if feed not in parameters]
    failures = [Failure("placement_refused", "derived, and cannot be built again", tensor=name) for name in stuck]
    failures += [Failure("placement_refused", f"derived from {feed}, no parameter", tensor=n) for n, feed in lost]
    if failures:
        raise Rejected(*failures)
