"""The client of a coordinator, sync and async. Both only perform what `trainer_side.flows` asks for."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from trainer_side import flows
from trainer_side.flows import Answer, Call, Flow, NoAnswer, Wait
from updater.core.errors import Failure, Unavailable, refuse
from updater.core.version import Version
from updater.schemas import FleetState, ModelState, Receipt, UpdateState, VersionState

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
DEFAULT_URL = "http://127.0.0.1:8700"
URL_ENV = "LIVEWEIGHTS_URL"
TOKEN_ENV = "LIVEWEIGHTS_ADMIN_TOKEN"
#: A stream of events is silent at most this long: the coordinator sends comments to keep it alive.
EVENT_GAP_S = 60.0
CONNECT_S = 5.0
#: How long an update may take before a waiting client gives up; the update goes on.
UPDATE_S = 1800.0
#: How the address of a coordinator begins that is a Ray actor.
ACTOR = "ray://"


def default_url() -> str:
    return os.environ.get(URL_ENV, DEFAULT_URL)


def default_token() -> str:
    """Of a list, while a token is rotated, the first."""
    return os.environ.get(TOKEN_ENV, "").split(",")[0].strip()


class Cut:
    """Ends a stream of events from another thread, whatever its reader is waiting for."""

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


class Client:
    """`url` and `token` default to the environment: LIVEWEIGHTS_URL and LIVEWEIGHTS_ADMIN_TOKEN.

    `ray://<actor name>@<namespace>` is a coordinator that runs as a Ray actor of the cluster this process is in.

    Every method raises the typed errors of `updater.core.errors`: Rejected, Aborted and RolledBack carry the receipt
    in `error.receipt`; Unavailable with code `unreachable` means that no server answered.
    """

    def __init__(
        self, url: str | None = None, token: str | None = None, *, transport: httpx.BaseTransport | None = None
    ) -> None:
        options = _options(url, token)
        self._server = _server(options["base_url"])
        if transport is None and options["base_url"].startswith(ACTOR):
            from updater.ray_calls import ActorTransport, address_of

            transport = ActorTransport(address_of(options["base_url"]))
        self._http = httpx.Client(**_carried(options), transport=transport)

    def run(self, flow: Flow[T]) -> T:
        """Perform a flow of `trainer_side.flows`."""
        answer: Answer | NoAnswer | None = None
        while True:
            try:
                step = flow.send(answer)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            if isinstance(step, Wait):
                time.sleep(step.seconds)
                answer = None
            else:
                answer = self._perform(step)

    def update(self, body: Mapping[str, Any], *, timeout_s: float = UPDATE_S) -> Receipt:
        """Begin an update (the body of `POST /v1/updates`) and wait for the receipt of a committed one."""
        return _as(Receipt, self._server, self.run(flows.begin(body, wait=True, timeout_s=timeout_s)))

    def begin(self, body: Mapping[str, Any]) -> UpdateState:
        """Begin an update and return while it runs."""
        return _as(UpdateState, self._server, self.run(flows.begin(body, wait=False, timeout_s=flows.CALL_S)))

    def rollback(
        self,
        target: Version | str | None = None,
        expected_live: Version | str | None = None,
        *,
        timeout_s: float = UPDATE_S,
        **more: Any,
    ) -> Receipt:
        """Back to `target` (default: what the fleet offers as `rollback_to`) from `expected_live` (default: live).

        `more`: of the body, as `policy={"in_flight": "abort"}` for a fleet that does not come to rest in time.
        """
        target, expected_live = self.run(_rollback_pair(target, expected_live))
        body = {"target": str(target), "expected_live": str(expected_live), **more}
        return _as(Receipt, self._server, self.run(flows.rollback(body, wait=True, timeout_s=timeout_s)))

    def version(self) -> VersionState:
        """What is live, since when, and what a rollback would bring back."""
        return _as(VersionState, self._server, self.run(flows.get("/v1/version")))

    def fleet(self) -> FleetState:
        """Members and ranks."""
        return _as(FleetState, self._server, self.run(flows.get("/v1/fleet")))

    def adopt(self, members: Mapping[str, str]) -> FleetState:
        """Let this coordinator, whose journal is empty or behind, take over these fronts (replica to URL)."""
        return _as(FleetState, self._server, self.run(flows.adopt(members)))

    def model(self) -> ModelState:
        """What the fleet's engines run on, beside tensors: config, tokenizer, quantisation."""
        return _as(ModelState, self._server, self.run(flows.get("/v1/fleet/model")))

    def manifest(self, digest: str) -> Mapping[str, Any]:
        """The manifest of a version by its digest. Raises Rejected `not_found`."""
        return self.run(flows.get(f"/v1/manifests/{digest}"))

    def history(self, limit: int | None = None) -> list[Receipt]:
        """Past receipts, newest first."""
        return _receipts(self._server, self.run(flows.get("/v1/history", limit=limit)))

    def status(self, update: str) -> UpdateState:
        """State and timings of one update."""
        return _as(UpdateState, self._server, self.run(flows.get(flows.update_path(update))))

    def commit(self, update: str) -> UpdateState:
        """Let an update with `commit: manual` go on from READY."""
        return _as(UpdateState, self._server, self.run(flows.verb(update, "commit")))

    def abort(self, update: str, failures: Iterable[Failure] = ()) -> UpdateState:
        """End an undecided update. `failures`: what made you, with codes of `updater.schemas.CAUSES`."""
        return _as(UpdateState, self._server, self.run(flows.abort(update, failures)))

    def renew(self, update: str) -> UpdateState:
        """The update is still wanted. Raises `lease_expired` or `wrong_phase` when it ended."""
        return _as(UpdateState, self._server, self.run(flows.verb(update, "renew")))

    def seal(self, update: str, digests: Mapping[str, str] | None = None) -> UpdateState:
        """The stream is complete. `digests`: name -> 16 hex digits, of tensors that the manifest has none of."""
        return _as(UpdateState, self._server, self.run(flows.seal(update, digests or {})))

    def events(self, update: str, cut: Cut | None = None) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """(name, data) as the coordinator tells them, until the update has ended.

        `cut`, from another thread, ends it at once. Raises Unavailable when the connection breaks, also by a cut.
        """
        path = f"{flows.update_path(update)}/events"
        timeout = httpx.Timeout(CONNECT_S, read=EVENT_GAP_S)
        cut = cut or Cut()
        try:
            with self._http.stream("GET", path, timeout=timeout, headers={"Accept": "text/event-stream"}) as response:
                if response.status_code != 200:
                    flows.read(Answer(response.status_code, response.read(), self._server))
                with cut.of(response):
                    yield from flows.events(response.iter_lines())
        except httpx.HTTPError as error:
            raise _unreachable(self._server, error) from None

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _perform(self, call: Call) -> Answer | NoAnswer:
        try:
            response = self._http.request(**_request(call))
        except httpx.HTTPError as error:
            return NoAnswer(_reason(self._server, error), again=not isinstance(error, httpx.ReadTimeout))
        return Answer(response.status_code, response.content, self._server)


