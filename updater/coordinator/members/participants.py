"""How the coordinator talks to the front of a replica: one call per verb, typed both ways.

A call ends in exactly one of three ways: a reply, a `Refusal` (the front answered and said no), or `Unreachable`
(it may or may not have had an effect). The difference matters: only an answer says anything about a replica.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Protocol

from updater.coordinator.members.http_client import BROKEN, FrontClient, TooLong
from updater.core.errors import Failure
from updater.core.participant import MESSAGES
from updater.protocol import problems, wire
from updater.server.networks import AddressBarred, Networks
from updater.server.security import announced, front_key
from updater.settings import Settings

PREFIX = "/participant/v1"
MAX_REPLY = 4 << 20


class Refusal(Exception):
    """The front answered with failures; nothing was done."""

    def __init__(self, failures: tuple[Failure, ...]) -> None:
        super().__init__("; ".join(f"{failure.code}: {failure.message}" for failure in failures))
        self.failures = failures


class Unreachable(Exception):
    """No usable answer: not connected, cut off, too late, or not in our words. The verb may have happened.

    `refused`: no process listens at the address, so the process that did is gone.
    """

    def __init__(self, message: str, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class Barred(Unreachable):
    """The address is none that a replica may join from; it was not called."""


class Participant(Protocol):
    """The front of one replica, as the coordinator sees it."""

    @property
    def url(self) -> str: ...

    async def call(self, verb: str, request: Any, timeout_s: float) -> Any:
        """Send one verb of `updater.core.participant.MESSAGES`; returns its reply type.

        Raises Refusal or Unreachable, the latter also after `timeout_s` seconds.
        """

    async def close(self) -> None: ...


#: Makes the participant of one replica: (replica id, URL that it joined with).
ParticipantFactory = Callable[[str, str], Participant]


class HttpParticipant:
    """A front at `url`, the address that it announced. Raises ValueError for a URL of no server.

    `token`: the fleet's admin token, or empty. It is never sent: what goes out is this front's key. `networks`: where
    the address must lie.
    """

    def __init__(self, replica: str, url: str, token: str = "", networks: Networks | None = None) -> None:
        self._replica, self._url = replica, announced(url)
        self._client = FrontClient(self._url, front_key(token, replica, self._url), networks)

    @property
    def url(self) -> str:
        return self._url

    async def call(self, verb: str, request: Any, timeout_s: float) -> Any:
        check(verb, request)
        try:
            async with asyncio.timeout(timeout_s):
                status, body = await self._client.post(f"{PREFIX}/{verb}", wire.encode(request), MAX_REPLY)
        except AddressBarred as error:
            raise Barred(str(error)) from None
        except (*BROKEN, TooLong, TimeoutError) as error:
            refused = isinstance(error, ConnectionRefusedError)
            raise Unreachable(f"{type(error).__name__}: {error}", refused) from error
        return answered(self._replica, verb, status, body)

    async def close(self) -> None:
        await self._client.close()


def check(verb: str, request: Any) -> None:
    """Raises TypeError for a request of another verb."""
    asked, _ = MESSAGES[verb]
    if type(request) is not asked:
        raise TypeError(f"{verb} takes {asked.__name__}, not {type(request).__name__}")


def answered(replica: str, verb: str, status: int, body: bytes) -> Any:
    """The reply that a front's answer is, however it came. Raises Refusal or Unreachable."""
    if status == 200:
        try:
            return wire.decode(MESSAGES[verb][1], body)
        except wire.WireError as error:
            raise Unreachable(str(error)) from error
    # A gateway's or a crashed server's 5xx says nothing about the replica unless it is a document of ours.
    document = _document(body)
    if document is None or "failures" not in document:
        raise Unreachable(f"status {status} without a problem document")
    failures = problems.failures_of(document, fallback="replica_lost")
    raise Refusal(tuple(failure.at(replica=replica) for failure in failures))


def _document(body: bytes) -> dict[str, Any] | None:
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def http_participants(settings: Settings) -> ParticipantFactory:
    """Fronts over HTTP, each asked with its own key."""
    return lambda replica, url: HttpParticipant(replica, url, settings.tokens.admin, settings.networks)
