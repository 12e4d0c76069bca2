"""The rank's half of the transaction: every verb of `messages`, over one engine and its spare."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from engine_adapter.base import RankEngine
from engine_adapter.rank.install import InstallHalf
from engine_adapter.rank.messages import RankDiscard, RankDone, RankStatus, RankStatusReply
from engine_adapter.rank.plan import Opener
from engine_adapter.rank.spare import RankSpare
from engine_adapter.rank.staging import StagingHalf
from engine_adapter.rank.state import DerivedStates, RankState, wrong_phase
from transports.registry import Transports
from updater.core.participant import SpareState
from updater.core.policy import CachePolicy

#: Verbs that may take long while the engine serves: they belong on the staging thread, one at a time.
STAGING_VERBS = frozenset({"plan", "stage", "verify", "check_previous", "audit", "digests"})


class RankAgent(StagingHalf, InstallHalf):
    """`handle(verb, request) -> reply`; raises `LiveweightsError` with failures where a verb is refused.

    Verbs of `STAGING_VERBS` belong on a thread of their own, the others on the control thread. Allocates and touches
    the spare at once. `clock`: monotonic seconds. `poison`: fill the spare with NaN before every staging; without it
    only where no digests are promised, so that what a source never wrote is still seen. `tell(serial, bytes)`: hears
    now and then, on whatever thread reads, how far a staging is. `awaited`: whether a staging verb waits for the one
    that runs; an audit then ends. `host_spare`: see `RankSpare`; the engine then offers no `flip`.
    """

    def __init__(
        self,
        engine: RankEngine,
        *,
        open_source: Opener | None = None,
        clock: Callable[[], float] = time.monotonic,
        poison: bool = False,
        tell: Callable[[int, int], None] = lambda _serial, _done: None,
        awaited: Callable[[], bool] = lambda: False,
        host_spare: bool = False,
    ) -> None:
        parameters = engine.parameters()
        spare = RankSpare(parameters, on_host=host_spare)
        self._transports = Transports()
        state = RankState(engine, spare, DerivedStates(engine.derived(), parameters), clock)
        super().__init__(state, open_source or self._transports.open, poison, tell, awaited)

    @property
    def spare(self) -> RankSpare:
        """For tests and figures."""
        return self._state.spare

    def handle(self, verb: str, request: Any) -> Any:
        """`verb`: of `RANK_MESSAGES`; the method of that name performs it. The reply is of the type given there."""
        return getattr(self, verb)(request)

    def close(self) -> None:
        """Lets go of what is kept between updates for transports. The process ends."""
        self._transports.close()

    def label(self, version: str, digest: str) -> None:
        """Name the live bytes without changing them. Only while the engine has not started."""
        self._state.engine.set_version(version, digest, CachePolicy.RESET)
        self._state.label = (version, digest)

    def relabel(self, version: str, digest: str) -> None:
        """The same while it is paused. Raises Aborted (`wrong_phase`) if it is not."""
        if self._state.point is None:
            raise wrong_phase("the engine is not paused")
        self.label(version, digest)

    def discard(self, request: RankDiscard) -> RankDone:
        """Ends a running staging verb of this update first. `previous` survives if nothing was staged over it."""
        state = self._state
        self.cancel(request.serial)
        with state.quiet():
            if state.install is not None and state.install.serial == request.serial:
                raise wrong_phase("this update is installed: restore first")
            state.discarded = request.serial
            if state.plan is not None and state.plan.request.serial == request.serial:
                state.drop_plan()
            spare = state.spare
            if spare.serial == request.serial and spare.state in (SpareState.STAGING, SpareState.STAGED):
                state.empty_spare()
            if state.voted is not None and state.voted[0] == request.serial:
                state.voted = None
        return RankDone()

    def status(self, request: RankStatus) -> RankStatusReply:
        spare = self._state.spare
        return RankStatusReply(
            live_version=self._state.label[0],
            spare_state=spare.state.value,
            spare_serial=spare.serial,
            spare_version=spare.version,
            paused=self._state.point is not None,
            spare_bytes=spare.nbytes,
        )
