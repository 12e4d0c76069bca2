"""How a process of a Ray cluster reaches one of our actors: by address, and as a transport for an HTTP client.

An actor that shows an app offers `request(method, target, text)`, `patient(method, target, text)` (the same where
the answer may take as long as an update) and `stream(method, target, text)`. What crosses is text and numbers; Ray
carries it between actors that trust each other. Nothing here connects to a cluster: that is the program's.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, TaskCancelledError

from updater.core.errors import refuse

COORDINATOR = "coordinator"
NAMESPACE = "liveweights"
_ADDRESS = re.compile(r"^ray://([A-Za-z0-9][A-Za-z0-9._:-]{0,127})@([A-Za-z0-9][A-Za-z0-9._:-]{0,127})$")
#: What a client that never closes its read is held to.
_PATIENCE_S = 30.0

#: A Ray actor handle; Ray gives them no type of their own.
Handle = Any


@dataclass(frozen=True, slots=True)
class Address:
    """`ray://<actor name>@<namespace>`: finds the actor again after either side restarted."""

    name: str
    namespace: str = NAMESPACE

    @classmethod
    def parse(cls, url: str) -> Address:
        """Raises ValueError."""
        match = _ADDRESS.match(url)
        if match is None:
            raise ValueError(f"not an actor's address: {url[:200]!r}")
        return cls(match[1], match[2])

    def __str__(self) -> str:
        return f"ray://{self.name}@{self.namespace}"


class ActorGone(Exception):
    """No answer will come from this call. `dead`: the actor is known to be gone; else it restarts or is cut off."""

    def __init__(self, message: str, dead: bool) -> None:
        super().__init__(message)
        self.dead = dead


class Actor:
    """One actor, looked up when it is first called and again after it died. Raises ActorGone or RayError."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._handle: Handle | None = None

    def submit(self, method: str, *arguments: Any) -> Any:
        """Send the call; returns Ray's reference to its answer, or for a stream the generator of references.

        May block: a look-up asks the cluster's head, and a large argument waits for room in the object store.
        """
        try:
            if self._handle is None:
                self._handle = self._find()
            return getattr(self._handle, method).remote(*arguments)
        except RayActorError as error:
            raise self.lost(error) from None

    def _find(self) -> Handle:
        if not ray.is_initialized():  # asked before this, Ray would start a cluster of its own
            raise ActorGone("this process has not connected to a Ray cluster", dead=False)
        try:
            return ray.get_actor(self.address.name, self.address.namespace)
        except ValueError:
            raise ActorGone(f"there is no actor {self.address}", dead=True) from None

    def lost(self, error: RayActorError) -> ActorGone:
        """What a death means to the caller. A name may belong to a new actor by the next call."""
        self._handle = None
        dead = not isinstance(error, ActorUnavailableError)
        return ActorGone(f"{self.address}: {'it died' if dead else 'it restarts, or cannot be reached'}", dead)

    def get(self, reference: Any, timeout_s: float | None) -> Any:
        """Raises TimeoutError."""
        try:
            return ray.get(reference, timeout=timeout_s)
        except GetTimeoutError:
            raise TimeoutError(f"no answer within {timeout_s} s") from None
        except RayActorError as error:
            raise self.lost(error) from None

    async def ask(self, method: str, *arguments: Any, timeout_s: float | None) -> Any:
        """The same without holding up the event loop, also where Ray holds up the submission (B179)."""
        try:
            async with asyncio.timeout(timeout_s):
                return await (await asyncio.to_thread(self.submit, method, *arguments))
        except RayActorError as error:
            raise self.lost(error) from None


def address_of(coordinator: str | Handle, namespace: str = NAMESPACE) -> Address:
    """Of an actor's handle, its address, or its name in `namespace`. Raises `bad_request`."""
    if not isinstance(coordinator, str):
        return Address.parse(ray.get(coordinator.address.remote(), timeout=_PATIENCE_S))
    try:
        return Address.parse(coordinator if coordinator.startswith("ray://") else str(Address(coordinator, namespace)))
    except ValueError as error:
        raise refuse("bad_request", str(error)) from None


