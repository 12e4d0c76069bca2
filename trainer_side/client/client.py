"""The client of a coordinator, sync and async. Both only perform what `trainer_side.client.protocol` asks for."""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Concatenate, ParamSpec, Self, TypeVar
from urllib.parse import urlsplit

import httpx

from trainer_side.client import protocol
from trainer_side.client.protocol import HttpAnswer, HttpCall, HttpSteps, NoAnswer, Wait
from updater.core.errors import Failure, Unavailable, refuse
from updater.protocol.events import EventParser

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
DEFAULT_URL = "http://127.0.0.1:8700"
URL_ENV = "LIVEWEIGHTS_URL"
TOKEN_ENV = "LIVEWEIGHTS_ADMIN_TOKEN"
#: A stream of events is silent at most this long: the coordinator sends comments to keep it alive.
EVENT_GAP_S = 60.0
_EVENTS: Any = {
    "timeout": httpx.Timeout(5.0, read=EVENT_GAP_S),
    "headers": {"Accept": "text/event-stream"},
}
#: How the address of a coordinator begins that is a Ray actor.
ACTOR = "ray://"


def default_url() -> str:
    return os.environ.get(URL_ENV, DEFAULT_URL)


def default_token() -> str:
    """Of a list, while a token is rotated, the first."""
    return os.environ.get(TOKEN_ENV, "").split(",")[0].strip()


class Canceller:
    """Ends a stream of events from another thread, also while its reader waits for a byte."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._made = False

    def __call__(self) -> None:
        with self._lock:
            self._made = True
            self._shut()

    @contextmanager
    def of(self, response: httpx.Response) -> Iterator[None]:
        """While `response` is read."""
        stream = response.extensions.get("network_stream")
        with self._lock:
            self._socket = stream.get_extra_info("socket") if stream is not None else None
            if self._made:
                self._shut()
        try:
            yield
        finally:
            with self._lock:
                self._socket = None

    def _shut(self) -> None:
        if self._socket is not None:
            with suppress(OSError):  # it may be gone already
                self._socket.shutdown(socket.SHUT_RDWR)


def _sync(verb: Callable[P, HttpSteps[T]]) -> Callable[Concatenate[Client, P], T]:
    """A method of `Client` with the arguments and the text of `verb`."""

    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.run(verb(*args, **kwargs))

    return _described(method, verb)


def _async(verb: Callable[P, HttpSteps[T]]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """The same of `AsyncClient`."""

    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.run(verb(*args, **kwargs))

    return _described(method, verb)


def _described(method: F, verb: Callable[..., object]) -> F:
    """For `help` and editors: name, text, arguments and result of `verb`, after `self`."""
    method.__name__, method.__doc__ = verb.__name__, verb.__doc__
    told = inspect.signature(verb)
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    result = str(told.return_annotation).removeprefix("HttpSteps[").removesuffix("]")
    signed: Any = method
    signed.__signature__ = told.replace(parameters=[first, *told.parameters.values()], return_annotation=result)
    return method


class Client:
    """`url` and `token` default to the environment: LIVEWEIGHTS_URL and LIVEWEIGHTS_ADMIN_TOKEN.

    `ray://<actor name>@<namespace>` is a coordinator that runs as a Ray actor of the cluster this process is in.
    `backoff`: a factor on the waits between two tries.

    Every method raises the typed errors of `updater.core.errors`: Rejected, Aborted and RolledBack carry the receipt
    in `error.receipt`; Unavailable with code `unreachable` means that no server answered.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        transport: httpx.BaseTransport | None = None,
        backoff: float = 1.0,
    ) -> None:
        whole = address(url or default_url())
        self._server, self._backoff = _server(whole), backoff
        self._http = httpx.Client(**_options(whole, token, transport, "ActorTransport"))

    update = _sync(protocol.update)
    begin = _sync(protocol.begin)
    rollback = _sync(protocol.rollback)
    version = _sync(protocol.version)
    fleet = _sync(protocol.fleet)
    adopt = _sync(protocol.adopt)
    model = _sync(protocol.model)
    manifest = _sync(protocol.manifest)
    history = _sync(protocol.history)
    status = _sync(protocol.status)
    commit = _sync(protocol.commit)
    seal = _sync(protocol.seal)
    abort = _sync(protocol.abort)
    renew = _sync(protocol.renew)

    def run(self, steps: HttpSteps[T]) -> T:
        """The result of `steps`. Raises its typed errors."""
        answer: HttpAnswer | NoAnswer | None = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            if isinstance(step, Wait):
                time.sleep(step.seconds * self._backoff)
                answer = None
            else:
                answer = self._perform(step)

    def events(self, update: str, canceller: Canceller | None = None) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """(name, data) as the coordinator sends them, until the update has ended.

        `canceller`, from another thread, ends it at once. Raises Unavailable when the connection breaks or is ended.
        """
        parser, canceller = EventParser(), canceller or Canceller()
        try:
            with self._http.stream("GET", f"{protocol.update_path(update)}/events", **_EVENTS) as response:
                if response.status_code != 200:
                    protocol.read(HttpAnswer(response.status_code, response.read(), self._server))
                with canceller.of(response):
                    for line in response.iter_lines():
                        if (event := parser.feed(line)) is not None:
                            yield event
        except httpx.HTTPError as error:
            raise _unreachable(self._server, error) from None

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_caught: object) -> None:
        self.close()

    def _perform(self, call: HttpCall) -> HttpAnswer | NoAnswer:
        try:
            response = self._http.request(**_request(call))
        except httpx.HTTPError as error:
            return _no_answer(self._server, error)
        return HttpAnswer(response.status_code, response.content, self._server)


