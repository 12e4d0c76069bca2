"""HTTP for every server of the project: problem documents, bounded bodies, and the wiring of both into an app.

`install(app, tokens=..., ...)` is all a server needs: after it every answer that is not a success is an RFC 9457
problem document, also unknown paths, wrong methods and unreadable bodies, and nothing is reachable without its token.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from updater.core.errors import CODES, Failure, LiveweightsError, Rejected, Unavailable
from updater.protocol.problems import BY_STATUS, problem_body, terse
from updater.server.security import OPEN_PATHS, Access, FrontKeys, Tokens

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 1
DEFAULT_MAX_BODY = 4 << 20
BODY_DEADLINE_S = 60.0
CONNECTION = "liveweights.connection"
_JSON_HINT = "pass the header Content-Type: application/json"

_log = logging.getLogger("liveweights.http")
_OTHER_SERVER = (
    "a coordinator has /v1/updates, /v1/fleet and /v1/history, a replica /v1/completions: is it the right address?"
)


def problem(error: LiveweightsError, **extra: Any) -> JSONResponse:
    """The answer that carries an error; 503 says when to come back, 401 what to bring."""
    headers: dict[str, str] = {}
    if error.status == 503:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(problem_body(error, **extra), error.status, headers, media_type=MEDIA_TYPE)


class Problem(BaseModel):
    """What a problem document has at least, as the OpenAPI documents describe it."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
    code: str
    outcome: str
    retryable: bool
    live_version: str | None
    failures: list[dict[str, Any]]


def problem_responses() -> dict[int | str, dict[str, Any]]:
    """For an app's OpenAPI document: every status that an error may have, and its document. 500 is none of them."""
    content = {MEDIA_TYPE: {"schema": Problem.model_json_schema()}}
    return {
        status: {"description": f"A problem document: {', '.join(codes)}.", "content": content}
        for status, codes in sorted(_codes_by_status().items())
    }


def _codes_by_status() -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for code, status in CODES.items():
        if status != 500:
            found.setdefault(status, []).append(code)
    return found


