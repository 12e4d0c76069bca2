"""The endpoint plugin: `VLLM_PLUGINS=liveweights vllm serve ...` makes a stock vLLM server a member of a fleet.

A composition root. vLLM calls it twice: `attach_router` while the app is put together, `init_state` when the engine is
there; the life of our front is that of the app.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from engine_adapter.hosted.middleware import VersionMiddleware
from engine_adapter.replica.app import OPERATOR_BODY, PARTICIPANT_BODY, ReplicaApp
from engine_adapter.vllm.replica import VllmReplica
from engine_adapter.vllm.settings import PREFIX
from updater.core.errors import LiveweightsError
from updater.protocol.problems import terse
from updater.server.guard import MEDIA_TYPE, BodyLimit, problem
from updater.server.security import Access, FrontKeys, Tokens


class LiveweightsPlugin:
    """What the entry point `vllm.endpoint_plugins` resolves to."""

    name = "liveweights"
    required_tasks = None

    def __init__(self) -> None:
        self._replica: VllmReplica | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Routes below /liveweights/v1, `/readyz`, and the middleware around vLLM's own routes."""
        _log_as_vllm_does()
        app.include_router(self._router())
        app.add_middleware(_AroundRoutes, live=self._live, digest_of=self._digest_of)
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
            replica = VllmReplica(engine_client, args)
            await replica.check()
            self._replica = replica

    def _live(self) -> str:
        return self._replica.gate.version if self._replica is not None else ""

    def _digest_of(self, version: str) -> str:
        return self._replica.face.digest_of(version) if self._replica is not None else ""

    def _face(self) -> ReplicaApp:
        if self._replica is None:
            raise RuntimeError("this server has no engine")
        return self._replica.face

    def _router(self) -> APIRouter:
        router = APIRouter()

        def add(path: str, method: str, name: str) -> None:
            async def route(request: Request) -> Response:
                return await self._answer(name, request)

            router.add_api_route(path, route, methods=[method], response_model=None, name=f"liveweights_{name}")

        add(PREFIX + "/participant/v1/{verb}", "POST", "participant")
        add(PREFIX + "/replica/v1/readmit", "POST", "readmit")
        add(PREFIX + "/replica/v1/release", "POST", "release")
        add(PREFIX + "/healthz", "GET", "healthz")
        add(PREFIX + "/readyz", "GET", "readyz")
        add(PREFIX + "/version", "GET", "version")
        add(PREFIX + "/metrics", "GET", "metrics")
        add("/readyz", "GET", "readyz")
        return router

    async def _answer(self, name: str, request: Request) -> Response:
        """Our routes answer errors as problem documents; vLLM's handlers would call each a 500."""
        face = self._face()
        try:
            if name not in ("healthz", "readyz"):
                self._check_token(request)
            if name == "participant":
                return await face.participant(request.path_params["verb"], request)
            if name == "release":
                return await face.release(request)
            answer: Response = await getattr(face, name)()
        except LiveweightsError as error:
            error.live_version = error.live_version or face.live_version
            answer = problem(error)
        whole = self._access().tells_all(request.url.path, request.scope["headers"])
        if answer.media_type == MEDIA_TYPE and not whole:
            document = terse(json.loads(bytes(answer.body)))
            return JSONResponse(document, answer.status_code, media_type=MEDIA_TYPE)
        return answer

    def _check_token(self, request: Request) -> None:
        """vLLM's API keys open what lies below /v1, and nothing here."""
        error = self._access().refuses(request.url.path, request.scope["headers"])
        if error is not None:
            raise error

    def _access(self) -> Access:
        if self._replica is None:
            return Access(Tokens(), frozenset())
        wanted = self._replica.settings
        keys = FrontKeys.of(wanted.tokens, wanted.replica, wanted.url, f"{PREFIX}/participant/v1/")
        return Access(wanted.tokens, frozenset(), keys)


class _AroundRoutes:
    """Bounds the bodies of our own routes; around vLLM's, versions are asked for and told."""

    def __init__(self, app: ASGIApp, live: Callable[[], str], digest_of: Callable[[str], str]) -> None:
        self._ours = BodyLimit(app, OPERATOR_BODY, {f"{PREFIX}/participant/v1/": PARTICIPANT_BODY})
        self._vllms = VersionMiddleware(app, live, digest_of)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ours = scope["type"] == "http" and scope["path"].startswith(f"{PREFIX}/")
        await (self._ours if ours else self._vllms)(scope, receive, send)


def _log_as_vllm_does() -> None:
    """vLLM sets up only its own loggers."""
    logger = logging.getLogger("liveweights")
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
