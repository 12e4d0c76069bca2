"""A fleet for cases: coordinator and fronts on one event loop over real HTTP, every rank a process of its own.

The fronts live in this process so that a test can ask each rank for the digest of every parameter it serves; what
clients and the coordinator say to them goes over sockets.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from engine_adapter.rank.messages import RankDigests, RankStatus
from engine_adapter.replica.launch import FrontSettings, Replica
from engine_adapter.testing.fronts import toy_settings
from updater.coordinator.coordinator import Coordinator
from updater.core.participant import FrontStatus
from updater.demo.processes import free_port
from updater.protocol import wire
from updater.server.connections import BoundedServer, listen
from updater.server.routes import create_app
from updater.settings import Deadlines, Settings

PROMPT = [5, 6, 7, 8, 9, 10]
TOKENS = 6
HANG_S = 240.0  # only a hang reaches it


@dataclass(frozen=True)
class RankView:
    """What one rank holds beside the engine itself. `files`: regular files of the fleet's folder that are open."""

    spare_bytes: int
    paused: bool
    files: tuple[str, ...]
    descriptors: int
    threads: int


@dataclass(frozen=True)
class View:
    """What REFUSED compares: label, bytes of every rank, greedy output, admission, what is held."""

    version: Mapping[str, Any]
    fronts: Mapping[str, tuple[str, str, str]]  # state, live version, live digest
    digests: Mapping[str, list[dict[str, str]]]
    answers: Mapping[str, tuple[int, list[int], str]]  # status, tokens, version
    ready: Mapping[str, int]
    held: Mapping[str, list[RankView]]


