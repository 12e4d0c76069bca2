"""Around every route of an engine's own server: reads what a request asks of versions, writes what made its answer.

Pure ASGI. Answers of routes that never call the engine pass as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine_adapter.hosted.events import EventStream, plain
from engine_adapter.hosted.replies import Reply, current_reply, json_object
from engine_adapter.replica.replies import CUT_SHORT, Span, VersionWish, Wanted, listed, made_by
from updater.core.errors import LiveweightsError, refuse
from updater.protocol.problems import problem_body
from updater.server.guard import problem, replay_body


class VersionMiddleware:
    """`live`: version label that is served. `digest_of`: label -> content digest, as far as it was served here."""

    def __init__(self, app: ASGIApp, live: Callable[[], str], digest_of: Callable[[str], str]) -> None:
        self._app, self._live, self._digest_of = app, live, digest_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        reply = Reply()
        try:
            receive = await self._with_wish(scope, receive, reply)
        except LiveweightsError as error:
            await problem(error)(scope, receive, send)
            return
        token = current_reply.set(reply)
        answer = _Answer(reply, scope, receive, send, self._live, self._digest_of)
        try:
            await self._app(scope, receive, answer.send)
        except LiveweightsError as error:
            reply.failure = reply.failure or error
            await answer.fail()
        finally:
            current_reply.reset(token)

    async def _with_wish(self, scope: Scope, receive: Receive, reply: Reply) -> Receive:
        """Takes `liveweights` out of a JSON body. Raises Rejected for a wish that cannot be read."""
        kind = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
        if b"json" not in kind.lower():
            return receive
        body = await _whole(receive)
        if body is None:
            return receive
        if b'"liveweights"' in body:
            body = self._take(scope, body, reply)
        reply.asked = body
        return replay_body(body, receive)

    def _take(self, scope: Scope, body: bytes, reply: Reply) -> bytes:
        document = json_object(body)
        if document is None or "liveweights" not in document:
            return body  # what is wrong with it, if anything, the route says
        reply.wanted = self._wanted(document.pop("liveweights"))
        body = json.dumps(document).encode()
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        scope["headers"] = [*headers, (b"content-length", str(len(body)).encode())]
        return body

    def _wanted(self, wish: Any) -> Wanted:
        try:
            return VersionWish.model_validate({} if wish is None else wish).wanted(self._live())
        except ValidationError as error:
            said = error.errors()[0]
            where = ".".join(map(str, said["loc"][:1]))
            raise refuse("bad_request", f"liveweights: {where}: {said['msg']}") from None


class _Answer:
    """What goes back to the client. The start is held until something follows: a request that the gate refused after
    its route began is then still answered as refused."""

    def __init__(
        self,
        reply: Reply,
        scope: Scope,
        receive: Receive,
        send: Send,
        live: Callable[[], str],
        digest_of: Callable[[str], str],
    ) -> None:
        self._reply, self._scope, self._receive, self._send = reply, scope, receive, send
        self._live, self._digest_of = live, digest_of
        self._start: Message | None = None
        self._started = self._over = False
        self._kind = b""
        self._held = b""
        self._stream = EventStream(reply, scope["path"], self._add_versions, self._told)

    async def send(self, message: Message) -> None:
        if self._over:
            return
        if message["type"] == "http.response.start":
            self._start = message
            self._kind = next((v for n, v in message["headers"] if n.lower() == b"content-type"), b"")
            return
        if message["type"] != "http.response.body":
            await self._send(message)
            return
        if self._reply.failure is not None and not self._started:
            await self.fail()
            return
        await self._body(message.get("body", b""), message.get("more_body", False))

    async def fail(self) -> None:
        """The gate refused, and nothing was answered yet: a problem document."""
        error = self._reply.failure
        if self._started or self._over or error is None:
            return
        self._over = True
        await problem(self._placed(error))(self._scope, self._receive, self._send)

    def _told(self, error: LiveweightsError) -> dict[str, Any]:
        """As an event of a stream that has begun: a problem document with the message where OpenAI's clients look."""
        document = problem_body(self._placed(error))
        return {"message": document["detail"], "type": document["code"]} | document

    def _placed(self, error: LiveweightsError) -> LiveweightsError:
        if error.live_version is None:
            error.live_version = self._live() or None
        return error

    async def _body(self, body: bytes, more: bool) -> None:
        if not self._reply.parts:
            await self._pass(body, more)
        elif b"text/event-stream" in self._kind:
            await self._pass(self._stream.feed(body, more), more)
        elif b"json" in self._kind:
            self._held += body
            if not more:
                await self._pass(self._with_versions(self._held), more, whole=True)
        else:
            await self._pass(body, more)

    async def _pass(self, body: bytes, more: bool, whole: bool = False) -> None:
        if self._start is not None and not self._started:
            self._started = True
            if whole:
                headers = [(n, v) for n, v in self._start["headers"] if n.lower() != b"content-length"]
                self._start["headers"] = [*headers, (b"content-length", str(len(body)).encode())]
            await self._send(self._start)
        if body or not more:
            await self._send({"type": "http.response.body", "body": body, "more_body": more})

    def _with_versions(self, body: bytes) -> bytes:
        document = json_object(body)
        if document is None or "error" in document:
            return body
        self._add_versions(document)
        return plain(document)

    def _add_versions(self, document: dict[str, Any]) -> None:
        choices = [each for each in document.get("choices") or () if isinstance(each, dict)]
        for choice in choices if self._reply.choices > 1 else ():
            index = choice.get("index", 0)
            choice["liveweights"] = {"spans": listed(self._reply.spans_of(index)), **self._reply.found_stale(index)}
        first = choices[0].get("index", 0) if choices else 0
        document["liveweights"] = self._versions(self._reply.spans_of(first)) | self._reply.found_stale()
        if self._reply.ended_by_update and (not choices or any(_cut_short(choice) for choice in choices)):
            document["liveweights"] |= CUT_SHORT
        self._add_cached(document.get("usage"))

    def _versions(self, spans: tuple[Span, ...]) -> dict[str, Any]:
        version = spans[-1].version if spans else self._reply.version or self._live()
        return made_by(version, self._digest_of, spans)

    def _add_cached(self, usage: Any) -> None:
        if isinstance(usage, dict) and not usage.get("prompt_tokens_details"):
            usage["prompt_tokens_details"] = {"cached_tokens": sum(part.cached_tokens for part in self._reply.parts)}


def _cut_short(choice: dict[str, Any]) -> bool:
    return choice.get("finish_reason") == "abort"


async def _whole(receive: Receive) -> bytes | None:
    """The body; None if the client went away."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)
