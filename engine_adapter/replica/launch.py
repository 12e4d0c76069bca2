"""One replica from start to end: `liveweights engine`. A composition root.

The HTTP face comes up first (shut), then the ranks load, then the start checkpoint is replayed and proved, then the
front asks its coordinator to admit it. SIGTERM and Ctrl-C undo all of it and leave no process behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from engine_adapter.base import GenerateRequest, TokenEvent
from engine_adapter.rank.control_messages import CancelRequest
from engine_adapter.replica.admission import Gate, Limits
from engine_adapter.replica.app import ReplicaFace, make_app
from engine_adapter.replica.fleet_client import FleetClient
from engine_adapter.replica.front import Front, Identity
from engine_adapter.replica.rank_work import Deadlines, RankWork
from engine_adapter.replica.ranks import PoolSettings, RankPool
from engine_adapter.replica.tokens import ModelText
from updater.core.errors import Failure, LiveweightsError
from updater.core.participant import Fence, JoinRequest
from updater.core.replica_state import RankDied, started
from updater.core.version import START
from updater.security import Tokens, check_bind

_log = logging.getLogger("liveweights.front")

#: `--engine` names; anything with a colon is a factory of somebody else's, `package.module:function`.
ENGINES = {
    "transformers": "engine_adapter.transformers.engine:build",
    "toy": "engine_adapter.testing:build_toy",
}
STANDALONE = "standalone"


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """What one replica is started with. `roots`: folders that sources may lie under, beside the model's own.

    `coordinator` empty: the replica opens by itself and no publication can reach it. `port` 0: any free one.
    `watch_s`: how often it asks whether it is still the member under its id.
    """

    model: Path
    tp: int = 1
    host: str = "127.0.0.1"
    port: int = 8800
    coordinator: str = ""
    replica: str = ""
    roots: tuple[Path, ...] = ()
    factory: str = ENGINES["transformers"]
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    tokens: Tokens = field(default_factory=Tokens)
    limits: Limits = field(default_factory=Limits)
    deadlines: Deadlines = field(default_factory=Deadlines)
    start_s: float = 300.0
    stop_s: float = 10.0
    watch_s: float = 3.0
    logs: Path | None = None

    def __post_init__(self) -> None:
        check_bind(self.host, self.tokens)


def settings(
    *,
    model: Path,
    tp: int = 1,
    host: str = "127.0.0.1",
    port: int = 8800,
    coordinator: str = "",
    replica: str = "",
    roots: tuple[Path, ...] = (),
    engine: str = "transformers",
    options: Mapping[str, str | int | float | bool] | None = None,
) -> FrontSettings:
    """From the command line; tokens from the environment. Raises LiveweightsError for an engine nobody knows."""
    factory = ENGINES.get(engine, engine if ":" in engine else "")
    if not factory:
        raise LiveweightsError(Failure("bad_request", f"no engine {engine!r}; known: {', '.join(sorted(ENGINES))}"))
    return FrontSettings(
        model=model,
        tp=tp,
        host=host,
        port=port,
        coordinator=coordinator,
        replica=replica,
        roots=roots,
        factory=factory,
        options=dict(options or {}),
        tokens=Tokens.from_env(),
    )


def run_engine(wanted: FrontSettings) -> int:
    """Runs until SIGTERM or Ctrl-C. Returns 0 after a clean stop, 1 if the replica could not start."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)

    async def run() -> int:
        replica = Replica(wanted)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        return await replica.run(stop)

    return asyncio.run(run())


class _Server(uvicorn.Server):
    """Signals are the replica's: the order of stopping matters."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _PoolEngine:
    """The gate's view of the ranks."""

    def __init__(self, pool: RankPool) -> None:
        self._pool = pool

    def submit(self, request: GenerateRequest) -> asyncio.Future[Any]:
        return self._pool.tell_first("submit", request)

    def cancel(self, request_id: str) -> None:
        self._pool.tell_first("cancel_request", CancelRequest(request_id)).add_done_callback(_seen)


def _seen(done: asyncio.Future[Any]) -> None:
    """Whether a cancelled request ended comes as an event; a rank that died ends everything anyhow."""
    if not done.cancelled():
        done.exception()