class LiveFleet:
    """`replicas`: the fronts in this process, by name. Every method may be called from the test's thread only."""

    def __init__(self, home: Path, status_s: float = 10.0) -> None:
        self.home = home
        self._status_s = status_s
        self.replicas: dict[str, Replica] = {}
        self._lives: dict[str, tuple[asyncio.Event, asyncio.Task[int]]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="live-fleet", daemon=True)
        self._thread.start()
        self._end = asyncio.Event()
        self.url = ""
        self.client = httpx.Client(timeout=HANG_S, trust_env=False)
        self._serving = asyncio.run_coroutine_threadsafe(self._serve(), self._loop)

    # ----- life

    async def _serve(self) -> None:
        deadlines = Deadlines(
            probe_every_s=0.2, status_s=self._status_s, lost_after=2, retry_first_s=0.02, shutdown_s=10.0
        )
        settings = Settings(state=self.home / "state", port=0, roots=(self.home,), deadlines=deadlines, new_fleet=True)
        with listen(settings.host, settings.port) as listener:
            coordinator = Coordinator(settings)
            server = BoundedServer(create_app(coordinator), end_s=5)
            await coordinator.start()
            try:
                self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                running = asyncio.create_task(server.serve(sockets=[listener]))
                await self._end.wait()
                server.should_exit = True
                await running
            finally:
                await coordinator.close()

    def run(self, work: Awaitable[Any]) -> Any:
        """The result of something that belongs on the fleet's loop."""

        async def main() -> Any:
            async with asyncio.timeout(HANG_S):
                return await work

        return asyncio.run_coroutine_threadsafe(main(), self._loop).result()

    def begin(self, name: str, model: Path, tp: int = 1, **changes: Any) -> None:
        """Start a replica; `admitted` waits for it."""
        settings = replace(toy_settings(model, tp), coordinator=self.url, replica=name, roots=(self.home,))
        self.run(self._begin(name, replace(settings, logs=self.home / "logs" / name, **changes)))

    async def _begin(self, name: str, settings: FrontSettings) -> None:
        replica, stop = Replica(settings), asyncio.Event()
        self.replicas[name] = replica
        self._lives[name] = stop, asyncio.create_task(replica.run(stop))

    def admitted(self, name: str) -> Replica:
        """Once it serves."""

        async def wait() -> None:
            joined = asyncio.create_task(self.replicas[name].joined.wait())
            await asyncio.wait({joined, self._lives[name][1]}, return_when=asyncio.FIRST_COMPLETED)
            joined.cancel()
            if self._lives[name][1].done():
                raise AssertionError(self.replicas[name].face.failure)

        self.run(wait())
        return self.replicas[name]

    def stop(self, name: str) -> int:
        """As SIGTERM would. Returns the exit status; no rank process is left."""
        replica = self.replicas.pop(name)
        stop, life = self._lives.pop(name)
        self._loop.call_soon_threadsafe(stop.set)
        pids = replica.pool.pids
        status: int = self.run(asyncio.shield(life))
        assert not [pid for pid in pids if psutil.pid_exists(pid)]
        return status

    def close(self) -> None:
        for name in reversed(list(self.replicas)):
            self.stop(name)
        self.client.close()
        self._loop.call_soon_threadsafe(self._end.set)
        self._serving.result(HANG_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(HANG_S)
        self._loop.close()

    # ----- asking

    def get(self, route: str) -> Any:
        answer = self.client.get(f"{self.url}{route}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, route: str, body: Mapping[str, Any] | None = None, wait: bool = False) -> httpx.Response:
        return self.client.post(f"{self.url}{route}", params={"wait": str(wait).lower()}, json=body)

    def push(self, path: Path, step: int, wait: bool = True, **body: Any) -> httpx.Response:
        return self.post("/v1/updates", {"path": str(path), "version": step, **body}, wait)

    def front(self, url: str) -> FrontStatus:
        answer = self.client.post(f"{url}/participant/v1/status", json={})
        assert answer.status_code == 200, answer.text
        return wire.decode(FrontStatus, answer.content)

    def complete(self, url: str, prompt: list[int] = PROMPT, tokens: int = TOKENS, **members: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **members}
        return self.client.post(f"{url}/v1/completions", json=body)

    def digests(self, name: str) -> list[dict[str, str]]:
        """Per rank: parameter -> digest of what is live, freshly computed."""
        replies = self.run(self.replicas[name].pool.call("digests", RankDigests(), deadline_s=HANG_S))
        return [{each.name: each.digest for each in reply.digests} for reply in replies]

    def ranks(self, name: str) -> list[RankView]:
        pool = self.replicas[name].pool
        replies = self.run(pool.call("status", RankStatus(), deadline_s=HANG_S))
        assert {reply.spare_state for reply in replies} <= {"empty", "previous"}
        views = []
        for reply, pid in zip(replies, pool.pids, strict=True):
            process = psutil.Process(pid)
            files = tuple(file.path for file in process.open_files() if not file.path.endswith(".log"))
            views.append(RankView(reply.spare_bytes, reply.paused, files, process.num_fds(), process.num_threads()))
        return views

    def view(self) -> View:
        statuses = {name: self.front(replica.url) for name, replica in self.replicas.items()}
        assert {status.spare.state.value for status in statuses.values()} <= {"empty", "previous"}
        version = self.get("/v1/version")
        version.pop("rollback_to")  # compared apart: a staging that was begun has spent the kept copy
        return View(
            version=version,
            fronts={n: (s.state.value, s.live_version, s.live_digest) for n, s in statuses.items()},
            digests={name: self.digests(name) for name in self.replicas},
            answers={name: self._answer(replica.url) for name, replica in self.replicas.items()},
            ready={n: self.client.get(f"{r.url}/readyz").status_code for n, r in self.replicas.items()},
            held={name: self.ranks(name) for name in self.replicas},
        )

    def _answer(self, url: str) -> tuple[int, list[int], str]:
        answer = self.complete(url)
        told = answer.json()
        if answer.status_code != 200:
            return answer.status_code, [], ""
        return answer.status_code, told["choices"][0]["token_ids"], told["liveweights"]["version"]

    def until(self, reached: Callable[[], bool]) -> None:
        """Asked again and again: each question is a round trip. Raises AssertionError for a hang."""
        end = time.monotonic() + HANG_S
        while not reached():
            assert time.monotonic() < end, "hangs"


@contextmanager
def live_fleet(home: Path, status_s: float = 10.0) -> Iterator[LiveFleet]:
    """`status_s`: how long the coordinator listens for a status: short where somebody stands still on purpose."""
    fleet = LiveFleet(home, status_s)
    try:
        fleet.until(lambda: bool(fleet.url) or fleet._serving.done())
        yield fleet
    finally:
        fleet.close()


__all__ = ["HANG_S", "PROMPT", "TOKENS", "LiveFleet", "View", "free_port", "live_fleet"]