class AsyncClient:
    """The async twin of `Client`: the same flows, the same errors."""

    def __init__(
        self, url: str | None = None, token: str | None = None, *, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        options = _options(url, token)
        self._server = _server(options["base_url"])
        if transport is None and options["base_url"].startswith(ACTOR):
            from updater.ray_calls import AsyncActorTransport, address_of

            transport = AsyncActorTransport(address_of(options["base_url"]))
        self._http = httpx.AsyncClient(**_carried(options), transport=transport)

    async def run(self, flow: Flow[T]) -> T:
        """Perform a flow of `trainer_side.flows`."""
        answer: Answer | NoAnswer | None = None
        while True:
            try:
                step = flow.send(answer)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            if isinstance(step, Wait):
                await asyncio.sleep(step.seconds)
                answer = None
            else:
                answer = await self._perform(step)

    async def update(self, body: Mapping[str, Any], *, timeout_s: float = UPDATE_S) -> Receipt:
        """Begin an update (the body of `POST /v1/updates`) and wait for the receipt of a committed one."""
        return _as(Receipt, self._server, await self.run(flows.begin(body, wait=True, timeout_s=timeout_s)))

    async def begin(self, body: Mapping[str, Any]) -> UpdateState:
        """Begin an update and return while it runs."""
        return _as(UpdateState, self._server, await self.run(flows.begin(body, wait=False, timeout_s=flows.CALL_S)))

    async def rollback(
        self,
        target: Version | str | None = None,
        expected_live: Version | str | None = None,
        *,
        timeout_s: float = UPDATE_S,
        **more: Any,
    ) -> Receipt:
        target, expected_live = await self.run(_rollback_pair(target, expected_live))
        body = {"target": str(target), "expected_live": str(expected_live), **more}
        return _as(Receipt, self._server, await self.run(flows.rollback(body, wait=True, timeout_s=timeout_s)))

    async def version(self) -> VersionState:
        return _as(VersionState, self._server, await self.run(flows.get("/v1/version")))

    async def fleet(self) -> FleetState:
        return _as(FleetState, self._server, await self.run(flows.get("/v1/fleet")))

    async def adopt(self, members: Mapping[str, str]) -> FleetState:
        return _as(FleetState, self._server, await self.run(flows.adopt(members)))

    async def model(self) -> ModelState:
        return _as(ModelState, self._server, await self.run(flows.get("/v1/fleet/model")))

    async def manifest(self, digest: str) -> Mapping[str, Any]:
        return await self.run(flows.get(f"/v1/manifests/{digest}"))

    async def history(self, limit: int | None = None) -> list[Receipt]:
        return _receipts(self._server, await self.run(flows.get("/v1/history", limit=limit)))

    async def status(self, update: str) -> UpdateState:
        return _as(UpdateState, self._server, await self.run(flows.get(flows.update_path(update))))

    async def commit(self, update: str) -> UpdateState:
        return _as(UpdateState, self._server, await self.run(flows.verb(update, "commit")))

    async def seal(self, update: str, digests: Mapping[str, str] | None = None) -> UpdateState:
        return _as(UpdateState, self._server, await self.run(flows.seal(update, digests or {})))

    async def abort(self, update: str, failures: Iterable[Failure] = ()) -> UpdateState:
        return _as(UpdateState, self._server, await self.run(flows.abort(update, failures)))

    async def renew(self, update: str) -> UpdateState:
        return _as(UpdateState, self._server, await self.run(flows.verb(update, "renew")))

    async def events(self, update: str) -> AsyncIterator[tuple[str, Mapping[str, Any]]]:
        path = f"{flows.update_path(update)}/events"
        timeout = httpx.Timeout(flows.CALL_S, read=EVENT_GAP_S)
        parser = flows.EventParser()
        try:
            async with self._http.stream(
                "GET", path, timeout=timeout, headers={"Accept": "text/event-stream"}
            ) as response:
                if response.status_code != 200:
                    flows.read(Answer(response.status_code, await response.aread(), self._server))
                async for line in response.aiter_lines():
                    event = parser.feed(line)
                    if event is not None:
                        yield event
        except httpx.HTTPError as error:
            raise _unreachable(self._server, error) from None

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _perform(self, call: Call) -> Answer | NoAnswer:
        try:
            response = await self._http.request(**_request(call))
        except httpx.HTTPError as error:
            return NoAnswer(_reason(self._server, error), again=not isinstance(error, httpx.ReadTimeout))
        return Answer(response.status_code, response.content, self._server)


def _rollback_pair(target: Version | str | None, expected_live: Version | str | None) -> Flow[tuple[str, str]]:
    """Fill in what the caller left open from `/v1/version`."""
    if target is None or expected_live is None:
        live = yield from flows.get("/v1/version")
        target = live.get("rollback_to") if target is None else target
        expected_live = live.get("version") if expected_live is None else expected_live
    return str(target or ""), str(expected_live or "")


def _receipts(server: str, answer: Mapping[str, Any]) -> list[Receipt]:
    return [_as(Receipt, server, receipt) for receipt in answer.get("receipts", ())]


def _options(url: str | None, token: str | None) -> dict[str, Any]:
    token = default_token() if token is None else token
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    # The environment's proxies are for the internet, not for a fleet's own coordinator.
    return {"base_url": address(url or default_url()), "headers": headers, "trust_env": False}


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


def _as(kind: type[M], server: str, answer: Mapping[str, Any]) -> M:
    """Raises Rejected `not_found` for what another server than a coordinator answers."""
    try:
        return kind.model_validate(answer)
    except ValidationError:
        replica = answer.get("replica")
        what = f"the replica {replica!r}" if isinstance(replica, str) else "another server, or one of another release"
        raise refuse("not_found", f"no coordinator answers at {server}: it is {what}", hint=flows.ADDRESS) from None


def _carried(options: dict[str, Any]) -> dict[str, Any]:
    """An actor's address is no base of HTTP URLs: what carries the requests knows where they go."""
    return {**options, "base_url": "http://coordinator"} if options["base_url"].startswith(ACTOR) else options


def _request(call: Call) -> dict[str, Any]:
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


def _reason(server: str, error: httpx.HTTPError) -> str:
    return f"{server}: {type(error).__name__}: {error}"[:500]


def _unreachable(server: str, error: httpx.HTTPError) -> Unavailable:
    return Unavailable(Failure("unreachable", _reason(server, error), hint=flows.NOBODY))