class Replica:
    """One life of a front and its ranks, for one event loop. `clock`: what its leases run on, monotonic seconds."""

    def __init__(self, wanted: FrontSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = wanted
        self._clock = clock
        self._first_incarnation = secrets.token_hex(8)
        self._client: FleetClient | None = None
        self._rejoining: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._socket = socket.create_server((wanted.host, wanted.port))
        # What it accepts inherits this; asyncio sets it only where the protocol number was given.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port: int = self._socket.getsockname()[1]
        self.name = wanted.replica or f"{wanted.host}-{self.port}"
        model = str(wanted.model.resolve())
        self.pool = RankPool(
            PoolSettings(wanted.factory, model, wanted.tp, wanted.options, wanted.logs, wanted.start_s),
            on_tokens=self._on_tokens,
            on_death=self._on_death,
            on_staged=lambda rank, staged: self.work.on_staged(rank, staged),
        )
        self.gate = Gate(_PoolEngine(self.pool), wanted.limits)
        roots = tuple(str(root.resolve()) for root in wanted.roots)
        self.work = RankWork(self.pool, self.gate, model, roots, wanted.deadlines)
        self.face = ReplicaFace(self.name, self.gate)
        text = ModelText.load(wanted.model, Path(model).name)
        app = make_app(self.face, self.gate, text, wanted.tokens)
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=2)
        self.server = _Server(config)
        self.joined = asyncio.Event()

    @property
    def incarnation(self) -> str:
        front = self.face.front
        return front.state.incarnation if front is not None else self._first_incarnation

    @property
    def url(self) -> str:
        return f"http://{self.settings.host}:{self.port}"

    async def run(self, stop: asyncio.Event) -> int:
        """Serve until `stop` is set. On return no process and no socket of this replica is left."""
        serving = asyncio.create_task(self.server.serve(sockets=[self._socket]))
        fleet = self._client = self._fleet()
        joining = asyncio.create_task(self._start_and_join(fleet))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({joining, stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
            if joining.done() and joining.result():
                await asyncio.wait({stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
            clean = stopping.done()
        finally:
            await self._stop(joining, stopping, serving, fleet)
        return 0 if clean else 1

    def _fleet(self) -> FleetClient | None:
        wanted = self.settings
        if not wanted.coordinator:
            return None
        return FleetClient(wanted.coordinator, self.name, self.url, lambda: self.incarnation, wanted.tokens.admin)

    async def _start_and_join(self, fleet: FleetClient | None) -> bool:
        """False: this replica cannot serve, and why was logged."""
        try:
            front = await self._start_front()
            if fleet is None:
                await self._open_alone(front)
        except LiveweightsError as error:
            self.face.failure = error.failures[0]
            _log.error("the replica cannot start: %s", error)
            return False
        if fleet is not None:
            await fleet.register(front.reopened)
            self._watching = asyncio.create_task(self._watch(fleet, front))
        self.joined.set()
        return True

    async def _watch(self, fleet: FleetClient, front: Front) -> None:
        """Another process is the member now: nothing here may be served any more, and only a restart helps."""
        failure = await fleet.watch(self.settings.watch_s, front.reopened)
        front.feed(RankDied(failure))

    async def _start_front(self) -> Front:
        hellos = await self.pool.start()
        _log.info("%s: %d ranks loaded %s", self.name, len(hellos), self.settings.model)
        digest = await self.work.replay_start()
        identity = Identity(self.url, str(self.settings.model), hellos)
        state = started(self.name, self._first_incarnation, str(START), digest, len(self.pool.hellos))
        front = Front(state, identity, self.work, self.gate, self._clock, self._rejoin)
        self.face.front = front
        gc.freeze()  # what start left behind stays: no collection within a pause looks through it
        _log.info("%s: start checkpoint proved, digest %s", self.name, digest[:16])
        return front

    async def _open_alone(self, front: Front) -> None:
        state = front.state
        fence = Fence(state.fleet or STANDALONE, *(state.mark if state.fleet else (1, 0, 0)), state.incarnation)
        await front.ask("join", JoinRequest(fence, state.live.version, state.live.digest))

    def _rejoin(self) -> None:
        """An operator had the quarantine lifted: asks to be admitted like any joiner."""
        if self._rejoining is not None:
            self._rejoining.cancel()
        self._rejoining = asyncio.get_running_loop().create_task(self._ask_again())

    async def _ask_again(self) -> None:
        front = self.face.front
        if front is None:
            return
        if self._client is not None:
            await self._client.register(front.reopened)
            return
        try:
            await self._open_alone(front)
        except LiveweightsError as error:
            _log.error("the readmitted replica did not open: %s", error)

    async def _stop(
        self,
        joining: asyncio.Task[bool],
        stopping: asyncio.Task[bool],
        serving: asyncio.Task[None],
        fleet: FleetClient | None,
    ) -> None:
        ending: list[asyncio.Task[Any]] = [joining, stopping]
        ending += [task for task in (self._rejoining, self._watching) if task is not None]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        if self.face.front is not None:
            await self.face.front.stop()
        if fleet is not None:
            await fleet.leave(self.settings.stop_s)
            await fleet.close()
        await self.pool.stop(self.settings.stop_s)
        self.server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        self._socket.close()

    def _on_tokens(self, event: TokenEvent) -> None:
        self.gate.on_tokens(event)

    def _on_death(self, failure: Failure) -> None:
        front = self.face.front
        if front is not None:
            front.rank_died(failure)
        else:
            self.face.failure = failure
            self.gate.break_down(failure)
