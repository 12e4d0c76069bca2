"""A front that is a Ray actor, as the coordinator sees it."""

from __future__ import annotations

from typing import Any

from ray.exceptions import RayError

from updater.coordinator.members.participants import (
    HttpParticipant,
    Participant,
    ParticipantFactory,
    Unreachable,
    answered,
    check,
)
from updater.protocol import wire
from updater.ray.calls import Actor, ActorGone, Address
from updater.server.networks import Networks
from updater.settings import Settings


class RayParticipant:
    """The front at `ray://<actor name>@<namespace>`. Raises ValueError for another address.

    A call ends within its own time, whatever Ray makes of a dead actor or a full object store (B179, I9). It is sent
    once: trying again is the coordinator's, which fences what it sends.
    """

    def __init__(self, replica: str, url: str) -> None:
        self._replica, self._actor = replica, Actor(Address.parse(url))

    @property
    def url(self) -> str:
        return str(self._actor.address)

    async def call(self, verb: str, request: Any, timeout_s: float) -> Any:
        check(verb, request)
        text = wire.encode(request).decode()
        try:
            answer = await self._actor.ask("participant", verb, text, timeout_s=timeout_s)
        except ActorGone as error:
            raise Unreachable(str(error), refused=error.dead) from None
        except (RayError, TimeoutError) as error:
            raise Unreachable(f"{type(error).__name__} of {self.url}") from error
        return answered(self._replica, verb, answer["status"], answer["text"].encode())

    async def close(self) -> None:
        """Nothing is held: the actor lives as long as the process that started it wants."""


def participants(settings: Settings) -> ParticipantFactory:
    """Actors by their addresses, every other front over HTTP. An actor is bound nowhere, so `settings.host` says
    nothing about where its fronts are."""
    networks = Networks(settings.networks.allowed)

    def make(replica: str, url: str) -> Participant:
        if url.startswith("ray://"):
            return RayParticipant(replica, url)
        return HttpParticipant(replica, url, settings.tokens.admin, networks)

    return make
