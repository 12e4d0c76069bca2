"""How replicas come and go: describe, ask the machine, remember; and which fronts call without being members."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from typing import Generic, TypeVar

from updater.coordinator.clock import Clock
from updater.coordinator.journal.journal import Journal, KnownReplica
from updater.coordinator.machine import Machine, MachineObserver
from updater.coordinator.members.directory import MemberDirectory, MemberHandle
from updater.coordinator.members.models import Models
from updater.coordinator.members.participants import Barred, Participant, ParticipantFactory, Refusal, Unreachable
from updater.coordinator.update_service import UpdateService
from updater.core.errors import Failure, LiveweightsError, Unavailable
from updater.core.fleet import events as ev
from updater.core.fleet.effects import Denied
from updater.core.fleet.members import obstacle
from updater.core.participant import Call, Description, StatusRequest
from updater.protocol.answers import MemberState, StrangerState
from updater.protocol.model_document import ModelDocument
from updater.settings import Deadlines

_log = logging.getLogger("liveweights.coordinator")
_NETWORKS_HINT = "start the coordinator with --allow-network CIDR, or announce an address that it allows"
_RANKS_HINT = "the ranks of a replica are numbered from 0 on, each once: restart the replica"
_KEY_HINT = (
    "coordinator and replica need the same LIVEWEIGHTS_ADMIN_TOKEN, and the replica has to announce the very address"
    " that it is called at: {}"
)
#: A front asks again within seconds.
REFUSED_S = 60.0
#: More replicas than any operator reads; one more replaces the one that was heard of least recently.
KEPT = 1000


T = TypeVar("T")


class Recent(Generic[T]):
    """What was said last of each replica, within the last `seconds`."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds
        self._said: dict[str, tuple[float, T]] = {}

    def put(self, replica: str, said: T) -> None:
        self.forget(replica)
        self._said[replica] = (self._clock.now(), said)
        if len(self._said) > KEPT:
            del self._said[next(iter(self._said))]

    def forget(self, replica: str) -> None:
        self._said.pop(replica, None)

    def all(self) -> list[T]:
        since = self._clock.now() - self._seconds
        return [said for at, said in self._said.values() if at >= since]


