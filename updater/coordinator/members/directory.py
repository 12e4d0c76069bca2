"""Who the members are as processes: their participants, what they last said, the probe that notices the dead, and
the poll that asks how far a staging is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace

from updater.coordinator.clock import Clock
from updater.coordinator.members.participants import Participant, Refusal, Unreachable
from updater.core.errors import Failure
from updater.core.fleet.events import Event, Lost, Seen
from updater.core.fleet.members import cure, shown
from updater.core.fleet.state import Member
from updater.core.participant import Description, FrontState, FrontStatus, Spare, SpareState, StatusRequest
from updater.core.release import RELEASE
from updater.protocol import wire
from updater.protocol.answers import MemberState
from updater.settings import Deadlines

_log = logging.getLogger("liveweights.coordinator")


@dataclass(slots=True, eq=False)
class MemberHandle:
    """One replica as a process: how to reach it, and what it last said. `missed`: tries in a row without an answer.
    `acknowledged`: how often it acknowledged that it is open.
    """

    participant: Participant
    description: Description | None = None
    status: FrontStatus | None = None
    missed: int = 0
    acknowledged: int = 0


class MemberDirectory:
    """Handles by replica id. Nothing is decided here."""

    def __init__(self) -> None:
        self._handles: dict[str, MemberHandle] = {}

    def participant(self, replica: str) -> Participant | None:
        handle = self._handles.get(replica)
        return handle.participant if handle is not None else None

    def get(self, replica: str) -> MemberHandle | None:
        return self._handles.get(replica)

    def descriptions(self, members: Iterable[Member]) -> dict[str, Description | None]:
        """What each of them said of itself, None for one that has not been asked yet; by replica."""
        handles = {member.replica: self.get(member.replica) for member in members}
        return {replica: each.description if each is not None else None for replica, each in handles.items()}

    def put(self, replica: str, handle: MemberHandle) -> None:
        """From now on this is how the replica is reached. Closing the one it replaces is the caller's."""
        self._handles[replica] = handle

    def remove(self, replica: str) -> MemberHandle | None:
        return self._handles.pop(replica, None)

    async def close(self) -> None:
        handles, self._handles = list(self._handles.values()), {}
        await asyncio.gather(*(handle.participant.close() for handle in handles), return_exceptions=True)

    def answered(self, replica: str) -> None:
        handle = self._handles.get(replica)
        if handle is not None:
            handle.missed = 0

    def missed(self, replica: str) -> int:
        """Count one more try without an answer; returns how many there were in a row."""
        handle = self._handles.get(replica)
        if handle is None:
            return 0
        handle.missed += 1
        return handle.missed

    # -- what fronts say

    def now_serves(self, replica: str, version: str, digest: str) -> None:
        """The replica acknowledged that it is open: shown at once, not only after the next probe."""
        handle = self._handles.get(replica)
        if handle is not None and handle.status is not None:
            handle.acknowledged += 1
            handle.status = replace(
                handle.status, state=FrontState.OPEN, live_version=version, live_digest=digest, failure=None
            )

    def settled(self, member: Member, version: str, digest: str) -> None:
        """An update ended and the replica acknowledged that it serves: forget the status that it sent in the middle of
        it.
        """
        handle = self._handles.get(member.replica)
        if handle is None or handle.status is None or handle.status.incarnation != member.incarnation:
            return
        self.now_serves(member.replica, version, digest)
        spare = Spare(SpareState.UNKNOWN if member.spare_unknown else SpareState.EMPTY)
        if member.previous is None:
            handle.status = replace(handle.status, spare=spare)

    async def ask(self, participant: Participant, seconds: float) -> FrontStatus | None:
        """The status of one front, or None when it does not answer."""
        try:
            answer = await participant.call("status", StatusRequest(), seconds)
        except (Refusal, Unreachable):
            return None
        return answer if isinstance(answer, FrontStatus) else None

    async def describe_all(self, replicas: Iterable[str], seconds: float) -> None:
        """Of those that answer and whose description is not known: after a restart the journal has only addresses."""
        handles = [handle for replica in replicas if (handle := self._handles.get(replica)) is not None]
        bare = [handle for handle in handles if handle.status is not None and handle.description is None]
        await asyncio.gather(*(self.described(handle, seconds) for handle in bare))

    async def described(self, handle: MemberHandle, seconds: float) -> Description | None:
        """What a front says of itself: it is asked once. None while it does not answer."""
        if handle.description is None:
            try:
                answer = await handle.participant.call("describe", StatusRequest(), seconds)
            except (Refusal, Unreachable):
                return None
            handle.description = handle.description or replace(answer, url=handle.participant.url)
        return handle.description

    async def ask_all(self, replicas: Iterable[str], seconds: float) -> dict[str, FrontStatus | None]:
        """All at once. What they say is kept, unless the replica acknowledged that it is open while it was asked: its
        answer may be from before that.
        """
        asked = [(replica, self._handles[replica]) for replica in replicas if replica in self._handles]
        before = [handle.acknowledged for _, handle in asked]
        answers = await asyncio.gather(*(self.ask(handle.participant, seconds) for _, handle in asked))
        for (_, handle), answer, acknowledged in zip(asked, answers, before, strict=True):
            if answer is None:
                continue
            handle.missed = 0
            if handle.acknowledged == acknowledged:
                handle.status = answer
        return {replica: answer for (replica, _), answer in zip(asked, answers, strict=True)}

    def view(self, member: Member, why: Failure | None = None) -> MemberState:
        """A member for people: the front's own state, unless the coordinator knows better. `why`: it does not serve."""
        handle = self._handles.get(member.replica)
        status = handle.status if handle is not None else None
        description = handle.description if handle is not None else None
        if status is not None and status.incarnation != member.incarnation:
            status = None
        state = shown(member, status, handle is not None and not handle.missed)
        failures = [each for each in (status.failure if status is not None else None, why) if each is not None]
        spare = status.spare if status is not None else Spare(SpareState.UNKNOWN)
        if member.previous is not None:
            spare = Spare(SpareState.PREVIOUS, version=str(member.previous.version), digest=member.previous.digest)
        return MemberState(
            replica=member.replica,
            url=handle.participant.url if handle is not None else member.url,
            state=state,
            incarnation=member.incarnation,
            live_version=status.live_version if status is not None else "",
            live_digest=status.live_digest if status is not None else member.live,
            spare=spare.state.value,
            spare_version=spare.version,
            engine=description.engine if description is not None else "",
            model=description.model if description is not None else "",
            ranks=[wire.plain(rank) for rank in description.ranks] if description is not None else [],
            failures=failures,
            hint=cure(state),
            release=status.release if status is not None else "",
            coordinator_release=RELEASE,
        )


