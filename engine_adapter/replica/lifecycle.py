"""One life of a front: its start checkpoint is proved, its coordinator admits it, it looks whether it still is the
member, asks again after a readmission, and leaves.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from engine_adapter.replica.admission import AdmissionController
from engine_adapter.replica.app import ReplicaApp
from engine_adapter.replica.fleet_client import FleetClient
from engine_adapter.replica.front import Front, Identity
from engine_adapter.replica.interfaces import RankVerbs
from updater.core.errors import Failure, LiveweightsError
from updater.core.participant import Claim, Fence, FenceRequest, FrontState, JoinRequest
from updater.core.replica.state import started
from updater.core.version import START

_log = logging.getLogger("liveweights.front")
STANDALONE = "standalone"


@dataclass(frozen=True, slots=True)
class Membership:
    """Who this replica is. `coordinator` empty: it opens by itself and no publication can reach it.

    `url`: where the coordinator finds the participant contract. `watch_s`: how often it asks whether it is still the
    member under its id. `transport`: how the coordinator is reached, if not over sockets.
    """

    name: str
    url: str
    model: str
    coordinator: str = ""
    token: str = ""
    watch_s: float = 3.0
    transport: httpx.AsyncBaseTransport | None = None


class ReplicaLifecycle:
    """For one event loop. `clock`: what leases run on, monotonic seconds."""

    def __init__(
        self,
        membership: Membership,
        work: RankVerbs,
        gate: AdmissionController,
        face: ReplicaApp,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._membership = membership
        self._work, self._gate, self._face = work, gate, face
        self._clock = clock
        self._first_incarnation = secrets.token_hex(8)
        self._rejoining: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._fleet = self._client()
        self.joined = asyncio.Event()

    @property
    def incarnation(self) -> str:
        front = self._face.front
        return front.state.incarnation if front is not None else self._first_incarnation

    def _client(self) -> FleetClient | None:
        mine = self._membership
        if not mine.coordinator:
            return None
        return FleetClient(mine.coordinator, mine.name, mine.url, lambda: self.incarnation, mine.token, mine.transport)

    async def start_and_join(self) -> bool:
        """The ranks are there. False: this replica cannot serve, and why was logged."""
        try:
            front = await self._start_front()
            if self._fleet is None:
                await self._open_alone(front)
        except LiveweightsError as error:
            self.refuse(error)
            return False
        fleet = self._fleet
        if fleet is not None:
            self._face.obstacle = lambda: fleet.obstacle
            await fleet.register(front.reopened)
            self._watching = asyncio.create_task(self._watch(fleet, front))
        self.joined.set()
        return True

    def refuse(self, error: LiveweightsError) -> None:
        """It never comes so far as to have a front. Requests hear so at once: no wait would help them."""
        self._face.failure = error.failures[0]
        self._gate.break_down(error.failures[0])
        _log.error("the replica cannot start: %s", error)

    def keep_asking(self) -> None:
        """It was refused, and its server stays up: the coordinator asks it in its turn who it is, hears why it cannot
        start, and can say so to people who look at the fleet.
        """
        if self._fleet is not None and self._watching is None:
            self._watching = asyncio.create_task(self._fleet.register(asyncio.Event()))

    async def _start_front(self) -> Front:
        digest = await self._work.replay_start()
        mine, hellos = self._membership, self._work.hellos
        state = started(mine.name, self._first_incarnation, str(START), digest, len(hellos))
        identity = Identity(mine.url, mine.model, hellos)
        front = Front(state, identity, self._work, self._gate, self._clock, self._rejoin)
        self._face.front = front
        gc.freeze()  # what start left behind stays: no collection within a pause looks through it
        _log.info("%s: on the start checkpoint, digest %s", mine.name, digest[:16])
        return front

    async def _watch(self, fleet: FleetClient, front: Front) -> None:
        """Ask for ever whether it is still a member (I11). Told that it was removed, it is shut; told so once more it
        proves its bytes and joins again, as another incarnation of the same process.
        """
        while True:
            await asyncio.sleep(self._membership.watch_s)
            state = front.state
            if state.state in (FrontState.JOINING, FrontState.BROKEN):
                continue
            claimed = await fleet.claim(front.status())
            if claimed is None or front.state.incarnation != state.incarnation:
                continue
            front.told(claimed, state.incarnation)
            gone = claimed.claim is Claim.REMOVED and claimed.fleet == state.fleet and claimed.epoch >= state.epoch
            if gone and state.state is FrontState.ORPHANED is front.state.state:
                await self._return(front)

    async def _return(self, front: Front) -> None:
        try:
            await front.readmit()
        except LiveweightsError as error:
            _log.error("the orphaned replica cannot prove what it holds: %s", error)

    async def _open_alone(self, front: Front) -> None:
        state = front.state
        fence = state.last_heard() if state.fleet else Fence(STANDALONE, 1, 0, 0, state.incarnation)
        await front.ask("lead", FenceRequest(fence))
        await front.ask("join", JoinRequest(fence, state.live.version, state.live.digest))

    def _rejoin(self) -> None:
        """An operator had the quarantine lifted: asks to be admitted like any joiner."""
        if self._rejoining is not None:
            self._rejoining.cancel()
        self._rejoining = asyncio.get_running_loop().create_task(self._ask_again())

    async def _ask_again(self) -> None:
        front = self._face.front
        if front is None:
            return
        if self._fleet is not None:
            await self._fleet.register(front.reopened)
            return
        try:
            await self._open_alone(front)
        except LiveweightsError as error:
            _log.error("the readmitted replica did not open: %s", error)

    def rank_died(self, failure: Failure) -> None:
        """Whenever it is: while it starts, there is no front that could be told."""
        front = self._face.front
        if front is not None:
            front.rank_died(failure)
        else:
            self._face.failure = failure
            self._gate.break_down(failure)

    async def stop(self, deadline_s: float) -> None:
        """Shut for good, and say so to the coordinator within the deadline."""
        ending: list[asyncio.Task[Any]] = [t for t in (self._rejoining, self._watching) if t is not None]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        if self._face.front is not None:
            await self._face.front.stop()
        if self._fleet is not None:
            await self._fleet.leave(deadline_s)
            await self._fleet.close()
