"""The coordinator as a named Ray actor: the same coordinator, routes and journal as behind HTTP. A composition root.

Verbs take and answer JSON-ready values: `{"status": 200, "body": {...}}`, where every other status comes with a problem
document. A `trainer_side.Client` of the actor's address turns those into typed errors. What has to be quick has a
concurrency group of its own, so that clients that wait for receipts cannot starve it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any
from urllib.parse import quote, urlencode

import ray

from updater.coordinator.coordinator import Coordinator
from updater.coordinator.journal.state_folder import StateFolder
from updater.core.errors import Failure, refuse
from updater.protocol.events import EventParser
from updater.ray import local_app
from updater.ray.calls import COORDINATOR, NAMESPACE, Address, Handle
from updater.ray.local_app import LoopThread
from updater.ray.participant import participants
from updater.server.routes import create_app
from updater.settings import STATE_ENV, Settings

CONTROL, PATIENT = "control", "patient"
#: Calls at once: those that answer at once, and those that wait for an update to end.
GROUPS: dict[str, Any] = {"concurrency_groups": {CONTROL: 64, PATIENT: 1000}}
#: Between the end of a coordinator and that of its actor.
LAST_ANSWERS_S = 1.0
_log = logging.getLogger("liveweights.coordinator")

Reply = dict[str, Any]


class CoordinatorActor:
    """One life of a coordinator. Its journal's folder must be the same one after a restart, also on another node.

    Started, `__init__` has taken the fleet over and recovered; it raises JournalFailed if the folder cannot be used.
    A coordinator that has to stop by itself (its journal fails, or another one has taken the fleet over) ends its
    actor for good: Ray restarts what crashed, never what gave up.
    """

    def __init__(self, settings: Settings, address: str, take_over: bool = False) -> None:
        self._address, self._ending = address, False
        # Ray begins the next life of one actor only when the one before is given up: what it left may be frozen.
        again = ray.get_runtime_context().was_current_actor_reconstructed
        self._folder = StateFolder.open(settings, take_over=take_over or again)
        self._me = ray.get_runtime_context().current_actor
        self._loop = LoopThread("coordinator")
        self._coordinator = self._loop.submit(self._begin(settings)).result()
        self._app = local_app.LocalApp(create_app(self._coordinator), self._loop, settings.tokens.admin)

    async def _begin(self, settings: Settings) -> Coordinator:
        coordinator = Coordinator(settings, participants(settings), on_stop=self._stopped)
        await coordinator.start()
        _log.info("coordinator of fleet %r as %s", settings.fleet, self._address)
        return coordinator

    def _stopped(self, failure: Failure) -> None:
        if not self._ending:
            _log.error("the coordinator stops: %s", failure.message)
            # Those who wait are told first.
            asyncio.get_running_loop().call_later(LAST_ANSWERS_S, ray.kill, self._me)

    # -- the app, whole: what `ActorTransport` carries a client's requests to

    @ray.method(concurrency_group=CONTROL)
    async def request(self, method: str, target: str, text: str = "") -> dict[str, Any]:
        """Any route that answers at once: `{"status", "text"}`."""
        return await self._app.ask(method, target, text)

    @ray.method(concurrency_group=PATIENT)
    async def patient(self, method: str, target: str, text: str = "") -> dict[str, Any]:
        """Any route, as `request`, where the answer may take as long as an update."""
        return await self._app.ask(method, target, text)

    @ray.method(concurrency_group=PATIENT, max_task_retries=0)
    async def stream(self, method: str, target: str, text: str = "") -> AsyncIterator[int | str]:
        """The status, then the body in pieces of text."""
        async with aclosing(self._app.stream(method, target, text)) as pieces:
            async for piece in pieces:
                yield piece

    # -- updates

    @ray.method(concurrency_group=CONTROL)
    async def begin(self, body: Mapping[str, Any]) -> Reply:
        """`POST /v1/updates`: 202 with the state."""
        return await self._app.verb("POST", "/v1/updates", body)

    @ray.method(concurrency_group=PATIENT)
    async def update(self, body: Mapping[str, Any]) -> Reply:
        """The same, and wait: 200 with the receipt of a committed one. With an `id` in it, asking again is safe."""
        return await self._app.verb("POST", "/v1/updates?wait=true", body)

    @ray.method(concurrency_group=PATIENT)
    async def rollback(self, body: Mapping[str, Any]) -> Reply:
        """`{"target", "expected_live"}`, and wait."""
        return await self._app.verb("POST", "/v1/rollback?wait=true", body)

    @ray.method(concurrency_group=CONTROL)
    async def state(self, update: str) -> Reply:
        return await self._app.verb("GET", _update(update))

    @ray.method(concurrency_group=CONTROL)
    async def renew(self, update: str) -> Reply:
        return await self._app.verb("POST", f"{_update(update)}/renew")

    @ray.method(concurrency_group=CONTROL)
    async def seal(self, update: str, digests: Mapping[str, str] | None = None) -> Reply:
        return await self._app.verb("POST", f"{_update(update)}/seal", {"digests": dict(digests or {})})

    @ray.method(concurrency_group=CONTROL)
    async def commit(self, update: str) -> Reply:
        return await self._app.verb("POST", f"{_update(update)}/commit")

    @ray.method(concurrency_group=CONTROL)
    async def abort(self, update: str) -> Reply:
        return await self._app.verb("POST", f"{_update(update)}/abort")

    @ray.method(concurrency_group=PATIENT, max_task_retries=0)
    async def events(self, update: str) -> AsyncIterator[dict[str, Any]]:
        """`{"event", "data"}`: the state now, every change, the receipt. For an unknown update one `problem`."""
        async with aclosing(self._app.stream("GET", f"{_update(update)}/events")) as pieces:
            status, parser = await anext(pieces), EventParser()
            async for piece in pieces:  # whole events, or the whole problem
                if status != 200:
                    yield {"event": "problem", "data": json.loads(str(piece))}
                    continue
                for event in filter(None, map(parser.feed, str(piece).splitlines())):
                    yield {"event": event[0], "data": event[1]}

    # -- fleet

    @ray.method(concurrency_group=CONTROL)
    async def version(self) -> Reply:
        return await self._app.verb("GET", "/v1/version")

    @ray.method(concurrency_group=CONTROL)
    async def fleet(self) -> Reply:
        return await self._app.verb("GET", "/v1/fleet")

    @ray.method(concurrency_group=CONTROL)
    async def history(self, limit: int = 100) -> Reply:
        return await self._app.verb("GET", f"/v1/history?limit={limit}")

    @ray.method(concurrency_group=PATIENT)
    async def join(self, replica: str, url: str) -> Reply:
        return await self._app.verb("POST", "/v1/fleet/replicas", {"replica": replica, "url": url})

    @ray.method(concurrency_group=CONTROL)
    async def remove(self, replica: str, confirm_dead: bool = False) -> Reply:
        """An operator's word; `confirm_dead` for a member that cannot answer any more."""
        query = urlencode({"confirm_dead": str(confirm_dead).lower()})
        return await self._app.verb("DELETE", f"/v1/fleet/replicas/{quote(replica, safe='')}?{query}")

    @ray.method(concurrency_group=PATIENT)
    async def adopt(self, members: Sequence[Mapping[str, str]]) -> Reply:
        """`[{"replica", "url"}]`: take over a fleet with history under an empty journal."""
        body = {"members": [dict(member) for member in members], "confirm": True}
        return await self._app.verb("POST", "/v1/fleet/adopt", body)

    # -- life

    @ray.method(concurrency_group=CONTROL)
    async def address(self) -> str:
        """Where this actor is found by name."""
        return self._address

    @ray.method(concurrency_group=CONTROL)
    async def pid(self) -> int:
        return os.getpid()

    @ray.method(concurrency_group=CONTROL)
    async def stop(self) -> None:
        """Abort what is undecided, finish what is decided, close the journal. Then the actor may be killed."""
        self._ending = True
        await self._loop.run(self._coordinator.close())
        self._folder.close()


