"""One replica from start to end: `liveweights engine`. A composition root.

The HTTP face comes up first (shut), then the ranks load, then the start checkpoint is replayed and proved, then the
front asks its coordinator to admit it. SIGTERM and Ctrl-C undo all of it and leave no process behind.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engine_adapter.replica.admission import Gate, Limits
from engine_adapter.replica.app import ReplicaApp, make_app
from engine_adapter.replica.completions import ModelText
from engine_adapter.replica.interfaces import WorkDeadlines
from engine_adapter.replica.lifecycle import Membership, ReplicaLifecycle
from engine_adapter.replica.rank_work import RankWork
from engine_adapter.replica.ranks import PoolSettings, RankPool
from updater.core.errors import Failure, LiveweightsError
from updater.server.connections import BoundedServer, listen
from updater.server.security import Tokens, check_bind

_log = logging.getLogger("liveweights.front")

#: `--engine` names; anything with a colon is a factory of another package, `package.module:function`.
ENGINES = {
    "transformers": "engine_adapter.transformers.engine:build",
    "toy": "engine_adapter.testing:build_toy",
}


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
    deadlines: WorkDeadlines = field(default_factory=WorkDeadlines)
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
    """From the command line; tokens from the environment. Raises LiveweightsError for an engine that is not known."""
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


class Replica:
    """One life of a front and its ranks, for one event loop. `clock`: what its leases run on, monotonic seconds."""

    def __init__(self, wanted: FrontSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = wanted
        self._socket = listen(wanted.host, wanted.port)
        self.port: int = self._socket.getsockname()[1]
        self.name = wanted.replica or f"{wanted.host}-{self.port}"
        model = str(wanted.model.resolve())
        self.pool = RankPool(
            PoolSettings(wanted.factory, model, wanted.tp, wanted.options, wanted.logs, wanted.start_s),
            on_tokens=lambda event: self.gate.on_tokens(event),
            on_death=lambda failure: self.life.rank_died(failure),
            on_staged=lambda rank, staged: self.work.on_staged(rank, staged),
        )
        self.gate = Gate(self.pool, wanted.limits)
        roots = tuple(str(root.resolve()) for root in wanted.roots)
        self.work = RankWork(self.pool, self.gate, model, roots, wanted.deadlines)
        self.face = ReplicaApp(self.name, self.gate)
        self.life = ReplicaLifecycle(self._membership(), self.work, self.gate, self.face, clock)
        text = ModelText.load(wanted.model, Path(model).name)
        app = make_app(self.face, self.gate, text, wanted.tokens, self.url)
        self.server = BoundedServer(app, end_s=2)

    def _membership(self) -> Membership:
        wanted = self.settings
        return Membership(
            self.name, self.url, str(wanted.model), wanted.coordinator, wanted.tokens.admin, wanted.watch_s
        )

    @property
    def joined(self) -> asyncio.Event:
        """Set once it was admitted."""
        return self.life.joined

    @property
    def incarnation(self) -> str:
        return self.life.incarnation

    @property
    def url(self) -> str:
        return f"http://{self.settings.host}:{self.port}"

    async def run(self, stop: asyncio.Event) -> int:
        """Serve until `stop` is set. On return no process and no socket of this replica is left."""
        serving = asyncio.create_task(self.server.serve(sockets=[self._socket]))
        joining = asyncio.create_task(self._start_and_join())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({joining, stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
            if joining.done() and joining.result():
                await asyncio.wait({stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
            clean = stopping.done()
        finally:
            await self._stop(joining, stopping, serving)
        return 0 if clean else 1

    async def _start_and_join(self) -> bool:
        """False: this replica cannot serve, and why was logged."""
        try:
            hellos = await self.pool.start()
        except LiveweightsError as error:
            self.life.refuse(error)
            return False
        _log.info("%s: %d ranks loaded %s", self.name, len(hellos), self.settings.model)
        return await self.life.start_and_join()

    async def _stop(
        self, joining: asyncio.Task[bool], stopping: asyncio.Task[bool], serving: asyncio.Task[None]
    ) -> None:
        for task in (joining, stopping):
            task.cancel()
        await asyncio.gather(joining, stopping, return_exceptions=True)
        await self.life.stop(self.settings.stop_s)
        await self.pool.stop(self.settings.stop_s)
        self.server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        self._socket.close()
