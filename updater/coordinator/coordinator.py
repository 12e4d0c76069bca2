"""The coordinator: the parts put together, its life from recovery to the last goodbye, and what it shows.

All methods run on one event loop. Decisions are the fleet machine's (`updater.core`), clients are served by
`updates`, replicas come and go through `joins`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable

from updater.coordinator.clock import Clock, LoopClock, OrderedClock
from updater.coordinator.journal.journal import Journal, JournalError
from updater.coordinator.machine import Machine, MachineObserver
from updater.coordinator.members.directory import FailureDetector, MemberDirectory, MemberHandle, ProgressPoll
from updater.coordinator.members.joins import MembershipService, Recent, stranger_of
from updater.coordinator.members.models import dtypes_of
from updater.coordinator.members.participants import ParticipantFactory, http_participants
from updater.coordinator.outbox import Outbox
from updater.coordinator.recovery import FleetRecovery, RecoveredFleet
from updater.coordinator.sources import sources_needed
from updater.coordinator.update_service import UpdateService
from updater.core.errors import Failure, Unavailable
from updater.core.fleet import events as ev
from updater.core.fleet.begin import candidates
from updater.core.fleet.effects import Denied
from updater.core.fleet.members import obstacle
from updater.core.fleet.state import Fleet, Member, Phase, Standing
from updater.core.participant import Call, Claim, Claimed, FrontStatus, Kind
from updater.protocol import wire
from updater.protocol.answers import DtypesState, FleetState, MemberState, ModelState, StrangerState, VersionState
from updater.server.metrics import Metrics
from updater.settings import Settings

_log = logging.getLogger("liveweights.coordinator")


class Coordinator(MachineObserver):
    """`start` before anything else, `close` at the end. `on_stop` is called once if it has to stop by itself."""

    def __init__(
        self,
        settings: Settings,
        make: ParticipantFactory | None = None,
        clock: Clock | None = None,
        on_stop: Callable[[Failure], None] = lambda _failure: None,
        journal: Journal | None = None,
    ) -> None:
        deadlines, make = settings.deadlines, make or http_participants(settings)
        self.settings, self.metrics = settings, Metrics()
        self._clock, self._on_stop, self._make = OrderedClock(clock or LoopClock()), on_stop, make
        self._journal = journal or Journal(settings.state_folder, settings.fleet)
        self._directory = MemberDirectory()
        self._machine = Machine(self._journal, self._clock)
        feed = self._machine.feed
        self._outbox = Outbox(self._clock, deadlines, self._directory.participant, feed, self._unanswered)
        self._machine.attach(self._outbox)
        self._detector = FailureDetector(
            self._directory, self._clock, deadlines, lambda: self.state.members, feed, self._look_again
        )
        self.updates = UpdateService(
            settings, self._journal, self._machine, self._clock, self.metrics, self.dtypes, self._view
        )
        self.joins = MembershipService(
            make, self._directory, self._journal, self._machine, self.updates, deadlines, self._clock
        )
        self._machine.observers = (self.updates, self.joins, self)
        self._staging = ProgressPoll(
            self._directory, self._clock, deadlines.status_s, self._participants, self.updates.progress
        )
        self._probing: asyncio.Task[None] | None = None
        self._owning: asyncio.Task[None] | None = None
        self._recovered = False
        self._said: set[Failure] = set()
        self._copies: set[str] = set()  # owners that lost against this one
        self._owner = secrets.token_hex(8)
        self._strangers = Recent[StrangerState](self._clock, 5 * deadlines.watch_s)
        self._recovery = FleetRecovery(self._journal, self._directory, self._make, settings, self._clock, self._owner)
        self._leads_nobody = self._adopting = False

    async def start(self) -> None:
        """Take the fleet over, recover, and begin to probe. Raises JournalError."""
        if self._journal.new:
            where, fleet = self.settings.state_folder, self.settings.fleet
            _log.warning("a new journal in %s: fleet %r begins without history", where, fleet)
        self._clock.begin_after(self._journal.newest())
        self._go_on(await self._recovery.run())
        await self._detector.once()
        self._recovered = True
        loop = asyncio.get_running_loop()
        self._probing = loop.create_task(self._detector.run())
        self._owning = loop.create_task(self._watch_ownership())

    async def _watch_ownership(self) -> None:
        """Stop soon after another coordinator began on this journal, also if there is nothing to append."""
        while self.stopped is None:
            await self._clock.sleep(self.settings.deadlines.probe_every_s)
            with contextlib.suppress(JournalError):
                self._journal.must_own()

    def _go_on(self, found: RecoveredFleet) -> None:
        hold = found.state.hold
        self._leads_nobody = hold is not None and hold.code == "behind"
        self.updates.recover(found)
        self._machine.begin(found.state, found.effects)
        if hold is not None and hold.code == "listening":
            # A front of an older fleet calls within one interval; two, since it may just have done so.
            self._clock.call_later(2 * self.settings.deadlines.watch_s, lambda: self._machine.feed(ev.HoldEnded()))

    async def _look_again(self) -> None:
        """After a round of probes: members that could not be led may say something else by now."""
        self._say_obstacles()
        hold = self.state.hold
        if self._leads_nobody and self.stopped is None and hold is not None and hold.code == "behind":
            found = await self._recovery.again()
            if found.state.hold != hold:
                self._go_on(found)

    def _say_obstacles(self) -> None:
        """Log each obstacle once, until another one takes its place."""
        now = set(self.obstacles())
        for failure in sorted(now - self._said, key=lambda each: each.replica):
            _log.warning("%s does not serve: %s: %s; %s", failure.replica, failure.code, failure.message, failure.hint)
        self._said = now

    def _hold_changed(self, before: Failure | None) -> None:
        """Log a hold once: each replica that calls repeats the same hold."""
        hold = self.state.hold
        if (hold.code if hold else "") == (before.code if before else ""):
            return
        if hold is None:
            _log.warning("holds no longer: updates and joins are taken")
        else:
            _log.error(
                "holds (%s), publishes nothing and admits no replica: %s; %s", hold.code, hold.message, hold.hint
            )

    async def wind_down(self) -> None:
        """Take nothing in, abort what is undecided, let what is decided finish within the deadline."""
        self.updates.closed = self.updates.closed or Failure("shut", "the coordinator is about to end")
        if self.stopped is None:
            self._abort_everything()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.settings.deadlines.shutdown_s):
                    await asyncio.gather(*(update.done.wait() for update in self.updates.running))

    async def close(self) -> None:
        """Wind down if that was not done, then leave nothing running."""
        await self.wind_down()
        self._staging.end()
        ending = self._end_tasks()
        await asyncio.gather(*ending, return_exceptions=True)
        self._machine.stop(Failure("shut", "the coordinator ended"))
        await self._outbox.close()
        await self._directory.close()
        self._journal.close()

    def kill(self) -> None:
        """End at once, as a crash would: on a second signal. The next one recovers."""
        self._staging.end()
        self._end_tasks()
        self._outbox.drop()
        self._machine.stop(Failure("shut", "killed"))

    def _end_tasks(self) -> list[asyncio.Task[None]]:
        tasks = [task for task in (self._probing, self._owning) if task is not None]
        for task in tasks:
            task.cancel()
        return tasks

    def _abort_everything(self) -> None:
        """Updates past their decision ignore the abort. Those that wait are aborted first, or they would begin."""
        serial = self.state.update.serial if self.state.update is not None else None
        for update in sorted(self.updates.running, key=lambda each: each.serial == serial):
            if update.kind is not Kind.CATCH_UP:
                self._machine.ask(ev.AbortRequested(update.id))

    @property
    def state(self) -> Fleet:
        return self._machine.state

    @property
    def stopped(self) -> Failure | None:
        """Why the coordinator stopped by itself, or that it was closed."""
        return self._machine.stopped

    # -- what the machine tells

    def on_moved(self, before: Fleet, after: Fleet) -> None:
        self._hold_changed(before.hold)
        if after.phase is not before.phase:
            self._watch_staging(after)
        if after.phase is Phase.IDLE and before.phase is not Phase.IDLE and after.live is not None:
            label = after.live.label
            for member in after.serving():
                if member.owed is None:
                    self._directory.settled(member, str(label.version), label.digest)

    def _watch_staging(self, state: Fleet) -> None:
        if state.phase is Phase.STAGING and state.update is not None:
            self._staging.begin(state.update.serial)
        else:
            self._staging.end()

    def _participants(self) -> list[str]:
        update = self.state.update
        return [replica for replica, _ in update.participants] if update is not None else []

    def on_event(self, event: ev.Event) -> None:
        if isinstance(event, ev.Seen):
            self._say_copy(event.replica, event.status)
        if isinstance(event, ev.Replied | ev.Refused):
            self._directory.answered(event.replica)

    def _say_copy(self, replica: str, status: FrontStatus) -> None:
        """Of two coordinators with one epoch, the one with the higher owner id stops, and logs that itself; the other
        one logs this.
        """
        mine = (status.fleet, status.epoch) == (self.state.fleet, self.state.epoch)
        higher = {owner for owner in (status.owner, status.rival) if owner > self._owner} - self._copies
        if mine and higher:
            self._copies |= higher
            _log.warning(
                "another coordinator, on a copy of this journal, has led %s with the same epoch %d, or asked to: this"
                " one goes on; give every coordinator a state folder of its own", replica, status.epoch,
            )  # fmt: skip

    def on_admitted(self, replica: str) -> None:
        """The replica serves what is live: shown at once, not only after the next probe."""
        live = self.state.live
        if live is not None:
            self._directory.now_serves(replica, str(live.label.version), live.label.digest)

    def on_stopped(self, failure: Failure) -> None:
        self._staging.end()
        self._outbox.drop()
        if failure.code == "taken_over":
            _log.error("stops: %s; %s", failure.message, failure.hint)
            with contextlib.suppress(JournalError):  # the fleet is another's now; so the next life knows it
                self._journal.put_taken_over()
        self._on_stop(failure)

    def _unanswered(self, replica: str, refused: bool) -> None:
        """No process listens at its address: as good as a missed probe. A slow answer says nothing."""
        member = self.state.member(replica)
        if refused and member is not None and self.stopped is None:
            self._detector.unanswered(replica, member.incarnation)

    # -- views

    @property
    def live_version(self) -> str | None:
        """What serves now, as a label."""
        return self._machine.live_version

    @property
    def ready(self) -> bool:
        """Whether an update could begin: recovered, not stopped, and somebody serves."""
        return (
            self._recovered
            and self.stopped is None
            and self.updates.closed is None
            and (self.state.hold is None or (self.state.listening and self.state.live is not None))
            and any(member.standing is Standing.OK for member in self.state.members)
        )

    def version(self) -> VersionState:
        since = self._journal.published_at()
        live, back = self.state.live, self.state.rollback_to
        return VersionState(
            version=self.live_version,
            digest=live.label.digest if live is not None else "",
            manifest_digest=live.manifest_digest if live is not None else "",
            since=since,
            rollback_to=str(back.version) if back is not None else None,
            epoch=self.state.epoch,
        )

    def members(self) -> list[MemberState]:
        return [self._view(member) for member in self.state.members]

    def _view(self, member: Member) -> MemberState:
        return self._directory.view(member, obstacle(self.state, member))

    def obstacles(self) -> list[Failure]:
        """Why replicas that want to serve do not: members that are not admitted, and those that may not join."""
        waiting = (obstacle(self.state, member) for member in self.state.members)
        return [*(failure for failure in waiting if failure is not None), *self.joins.refused()]

    def member(self, replica: str) -> MemberState:
        """Raises `not_found`."""
        member = self.state.member(replica)
        if member is None:
            raise self.updates.error(Failure("not_found", "no such member", replica=replica))
        return self._view(member)

    async def model(self) -> ModelState:
        found, live = await self.joins.model(), self.state.live
        return ModelState(
            version=self.live_version,
            manifest_digest=live.manifest_digest if live is not None else "",
            replica=found[0] if found is not None else "",
            document=wire.plain(found[1]) if found is not None else None,
            allow_suspicious=list(self.settings.allow_suspicious),
        )

    def fleet(self) -> FleetState:
        state = self.state
        serial = state.update.serial if state.update is not None else 0
        running = next((each.id for each in self.updates.running if serial and each.serial == serial), None)
        return FleetState(
            fleet=self.settings.fleet,
            identity=self.identity,
            hold=state.hold,
            strangers=self._strangers.all(),
            refused=self.joins.refused(),
            epoch=state.epoch,
            phase=Phase.STOPPED.value if self.stopped is not None else state.phase.value,
            live_version=self.live_version,
            rollback_to=str(state.rollback_to.version) if state.rollback_to is not None else None,
            update=running,
            sources_needed=sources_needed(state),
            members=self.members(),
        )

    def dtypes(self) -> DtypesState:
        """What all who take part in an update hold each source tensor in. Raises LiveweightsError where they differ, or
        one of them does not say.
        """
        return dtypes_of(self._directory.descriptions(candidates(self.state, Kind.UPDATE)))

    @property
    def identity(self) -> str:
        """Of the fleet, or empty while it has never published anything."""
        return self.state.fleet if self.state.has_history else ""

    def claim(self, call: Call, url: str) -> Claimed:
        """What a front is told that asks whether it is still a member. Raises Unavailable, which says nothing, while
        that is not known for certain.
        """
        if not self._recovered or self._adopting or self.stopped is not None:
            raise Unavailable(Failure("shut", "the coordinator is recovering, or stops"))
        answer = self._machine.ask(ev.Called(call))
        if isinstance(answer, Denied):
            raise Unavailable(*answer.failures)
        if not isinstance(answer, Claimed):
            raise Unavailable(Failure("internal", "a call was not answered"))
        if answer.claim is Claim.MEMBER:
            self._strangers.forget(call.replica)
        else:
            self._strangers.put(call.replica, stranger_of(call, url))
        return answer

    async def adopt(self, members: list[tuple[str, str]]) -> None:
        """Take over a fleet whose journal is lost: answers once every front that can be reached obeys. Raises
        LiveweightsError.
        """
        self.updates.must_run()
        hold = self.state.hold
        if (hold is None and self.state.has_history) or self._adopting:
            hint = "only a coordinator whose journal is empty, or behind, adopts a fleet"
            raise self.updates.error(Failure("wrong_phase", "this coordinator has a fleet already", hint=hint))
        self._adopting = True
        try:
            await self._adopt(members)
        finally:
            self._adopting = False

    async def _adopt(self, members: list[tuple[str, str]]) -> None:
        """A replica that waits here to be admitted asks again, as joiners do."""
        named = dict(members)
        known = []
        for replica, participant in {name: self.joins.reach(name, url) for name, url in named.items()}.items():
            handle = MemberHandle(participant)
            self._directory.put(replica, handle)
            known.append(await self.joins.named(replica, named[replica], handle))
        found = await self._recovery.adopt(known)
        for member in self._journal.members():
            self._journal.forget_member(member.replica)
        for member in known:
            self._journal.put_member(member)
        for replica in {member.replica for member in self.state.members} - set(named):
            self._directory.remove(replica)
        for replica in named:
            self._strangers.forget(replica)
        self._go_on(found)
        await self._detector.once()