def start_coordinator(
    settings: Settings,
    *,
    name: str = COORDINATOR,
    namespace: str = NAMESPACE,
    max_restarts: int = -1,
    take_over: bool = False,
    **options: Any,
) -> Handle:
    """The handle of a new named actor. `settings.state`: the journal's folder, on a disk that outlives the process
    and that every node which may run the actor sees; there is no default. Raises `state_not_shared` without it.
    `take_over`: also if a living coordinator has the folder; that one stops.

    `options`: Ray's own for an actor: `resources`, `scheduling_strategy`, `lifetime="detached"`. Calls that a crash
    interrupts are sent again by Ray to the restarted actor: every verb may be repeated (I7). A stream of events is
    not: half of one life and half of the next make no sense, and its reader asks for another. Raises ValueError if the
    name is taken.
    """
    settings = _checked(settings)
    actor = ray.remote(**GROUPS)(CoordinatorActor).options(
        name=name,
        namespace=namespace,
        max_restarts=max_restarts,
        max_task_retries=-1,
        **{"num_cpus": 0, **options},
    )
    return actor.remote(settings, str(Address(name, namespace)), take_over)


def _checked(settings: Settings) -> Settings:
    """With a folder that is the same one wherever Ray starts the actor."""
    folder = settings.state_folder
    if not settings.state_given or not folder.is_absolute():
        raise refuse(
            "state_not_shared",
            f"the state folder {folder} is another one on every node and for every user",
            hint=f"give Settings(state=...) or {STATE_ENV} an absolute folder on a disk that all nodes share",
        )
    return replace(settings, state=folder)


def stop_coordinator(coordinator: Handle, timeout_s: float = 60.0) -> None:
    """In order, and for good."""
    ray.get(coordinator.stop.remote(), timeout=timeout_s)
    ray.kill(coordinator)


def _update(update: str) -> str:
    return f"/v1/updates/{quote(update, safe='')}"
