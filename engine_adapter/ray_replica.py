"""A replica as a Ray actor: its process is the front, and starts the ranks as children. One actor, one replica.

The participant contract's verbs are actor methods in a concurrency group of their own: whatever waits for tokens, a
`pause` gets through. The HTTP face of the replica is up as well, on the host and port of its settings.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import ray

from engine_adapter.replica.launch import FrontSettings, Replica
from engine_adapter.replica.lifecycle import Membership
from updater.core.errors import Failure, Unavailable, refuse
from updater.core.participant import MESSAGES, FrontState
from updater.protocol.problems import problem_body
from updater.ray import local_app
from updater.ray.calls import NAMESPACE, Address, AsyncActorTransport, Handle, address_of
from updater.ray.local_app import LoopThread

CONTROL, GENERATE = "control", "generate"
CONTROL_CALLS = 32
#: As many as may wait at a shut gate (`admission.Limits`): the rest waits in Ray, and none is refused.
GENERATE_CALLS = 256
#: How long a replica that only a restart can help is left for the fleet and its callers to hear why.
BROKEN_S = 10.0
_LOOK_EVERY_S = 1.0
_log = logging.getLogger("liveweights.front")

Reply = dict[str, Any]


class _Hosted(Replica):
    """A replica that its coordinator reaches as an actor, and that reaches its coordinator as one. Under a coordinator
    that is a server, or none, it is like any other replica."""

    def __init__(self, wanted: FrontSettings, address: Address) -> None:
        self._address = address
        super().__init__(wanted)

    @property
    def url(self) -> str:
        return str(self._address) if self.settings.coordinator.startswith("ray://") else super().url

    def _membership(self) -> Membership:
        coordinator = self.settings.coordinator
        if not coordinator.startswith("ray://"):
            return super()._membership()
        transport = AsyncActorTransport(Address.parse(coordinator))
        return replace(super()._membership(), coordinator="http://coordinator", token="", transport=transport)


class ReplicaActor:
    """One life of a replica. Started, it loads in the background; `ready` waits until it serves.

    Settings are all that it is made of: small, and the same for its next life (B181). After a restart it is another
    incarnation: shut until it has caught up, or has taken part in the next update.
    """

    def __init__(self, settings: FrontSettings, address: str, broken_s: float = BROKEN_S) -> None:
        self._address, self._loop = address, LoopThread("front")
        self._replica, self._stop, self._life = self._loop.submit(_begin(settings, Address.parse(address))).result()
        self._face = local_app.LocalApp(self._replica.server.config.app, self._loop, settings.tokens.admin)  # type: ignore[arg-type]
        self._watch = self._loop.submit(self._end_when_over(broken_s))

    async def _end_when_over(self, broken_s: float) -> None:
        """Ray restarts a process that ended; of one that is only shut it knows nothing."""
        while not (self._life.done() or _broken(self._replica)):
            await asyncio.wait({self._life}, timeout=_LOOK_EVERY_S)
        if not self._stop.is_set():
            _log.error("%s is broken: its actor ends", self._replica.name)
            await asyncio.sleep(broken_s)
            os._exit(1)

    # -- control

    @ray.method(concurrency_group=CONTROL)
    async def participant(self, verb: str, text: str) -> dict[str, Any]:
        """One verb of the contract, its message as JSON: `{"status", "text"}`."""
        return await self._face.ask("POST", f"/participant/v1/{verb}", text)

    @ray.method(concurrency_group=CONTROL)
    async def request(self, method: str, target: str, text: str = "") -> dict[str, Any]:
        """Any other route of the replica, as `{"status", "text"}`. Completions have methods of their own."""
        if target.startswith("/v1/completions"):
            error = refuse("bad_request", "completions are asked for by `completions` or `stream`")
            return {"status": error.status, "text": json.dumps(problem_body(error))}
        return await self._face.ask(method, target, text)

    # -- about it: any number of callers may wait here, so these take no room from control

    async def ready(self) -> Reply:
        """When it serves: its version. Or why it never will."""
        joined = self._loop.run(_either(self._replica.joined, self._life))
        await joined
        if self._replica.joined.is_set():
            return await self._face.verb("GET", "/v1/version")
        error = Unavailable(self._replica.face.failure or Failure("shut", "it ended", replica=self._replica.name))
        return {"status": error.status, "body": problem_body(error)}

    async def version(self) -> Reply:
        return await self._face.verb("GET", "/v1/version")

    async def address(self) -> str:
        """Where this actor is found by name."""
        return self._address

    async def processes(self) -> dict[str, Any]:
        """Process ids of the front and its ranks, the node they are on, and the port of the HTTP face."""
        node = ray.get_runtime_context().get_node_id()
        return {"front": os.getpid(), "ranks": list(self._replica.pool.pids), "node": node, "port": self._replica.port}

    @ray.method(concurrency_group=CONTROL)
    async def stop(self) -> None:
        """Leave the fleet and end the ranks. Then the actor may be killed."""
        self._loop.call(self._stop.set)
        await self._loop.run(_ended(self._life))

    # -- generation

    @ray.method(concurrency_group=GENERATE)
    async def completions(self, body: Mapping[str, Any]) -> Reply:
        """`POST /v1/completions`, not streamed."""
        return await self._face.verb("POST", "/v1/completions", {**body, "stream": False})

    @ray.method(concurrency_group=GENERATE)
    async def generate(self, prompt: str | Sequence[int], max_tokens: int = 16, **more: Any) -> Reply:
        """The same, with the members of the body as arguments."""
        prompt = prompt if isinstance(prompt, str) else list(prompt)
        return await self._face.verb("POST", "/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, **more})

    @ray.method(concurrency_group=GENERATE)
    async def stream(self, method: str, target: str, text: str = "") -> AsyncIterator[int | str]:
        """Any route as a stream: the status, then text as it is made; completions as server-sent events."""
        async with aclosing(self._face.stream(method, target, text)) as pieces:
            async for piece in pieces:
                yield piece


def _verb(name: str) -> Callable[..., Coroutine[Any, Any, Reply]]:
    async def call(self: ReplicaActor, message: Mapping[str, Any] | None = None) -> Reply:
        return await self._face.verb("POST", f"/participant/v1/{name}", dict(message or {}))

    call.__name__, call.__qualname__ = name, f"ReplicaActor.{name}"
    call.__doc__ = f"`{name}` of the participant contract, its message and its answer as JSON-ready values."
    method: Callable[..., Coroutine[Any, Any, Reply]] = ray.method(concurrency_group=CONTROL)(call)
    return method


for _name in MESSAGES:
    setattr(ReplicaActor, _name, _verb(_name))


async def _begin(settings: FrontSettings, address: Address) -> tuple[Replica, asyncio.Event, asyncio.Task[int]]:
    replica, stop = _Hosted(settings, address), asyncio.Event()
    return replica, stop, asyncio.get_running_loop().create_task(replica.run(stop))


async def _either(joined: asyncio.Event, life: asyncio.Task[int]) -> None:
    waiting = asyncio.ensure_future(joined.wait())
    try:
        await asyncio.wait({waiting, life}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


async def _ended(life: asyncio.Task[int]) -> None:
    await asyncio.wait({life})


def _broken(replica: Replica) -> bool:
    return replica.face.front is not None and replica.face.front.state.state is FrontState.BROKEN


def start_replica(
    settings: FrontSettings,
    *,
    coordinator: str | Handle = "",
    namespace: str = NAMESPACE,
    max_restarts: int = -1,
    generate_calls: int = GENERATE_CALLS,
    broken_s: float = BROKEN_S,
    **options: Any,
) -> Handle:
    """The handle of a new actor named `settings.replica`, which joins `coordinator` (handle, name or address).

    `options`: Ray's own for an actor: `num_gpus`, `resources`, `scheduling_strategy`. Ranks inherit the devices that
    the actor was given. `broken_s`: after a rank died, or the start failed, the actor's process ends, so that Ray
    restarts it. Raises ValueError without a name, or if it is taken.
    """
    if not settings.replica:
        raise ValueError("a replica that is an actor needs a name")
    if coordinator:
        settings = replace(settings, coordinator=str(address_of(coordinator, namespace)))
    groups: dict[str, Any] = {"concurrency_groups": {CONTROL: CONTROL_CALLS, GENERATE: generate_calls}}
    actor = ray.remote(**groups)(ReplicaActor).options(
        name=settings.replica,
        namespace=namespace,
        max_restarts=max_restarts,
        max_task_retries=0,  # what was for one life is not for the next: the coordinator itself says it again
        **{"num_cpus": settings.tp, **options},
    )
    return actor.remote(settings, str(Address(settings.replica, namespace)), broken_s)


def stop_replica(replica: Handle, timeout_s: float = 60.0) -> None:
    """In order: it leaves its fleet, and no rank is left. For good."""
    ray.get(replica.stop.remote(), timeout=timeout_s)
    ray.kill(replica)
