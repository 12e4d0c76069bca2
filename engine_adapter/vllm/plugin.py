"""The endpoint plugin: `VLLM_PLUGINS=liveweights vllm serve ...` makes a stock vLLM server a member of a fleet.

A composition root. vLLM calls it twice: `attach_router` while the app is put together, `init_state` when the engine is
there; the life of our front is that of the app.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from argparse import Namespace
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response

from engine_adapter.replica.app import PARTICIPANT_BODY, ReplicaFace
from engine_adapter.replica.life import FrontLife, Membership
from engine_adapter.replica.rank_work import RankWork
from engine_adapter.vllm import settings as settings_of
from engine_adapter.vllm.control import EngineControl
from engine_adapter.vllm.gate import VllmGate
from engine_adapter.vllm.middleware import VersionMiddleware
from engine_adapter.vllm.pool import AttachedPool
from engine_adapter.vllm.private import check_server, model_folder
from updater.core.errors import LiveweightsError
from updater.http import problem
from updater.security import Access

_log = logging.getLogger("liveweights.front")


class LiveweightsPlugin:
    """What the entry point `vllm.endpoint_plugins` resolves to."""

    name = "liveweights"
    required_tasks = None

    def __init__(self) -> None:
        self._replica: VllmReplica | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Routes below /v1/liveweights, `/readyz`, and the middleware around vLLM's own routes."""
        _log_as_vllm_does()
        app.include_router(self._router())
        app.add_middleware(VersionMiddleware, live=self._live, digest_of=self._digest_of)
        inner = app.router.lifespan_context

        @contextlib.asynccontextmanager
        async def lifespan(served: Any) -> AsyncIterator[Any]:
            async with inner(served) as state:
                replica = self._replica
                if replica is not None:
                    replica.begin()
                try:
                    yield state
                finally:
                    if replica is not None:
                        await replica.stop()

        app.router.lifespan_context = lifespan

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """`engine_client`: None on a server without an engine, which is no replica. Raises for a server that cannot be
        one, which then does not start.
        """
        if engine_client is not None:
            self._replica = VllmReplica(engine_client, args)

    def _live(self) -> str:
        return self._replica.gate.version if self._replica is not None else ""

    def _digest_of(self, version: str) -> str:
        return self._replica.face.digest_of(version) if self._replica is not None else ""

    def _face(self) -> ReplicaFace:
        if self._replica is None:
            raise RuntimeError("this server has no engine")
        return self._replica.face

    def _router(self) -> APIRouter:
        router = APIRouter()
        prefix = settings_of.PREFIX

        def add(path: str, method: str, name: str) -> None:
            async def route(request: Request) -> Response:
                return await self._answer(name, request)

            router.add_api_route(path, route, methods=[method], response_model=None, name=f"liveweights_{name}")

        add(prefix + "/participant/v1/{verb}", "POST", "participant")
        add(prefix + "/replica/v1/readmit", "POST", "readmit")
        add(prefix + "/replica/v1/release", "POST", "release")
        add(prefix + "/healthz", "GET", "healthz")
        add(prefix + "/readyz", "GET", "readyz")
        add(prefix + "/version", "GET", "version")
        add(prefix + "/metrics", "GET", "metrics")
        add("/readyz", "GET", "readyz")
        return router

    async def _answer(self, name: str, request: Request) -> Response:
        """Our routes answer errors as problem documents; vLLM's handlers would call each a 500."""
        face = self._face()
        try:
            if name not in ("healthz", "readyz"):
                self._check_token(request)
            if name == "participant":
                _check_length(request)
                return await face.participant(request.path_params["verb"], request)
            if name == "release":
                return await face.release(request)
            answer: Response = await getattr(face, name)()
        except LiveweightsError as error:
            error.live_version = error.live_version or face.live_version
            return problem(error)
        return answer

    def _check_token(self, request: Request) -> None:
        """vLLM's API keys open inference; a configured admin token is asked for beside."""
        if self._replica is None:
            return
        headers = [value for name, value in request.scope["headers"] if name == b"authorization"]
        error = Access(self._replica.settings.tokens, frozenset()).refuses(request.url.path, headers)
        if error is not None:
            raise error


class VllmReplica:
    """One life of the front beside one vLLM engine."""

    def __init__(self, client: Any, args: Namespace) -> None:
        config = client.vllm_config
        check_server(config, args)
        wanted = self.settings = settings_of.read(args)
        model = model_folder(config.model_config)
        control = EngineControl(client)
        self.gate = VllmGate(control.abort, wanted.limits)
        client.generate = self.gate.generating(client.generate)
        client.encode = self.gate.encoding(client.encode)
        self.face = ReplicaFace(wanted.replica, self.gate)
        self._pool = AttachedPool(
            control,
            str(model),
            int(config.parallel_config.world_size),
            on_death=lambda failure: self._life.rank_died(failure),
            on_staged=lambda rank, staged: self._work.on_staged(rank, staged),
            relabelled=self.gate.relabelled,
        )
        roots = tuple(str(Path(root).resolve()) for root in wanted.roots)
        self._work = RankWork(self._pool, self.gate, str(model), (*roots, *_blobs(model)))
        membership = Membership(wanted.replica, wanted.url, str(model), wanted.coordinator, wanted.tokens.admin)
        self._life = FrontLife(membership, self._pool, self._work, self.gate, self.face)
        self._joining: asyncio.Task[bool] | None = None

    def begin(self) -> None:
        """The server listens, shut: attach to the workers, prove the start checkpoint, join."""
        self._joining = asyncio.create_task(self._join())

    async def _join(self) -> bool:
        try:
            hellos = await self._pool.start(self.settings.start_s)
        except LiveweightsError as error:
            self._life.refuse(error)
            return False
        _log.info("%s: %d ranks attached", self.settings.replica, len(hellos))
        return await self._life.start_and_join()

    async def stop(self) -> None:
        """The server ends."""
        if self._joining is not None:
            self._joining.cancel()
            await asyncio.gather(self._joining, return_exceptions=True)
        await self._life.stop(self.settings.stop_s)
        await self._pool.stop()


def _blobs(model: Path) -> tuple[str, ...]:
    """A hub snapshot consists of links into its repository's blobs."""
    return (str(model.parent.parent),) if model.parent.name == "snapshots" else ()


def _check_length(request: Request) -> None:
    """Raises Rejected for a body that says that it is over the bound."""
    from updater.core.errors import refuse

    length = request.headers.get("content-length", "0")
    if not length.isdigit() or int(length) > PARTICIPANT_BODY:
        raise refuse("body_too_large", f"content-length {length[:20]}, limit {PARTICIPANT_BODY} bytes")


def _log_as_vllm_does() -> None:
    """vLLM sets up only its own loggers."""
    logger = logging.getLogger("liveweights")
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