def install(
    app: FastAPI,
    *,
    tokens: Tokens,
    inference_paths: frozenset[str] = frozenset(),
    max_body: int = DEFAULT_MAX_BODY,
    body_limits: Mapping[str, int] | None = None,
    live_version: Callable[[], str | None] = lambda: None,
    keys: FrontKeys | None = None,
) -> None:
    """Guard the app and give it problem documents.

    `inference_paths`: exact paths that the inference token opens; every other one needs the admin token, or below
    `keys.prefix` one of `keys`.
    `body_limits`: path prefix -> bytes, where a route takes more than `max_body`. `live_version` fills in what an
    error does not say itself.
    """
    app.router.redirect_slashes = False  # `/v1/updates/` is another path, and not ours

    async def known(_request: Request, error: Exception) -> Response:
        if not isinstance(error, LiveweightsError):  # pragma: no cover  (registered for this type only)
            raise error
        if error.live_version is None:
            error.live_version = live_version()
        return problem(error)

    async def invalid(_request: Request, error: Exception) -> Response:
        details = error.errors() if isinstance(error, RequestValidationError) else []
        lines = [f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in details]
        failures = [Failure("bad_request", line[:500]) for line in lines[:20]] or [Failure("bad_request", "unreadable")]
        return problem(Rejected(*failures, live_version=live_version()))

    async def plain(_request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        code = BY_STATUS.get(status, "bad_request" if status < 500 else "internal")
        kind = Unavailable if status >= 500 else Rejected
        hint = _OTHER_SERVER if code == "not_found" else ""
        failure = Failure(code, str(getattr(error, "detail", code)), hint=hint)
        return problem(kind(failure, live_version=live_version()))

    async def unexpected(_request: Request, error: Exception) -> Response:
        _log.error("unexpected error: %s", type(error).__name__)
        return problem(Unavailable(Failure("internal", type(error).__name__), live_version=live_version()))

    app.add_exception_handler(LiveweightsError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, plain)
    app.add_exception_handler(Exception, unexpected)
    # The last one added is the outermost: the token is checked before a byte of the body is read.
    app.add_middleware(BodyLimit, max_body=max_body, body_limits=dict(body_limits or {}))
    app.add_middleware(Guard, access=Access(tokens, inference_paths, keys or FrontKeys()))


class Guard:
    """Refuses, before anything else looks at it, every request that does not bring its token."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = scope["headers"]
        error: LiveweightsError | None = self._access.refuses(scope["path"], headers)
        if error is None and not self._has_room(scope):
            error = Unavailable(Failure("queue_full", "too many requests at once, each over a connection of its own"))
        if error is None and scope["type"] == "http":
            if not self._access.tells_all(scope["path"], headers):
                send = _Terse(send, scope["path"] in self._access.inference_paths).send
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await problem(error or Rejected(Failure("not_found", "no such route")))(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _has_room(self, scope: Scope) -> bool:
        connection: AdmittingConnection | None = scope.get(CONNECTION)
        if connection is None or scope["path"] in OPEN_PATHS:
            return True
        return connection.admit(scope["path"], fleet=self._access.of_fleet(scope["path"], scope["headers"]))


class AdmittingConnection(Protocol):
    """What a server may put into the scope of a request under `CONNECTION`: see `updater.server.connections`."""

    def admit(self, path: str, *, fleet: bool) -> bool:
        """Whether the request may run. `fleet`: it has shown the admin token or the key of a front."""


class _Terse:
    """Shortens the problem documents of one answer. `own`: what is wrong with the request itself is told whole."""

    def __init__(self, send: Send, own: bool) -> None:
        self._send, self._own = send, own
        self._start: Message | None = None
        self._body = bytearray()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and self._shortens(message):
            self._start = message
        elif self._start is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._shortened(self._start)

    def _shortens(self, start: Message) -> bool:
        problem = any(
            name.lower() == b"content-type" and value == MEDIA_TYPE.encode() for name, value in start["headers"]
        )
        return problem and (start["status"] >= 500 or not self._own)

    async def _shortened(self, start: Message) -> None:
        body = json.dumps(terse(json.loads(self._body)), separators=(",", ":")).encode()
        headers = [each for each in start["headers"] if each[0].lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


class BodyLimit:
    """Reads the body, bounded in size and time, before the app runs; a length that is not told is counted.

    A body has to call itself JSON: a page in a browser can send any other type to any server without asking first.
    """

    def __init__(self, app: ASGIApp, max_body: int, body_limits: Mapping[str, int]) -> None:
        self._app, self._max, self._limits = app, max_body, body_limits

    def limit(self, path: str) -> int:
        return max((size for prefix, size in self._limits.items() if path.startswith(prefix)), default=self._max)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._body(scope, receive, self.limit(scope["path"]))
        except _BadBody as bad:
            await problem(Rejected(Failure(bad.code, bad.message)))(scope, receive, send)
            return
        if body and not _is_json(scope):
            failure = Failure("unsupported_media_type", "the body is not said to be JSON", hint=_JSON_HINT)
            await problem(Rejected(failure))(scope, receive, send)
        elif body is not None:
            await self._app(scope, replay_body(body, receive), send)

    async def _body(self, scope: Scope, receive: Receive, limit: int) -> bytes | None:
        """The whole body; None if the client went away."""
        for name, value in scope["headers"]:
            if name == b"content-length" and (not value.isdigit() or int(value) > limit):
                raise _BadBody("body_too_large", f"content-length {value[:20].decode('latin-1')}, limit {limit} bytes")
        parts, size = [], 0
        try:
            async with asyncio.timeout(BODY_DEADLINE_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise _BadBody("body_too_large", f"more than {limit} bytes")
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise _BadBody("bad_request", f"the body did not arrive within {BODY_DEADLINE_S:g} s") from None


def _is_json(scope: Scope) -> bool:
    kinds = [value for name, value in scope["headers"] if name == b"content-type"]
    kind = kinds[0].partition(b";")[0].strip().lower() if len(kinds) == 1 else b""
    return kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))


class _BadBody(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


def replay_body(body: bytes, receive: Receive) -> Callable[[], Awaitable[Message]]:
    """A `receive` that hands out the body once and then listens for the disconnect."""
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