class FailureDetector:
    """Asks every member for its status at an interval, so that a dead replica is noticed without an update."""

    def __init__(
        self,
        directory: MemberDirectory,
        clock: Clock,
        deadlines: Deadlines,
        members: Callable[[], tuple[Member, ...]],
        feed: Callable[[Event], None],
        then: Callable[[], Awaitable[None]],
    ) -> None:
        self._directory, self._clock, self._deadlines = directory, clock, deadlines
        self._members, self._feed, self._then = members, feed, then

    async def run(self) -> None:
        while True:
            await self._clock.sleep(self._deadlines.probe_every_s)
            try:
                await self.once()
                await self._then()
            except Exception as error:  # the fleet boundary: one odd answer must not blind the coordinator for ever
                _log.error("a probe failed: %s: %s", type(error).__name__, error)

    async def once(self) -> None:
        """One round over all members. A member that answers again counts again; one that missed too many rounds in a
        row is lost.
        """
        asked = {member.replica: member.incarnation for member in self._members()}
        answers = await self._directory.ask_all(asked, self._deadlines.status_s)
        await self._directory.describe_all(asked, self._deadlines.status_s)
        for replica, status in answers.items():
            if status is None:
                self.unanswered(replica, asked[replica])
            elif asked[replica] in ("", status.incarnation):
                self._feed(Seen(replica, status))
            else:
                # Another process answers there: the member is gone, whatever the newcomer does next.
                failure = Failure("replica_lost", "another process answers in its place", replica=replica)
                self._feed(Lost(replica, asked[replica], failure))

    def unanswered(self, replica: str, incarnation: str) -> None:
        """Count one miss; tell the machine once, when they are too many."""
        if self._directory.missed(replica) == self._deadlines.lost_after:
            self._feed(Lost(replica, incarnation, Failure("replica_lost", "it does not answer", replica=replica)))


#: Seconds between two rounds. A staging that is shorter is never asked about.
EVERY_S = 0.5


class ProgressPoll:
    """`replicas`: who takes part. `tell(serial, done, total)` hears the sums over them.

    Nothing is decided here, and a member that does not answer is not counted as missing: that is the probe's business.
    """

    def __init__(
        self,
        directory: MemberDirectory,
        clock: Clock,
        status_s: float,
        replicas: Callable[[], Iterable[str]],
        tell: Callable[[int, int, int], None],
    ) -> None:
        self._directory, self._clock, self._status_s = directory, clock, status_s
        self._replicas, self._tell = replicas, tell
        self._task: asyncio.Task[None] | None = None

    def begin(self, serial: int) -> None:
        self.end()
        self._task = asyncio.get_running_loop().create_task(self._run(serial))

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self, serial: int) -> None:
        while True:
            await self._clock.sleep(EVERY_S)
            reached = [self._directory.participant(replica) for replica in self._replicas()]
            asked = [self._directory.ask(each, self._status_s) for each in reached if each is not None]
            said = [answer.progress for answer in await asyncio.gather(*asked) if answer is not None]
            mine = [each for each in said if each is not None and each.serial == serial]
            if mine:
                self._tell(serial, sum(each.done for each in mine), sum(each.total for each in mine))