class AsyncClient:
    """The async twin of `Client`: the same conversations, the same errors."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        backoff: float = 1.0,
    ) -> None:
        whole = address(url or default_url())
        self._server, self._backoff = _server(whole), backoff
        self._http = httpx.AsyncClient(**_options(whole, token, transport, "AsyncActorTransport"))

    update = _async(protocol.update)
    begin = _async(protocol.begin)
    rollback = _async(protocol.rollback)
    version = _async(protocol.version)
    fleet = _async(protocol.fleet)
    adopt = _async(protocol.adopt)
    model = _async(protocol.model)
    manifest = _async(protocol.manifest)
    history = _async(protocol.history)
    status = _async(protocol.status)
    commit = _async(protocol.commit)
    seal = _async(protocol.seal)
    abort = _async(protocol.abort)
    renew = _async(protocol.renew)

    async def run(self, steps: HttpSteps[T]) -> T:
        """The result of `steps`. Raises its typed errors."""
        answer: HttpAnswer | NoAnswer | None = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            if isinstance(step, Wait):
                await asyncio.sleep(step.seconds * self._backoff)
                answer = None
            else:
                answer = await self._perform(step)

    async def events(self, update: str) -> AsyncIterator[tuple[str, Mapping[str, Any]]]:
        """As `Client.events`."""
        parser = EventParser()
        try:
            async with self._http.stream("GET", f"{protocol.update_path(update)}/events", **_EVENTS) as response:
                if response.status_code != 200:
                    protocol.read(HttpAnswer(response.status_code, await response.aread(), self._server))
                async for line in response.aiter_lines():
                    if (event := parser.feed(line)) is not None:
                        yield event
        except httpx.HTTPError as error:
            raise _unreachable(self._server, error) from None

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_caught: object) -> None:
        await self.close()

    async def _perform(self, call: HttpCall) -> HttpAnswer | NoAnswer:
        try:
            response = await self._http.request(**_request(call))
        except httpx.HTTPError as error:
            return _no_answer(self._server, error)
        return HttpAnswer(response.status_code, response.content, self._server)


def _options(url: str, token: str | None, transport: object, of_actor: str) -> dict[str, Any]:
    """Of httpx's clients. `of_actor`: the class in `updater.ray.calls` that carries requests to a Ray actor."""
    base = url
    if url.startswith(ACTOR):  # no base of HTTP URLs: what carries the requests knows where they go
        if transport is None:
            from updater.ray import calls as ray_calls

            transport = getattr(ray_calls, of_actor)(ray_calls.address_of(url))
        base = "http://coordinator"
    token = default_token() if token is None else token
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    # The environment's proxies are for the internet, not for a fleet's own coordinator.
    return {"base_url": base, "headers": headers, "trust_env": False, "transport": transport}


def address(url: str) -> str:
    """With `http://` before it where nothing is. Raises Rejected `bad_request` for what is no address."""
    whole = url if "://" in url else f"http://{url}"
    if whole.startswith(ACTOR):
        return whole
    try:
        httpx.URL(whole)
        parts = urlsplit(whole)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except (ValueError, httpx.InvalidURL):
        fits = False
    if not fits:
        raise refuse(
            "bad_request", f"{url!r} is no address", hint="an address is http://HOST:PORT, or ray://NAME@NAMESPACE"
        )
    return whole


def _request(call: HttpCall) -> dict[str, Any]:
    request: dict[str, Any] = {"method": call.method, "url": call.path, "timeout": call.timeout_s}
    if call.query:
        request["params"] = list(call.query)
    if call.body is not None:
        request["json"] = dict(call.body)
    if call.text is not None:
        request |= {"content": call.text, "headers": {"Content-Type": "application/json"}}
    return request


def _server(url: str) -> str:
    """The address for people: without a password that it holds, and an actor's as it is."""
    return url if url.startswith(ACTOR) else str(httpx.URL(url).copy_with(userinfo=b""))


def _no_answer(server: str, error: httpx.HTTPError) -> NoAnswer:
    text = f"{server}: {type(error).__name__}: {error}"
    return NoAnswer(text[:500], again=not isinstance(error, httpx.ReadTimeout))


def _unreachable(server: str, error: httpx.HTTPError) -> Unavailable:
    return Unavailable(Failure("unreachable", _no_answer(server, error).reason, hint=protocol.UNREACHABLE_HINT))