class ActorTransport(httpx.BaseTransport):
    """Carries the requests of a client to the app of an actor. Loss and time-out look as they do over sockets."""

    def __init__(self, address: Address) -> None:
        self._actor = Actor(address)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        method, target, text = _parts(request)
        timeout_s = _timeout(request)
        try:
            if _streams(request):
                return self._streamed(self._actor.submit("stream", method, target, text), timeout_s)
            answer = self._actor.get(self._actor.submit(_entry(request), method, target, text), timeout_s)
        except _FAULTS as error:
            raise _translated(error, request) from error
        return _response(answer)

    def _streamed(self, pieces: Any, timeout_s: float | None) -> httpx.Response:
        status = self._next(pieces, timeout_s)
        stream = _Pieces(self, pieces, timeout_s)
        return httpx.Response(int(status or 500), stream=stream, extensions={"network_stream": stream})

    def _next(self, pieces: Any, timeout_s: float | None) -> Any:
        """The next value; None at the end. Raises TimeoutError."""
        ready, _ = ray.wait([pieces], timeout=timeout_s)
        if not ready:
            raise TimeoutError(f"nothing within {timeout_s} s")
        reference = next(pieces, None)
        return None if reference is None else self._actor.get(reference, timeout_s)


class _Pieces(httpx.SyncByteStream):
    """Also the line and its socket, as far as somebody wants to shut them from another thread."""

    def __init__(self, transport: ActorTransport, pieces: Any, timeout_s: float | None) -> None:
        self._transport, self._pieces, self._timeout_s = transport, pieces, timeout_s

    def __iter__(self) -> Iterator[bytes]:
        try:
            while (piece := self._transport._next(self._pieces, self._timeout_s)) is not None:
                yield str(piece).encode()
        except _FAULTS as error:
            raise _translated(error, None) from error

    def close(self) -> None:
        _cancel(self._pieces)

    def get_extra_info(self, name: str) -> Any:
        return self if name == "socket" else None

    def shutdown(self, _how: int) -> None:
        self.close()


class AsyncActorTransport(httpx.AsyncBaseTransport):
    """The async twin of `ActorTransport`."""

    def __init__(self, address: Address) -> None:
        self._actor = Actor(address)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        method, target, text = _parts(request)
        timeout_s = _timeout(request)
        try:
            if _streams(request):
                pieces = await asyncio.to_thread(self._actor.submit, "stream", method, target, text)
                status = await self._next(pieces, timeout_s)
                return httpx.Response(int(status or 500), stream=_AsyncPieces(self, pieces, timeout_s))
            answer = await self._actor.ask(_entry(request), method, target, text, timeout_s=timeout_s)
        except _FAULTS as error:
            raise _translated(error, request) from error
        return _response(answer)

    async def _next(self, pieces: Any, timeout_s: float | None) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                reference = await anext(pieces, None)
                return None if reference is None else await reference
        except RayActorError as error:
            raise self._actor.lost(error) from None


class _AsyncPieces(httpx.AsyncByteStream):
    def __init__(self, transport: AsyncActorTransport, pieces: Any, timeout_s: float | None) -> None:
        self._transport, self._pieces, self._timeout_s = transport, pieces, timeout_s

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            while (piece := await self._transport._next(self._pieces, self._timeout_s)) is not None:
                yield str(piece).encode()
        except _FAULTS as error:
            raise _translated(error, None) from error

    async def aclose(self) -> None:
        _cancel(self._pieces)


_FAULTS = (ActorGone, TimeoutError, RayError)


def _translated(error: Exception, request: httpx.Request | None) -> httpx.TransportError:
    if isinstance(error, TimeoutError):
        return httpx.ReadTimeout(str(error), request=request)
    if isinstance(error, ActorGone):
        return httpx.ConnectError(str(error), request=request)
    return httpx.RemoteProtocolError(type(error).__name__, request=request)


def _cancel(pieces: Any) -> None:
    """The caller reads no further. A stream that has ended, or whose actor has, needs no cancelling."""
    try:
        ray.cancel(pieces)
    except (RayError, TaskCancelledError, ValueError, TypeError):
        return


def _parts(request: httpx.Request) -> tuple[str, str, str]:
    return request.method, request.url.raw_path.decode("ascii"), request.read().decode()


def _timeout(request: httpx.Request) -> float | None:
    told: Mapping[str, float | None] = request.extensions.get("timeout", {})
    return told.get("read", _PATIENCE_S)


def _streams(request: httpx.Request) -> bool:
    return "text/event-stream" in request.headers.get("accept", "")


def _entry(request: httpx.Request) -> str:
    """What may take as long as an update has room of its own at the actor, so that a `commit` never waits for it."""
    return "patient" if request.url.params.get("wait") == "true" else "request"


def _response(answer: Mapping[str, Any]) -> httpx.Response:
    return httpx.Response(answer["status"], content=str(answer["text"]).encode())
