"""A whole coordinator in one event loop: the real one, its HTTP face, and simulated fronts behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from updater.coordinator.clock import Clock
from updater.coordinator.coordinator import Coordinator
from updater.coordinator.journal.journal import Journal
from updater.core.errors import Failure
from updater.server.routes import create_app
from updater.server.security import Tokens
from updater.settings import Deadlines, Settings
from updater.testing.fronts import ManualClock, SimulatedFleet, SimulatedFront, settle

#: Real time may pass while a test's clock stands still, so these are short.
DEADLINES = Deadlines(shutdown_s=1.0, status_s=1.0)


class LocalService:
    """`async with LocalService(tmp_path) as service:`. `clock`: stands still unless `advance`d.

    A second one on the same folder and `fleet` is a restarted coordinator.
    """

    def __init__(
        self,
        folder: Path,
        *,
        fleet: SimulatedFleet | None = None,
        clock: Clock | None = None,
        tokens: Tokens | None = None,
        deadlines: Deadlines = DEADLINES,
        open_journal: Callable[[Path, str], Journal] = Journal,
        name: str = "default",
        **settings: Any,
    ) -> None:
        self.clock = clock or ManualClock()
        self.fleet = fleet or SimulatedFleet(self.clock)
        self.root = folder / "checkpoints"
        self.root.mkdir(parents=True, exist_ok=True)
        self.settings = replace(
            Settings(
                state=folder / "state",
                fleet=name,
                roots=(self.root,),
                tokens=tokens or Tokens(),
                deadlines=deadlines,
                new_fleet=True,
            ),
            **settings,
        )
        self.stopped: list[Failure] = []
        self.coordinator = Coordinator(
            self.settings,
            self.fleet.make,
            self.clock,
            self.stopped.append,
            open_journal(self.settings.state_folder, self.settings.fleet),
        )
        token = self.settings.tokens.admin
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(create_app(self.coordinator), raise_app_exceptions=False),
            base_url="http://127.0.0.1",
            headers={"Authorization": f"Bearer {token}"} if token else {},
        )

    async def __aenter__(self) -> Self:
        await self.coordinator.start()
        await settle()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.http.aclose()
        await self.coordinator.close()

    async def crash(self) -> None:
        """As if the process were killed: nothing more is sent, written or answered."""
        self.coordinator.kill()
        await settle()

    def checkpoint(self, name: str, content: str = "") -> str:
        """A source whose bytes are `content` (default: its name); returns its path. What is there already stays."""
        path, text = self.root / name, content or name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        return str(path)

    async def join(self, *names: str, start: str = "start") -> list[SimulatedFront]:
        """Start fronts and let them join."""
        fronts = [self.fleet.add(name, start) for name in names]
        for front in fronts:
            answer = await self.post("/v1/fleet/replicas", {"replica": front.replica, "url": front.url})
            if answer.status_code != 201:
                raise AssertionError(answer.text)
            await settle()
        return fronts

    async def post(self, path: str, body: Any = None) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def get(self, path: str) -> httpx.Response:
        return await self.http.get(path)

    async def push(self, step: int, content: str = "", **body: Any) -> httpx.Response:
        """Publish a fresh checkpoint as `step` and wait for the end."""
        path = self.checkpoint(f"v{step}", content)
        return await self.post("/v1/updates?wait=true", {"path": path, "version": step, **body})

    async def begin(self, step: int, content: str = "", **body: Any) -> httpx.Response:
        """The same without waiting."""
        path = self.checkpoint(f"v{step}", content)
        answer = await self.post("/v1/updates", {"path": path, "version": step, **body})
        await settle()
        return answer

    async def live(self) -> str | None:
        version: str | None = (await self.get("/v1/version")).json()["version"]
        return version

    async def advance(self, seconds: float) -> None:
        if not isinstance(self.clock, ManualClock):
            raise TypeError("only a manual clock can be advanced")
        await self.clock.advance(seconds)
