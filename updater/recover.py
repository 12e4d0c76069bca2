"""What a coordinator does first: take the fleet over, ask everybody, and let the core decide how to go on."""

from __future__ import annotations

from dataclasses import dataclass

from updater.clock import Clock
from updater.core.effects import Effect
from updater.core.state import FleetState
from updater.journal import Journal, Request
from updater.membership import Contact, Directory
from updater.participants import ParticipantFactory
from updater.settings import Settings


@dataclass(frozen=True, slots=True)
class Found:
    """`going_on`: requests whose update continues; `given_up`: those that nothing was recorded of."""

    state: FleetState
    effects: tuple[Effect, ...]
    going_on: tuple[Request, ...]
    given_up: tuple[Request, ...]


class Recovery:
    def __init__(
        self, journal: Journal, directory: Directory, make: ParticipantFactory, settings: Settings, clock: Clock
    ) -> None:
        self._journal, self._directory, self._make = journal, directory, make
        self._settings, self._clock = settings, clock

    async def run(self, owner: str) -> Found:
        """Ask every member that the journal knows, then claim an epoch above all that anybody has heard of."""
        members = self._journal.members()
        for member in members:
            self._directory.put(member.replica, Contact(self._make(member.replica, member.url)))
        answers = await self._directory.ask_all(
            [member.replica for member in members], self._settings.deadlines.status_s
        )
        statuses = [answer for answer in answers.values() if answer is not None]
        epoch = self._journal.claim(owner, max((status.epoch for status in statuses), default=0))
        state = FleetState(self._settings.fleet, epoch, serial=self._journal.last_serial())
        return Found(state, (), (), self._journal.requests(running=True))