class MembershipService(MachineObserver):
    """Every method may raise LiveweightsError. Two joins of one id wait for each other."""

    def __init__(
        self,
        make: ParticipantFactory,
        directory: MemberDirectory,
        journal: Journal,
        machine: Machine,
        updates: UpdateService,
        deadlines: Deadlines,
        clock: Clock,
    ) -> None:
        self._make, self._directory, self._journal = make, directory, journal
        self._machine, self._updates, self._deadlines = machine, updates, deadlines
        self._refused = Recent[Failure](clock, REFUSED_S)
        self._models = Models(directory, deadlines.status_s)
        self._locks: dict[str, asyncio.Lock] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._obeys: dict[str, asyncio.Event] = {}

    async def join(self, replica: str, url: str) -> MemberState:
        """Take a front in: the machine admits it, brings it to the live version, or says why not."""
        try:
            state = await self._join(replica, url)
        except LiveweightsError as error:
            self._refused.put(replica, error.failures[0].at(replica=replica))
            raise
        self._refused.forget(replica)
        return state

    def refused(self) -> list[Failure]:
        """Why replicas that ask to be taken in are not. Who asks no more is not named for long."""
        return self._refused.all()

    async def _join(self, replica: str, url: str) -> MemberState:
        self._updates.must_run()
        async with self._locks.setdefault(replica, asyncio.Lock()):
            participant = self.reach(replica, url)
            try:
                description = await self.describe(replica, url, participant)
                old_gone = await self._old_gone(replica)
                differs = await self._models.differs(self._machine.state, description)
                self._updates.must_run()
                self._take_in(replica, MemberHandle(participant, description, description.status), old_gone, differs)
            except BaseException:
                await participant.close()
                raise
        await self._obedience(replica)
        member = self._machine.state.member(replica)
        if member is None:
            raise self._updates.error(Failure("replica_lost", "it left while it joined", replica=replica))
        return self._directory.view(member, obstacle(self._machine.state, member))

    async def _obedience(self, replica: str) -> None:
        """Until it has heard the coordinator's first word, so that the next update may enlist it. Not for long."""
        member = self._machine.state.member(replica)
        if member is None or member.owed is None or member.owed.verb != "lead":
            return
        said = self._obeys.setdefault(replica, asyncio.Event())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(said.wait(), self._deadlines.status_s)
        self._obeys.pop(replica, None)

    def on_event(self, event: ev.Event) -> None:
        """A replica that acknowledges `lead` obeys."""
        if isinstance(event, ev.Replied) and event.verb == "lead" and event.replica in self._obeys:
            self._obeys[event.replica].set()

    async def model(self) -> tuple[str, ModelDocument] | None:
        """(a member, what its engine runs on), of the first that says so."""
        return await self._models.of_fleet(self._machine.state)

    def reach(self, replica: str, url: str) -> Participant:
        """The participant at a URL that came from outside."""
        try:
            return self._make(replica, url)
        except ValueError as error:
            raise self._updates.error(Failure("bad_request", str(error), replica=replica)) from None

    def _take_in(self, replica: str, handle: MemberHandle, old_gone: bool, differs: tuple[Failure, ...] | None) -> None:
        """Nothing is awaited between the machine's answer and the handle that its messages go to."""
        if handle.description is None:
            raise ValueError("a joiner has to be described")
        known = self._machine.state.member(replica) is not None
        before = self._directory.get(replica)
        self._directory.put(replica, handle)
        answer = self._machine.ask(ev.Joined(handle.description, old_gone, differs))
        if isinstance(answer, Denied):
            if before is not None and known:
                self._directory.put(replica, before)
            else:
                self._directory.remove(replica)
            raise self._updates.error(*answer.failures)
        # A crash before this line loses nothing: a front that was not admitted asks again.
        self._journal.put_member(remembered(handle))
        if before is not None:
            self._close_soon(before.participant)

    def _close_soon(self, participant: Participant) -> None:
        task = asyncio.get_running_loop().create_task(participant.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def describe(self, replica: str, url: str, participant: Participant) -> Description:
        """What a front says of itself, with the address it was reached under."""
        try:
            answer = await participant.call("describe", StatusRequest(), self._deadlines.join_s)
        except Barred as barred:
            raise self._updates.error(
                Failure("address_refused", str(barred), replica=replica, hint=_NETWORKS_HINT)
            ) from None
        except Unreachable as silence:
            raise Unavailable(Failure("unreachable", f"{url} does not answer: {silence}", replica=replica)) from None
        except Refusal as refusal:
            raise self._updates.error(*(_with_key_hint(failure, url) for failure in refusal.failures)) from None
        description: Description = answer
        if description.status.replica != replica:
            raise self._updates.error(
                Failure("bad_request", f"{url} is replica {description.status.replica!r}", replica=replica)
            )
        numbers = [rank.rank for rank in description.ranks]
        if sorted(numbers) != list(range(len(numbers))):
            raise self._updates.error(
                Failure("bad_request", f"its ranks are numbered {numbers}", replica=replica, hint=_RANKS_HINT)
            )
        if description.status.ranks not in (0, len(numbers)):
            count = description.status.ranks
            raise self._updates.error(
                Failure("bad_request", f"says {count} ranks and names {numbers}", replica=replica, hint=_RANKS_HINT)
            )
        return replace(description, url=url)

    async def named(self, replica: str, url: str, handle: MemberHandle) -> KnownReplica:
        """A front that an operator named. One that does not answer is adopted too, as whatever it turns out to be."""
        try:
            description = await self.describe(replica, url, handle.participant)
        except Unavailable as silence:
            _log.warning("adopted without an answer: %s", silence)
            return KnownReplica(replica, "", url)
        handle.description, handle.status = description, description.status
        return remembered(handle)

    async def _old_gone(self, replica: str) -> bool:
        """Whether the process that is the member now missed too many probes, or another one answers in its place.

        Not answering this once proves nothing (I9): it may stand still for a moment, and serve when it goes on.
        """
        member, handle = self._machine.state.member(replica), self._directory.get(replica)
        if member is None or handle is None:
            return True
        status = await self._directory.ask(handle.participant, self._deadlines.status_s)
        if status is None:
            return handle.missed >= self._deadlines.lost_after
        return status.incarnation != member.incarnation

    async def leave(self, replica: str, confirm_dead: bool, incarnation: str | None = None) -> None:
        """Remove a member. One that may be serving needs `confirm_dead`: its silence proves nothing.

        `incarnation`: who says so, None for an operator. `replica_id_taken` if the member is another process.
        """
        self._updates.must_run()
        member = self._machine.state.member(replica)
        if member is not None and incarnation not in (None, member.incarnation):
            raise self._updates.error(Failure("replica_id_taken", "another process is the member", replica=replica))
        answer = self._machine.ask(ev.Left(replica, confirm_dead))
        if isinstance(answer, Denied):
            raise self._updates.error(*answer.failures)
        self._journal.remove_member(replica)
        gone = self._directory.remove(replica)
        if gone is not None:
            await gone.participant.close()


def _with_key_hint(failure: Failure, url: str) -> Failure:
    return replace(failure, hint=_KEY_HINT.format(url)) if failure.code in ("unauthorized", "forbidden") else failure


def remembered(handle: MemberHandle) -> KnownReplica:
    """What the journal keeps of a described front."""
    description = handle.description
    if description is None:
        raise ValueError("not described")
    status = description.status
    return KnownReplica(status.replica, status.incarnation, handle.participant.url, description.config_hash)


def stranger_of(call: Call, url: str) -> StrangerState:
    """A front that calls and is no member."""
    return StrangerState(
        replica=call.replica,
        url=url,
        fleet=call.fleet,
        epoch=call.epoch,
        state=call.state.value,
        live_version=call.version,
        live_digest=call.digest,
    )
