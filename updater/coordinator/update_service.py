"""Where clients are served: begin, repeat, renew, seal, commit, abort; and the receipt at the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from updater.coordinator.clock import OrderedClock
from updater.coordinator.journal.journal import Journal, JournalError
from updater.coordinator.machine import Machine, MachineObserver
from updater.coordinator.recovery import RecoveredFleet, result_of
from updater.coordinator.requests import (
    Before,
    ParsedRequest,
    asked_rollback,
    asked_update,
    checked_manifest,
    sealed_manifest,
)
from updater.coordinator.updates import (
    Lease,
    PhaseTimer,
    Update,
    ended_update,
    facts_of,
    past_update,
    receipt_of,
    request_of,
    settled,
    shortened,
)
from updater.core.errors import CODES, Failure, LiveweightsError, Rejected, Unavailable
from updater.core.fleet import events as ev
from updater.core.fleet.effects import Denied, Finish, Started
from updater.core.fleet.state import Fleet, Member, Phase, Transaction
from updater.core.participant import Kind, StreamOffer
from updater.core.policy import CommitMode
from updater.protocol import wire
from updater.protocol.answers import DtypesState, MemberState, OfferState, ProgressState, Receipt, UpdateState
from updater.protocol.api import RollbackRequest, UpdateRequest
from updater.protocol.problems import RejectedWith
from updater.server.metrics import Metrics
from updater.settings import Settings


class UpdateService(MachineObserver):
    """The updates of one coordinator. Every method may raise LiveweightsError."""

    def __init__(
        self,
        settings: Settings,
        journal: Journal,
        machine: Machine,
        clock: OrderedClock,
        metrics: Metrics,
        dtypes: Callable[[], DtypesState],
        member: Callable[[Member], MemberState],
    ) -> None:
        self._settings, self._journal, self._machine = settings, journal, machine
        self._clock, self._metrics, self._dtypes, self._member = clock, metrics, dtypes, member
        self._running: dict[str, Update] = {}  # and waiting, by id
        self._unpruned = 0  # updates that ended since history was cut
        self.closed: Failure | None = None  # why nothing new is taken in

    # -- beginning

    def begin_update(self, request: UpdateRequest) -> Update:
        """A new update, or the one that this request began before (I7)."""
        with self._counted(Kind.UPDATE):
            self.must_run()
            state, settings = self._machine.state, self._settings
            known, extended = self._known, settings.extended
            asked = asked_update(request, state, settings.allowed_roots, self._journal.manifest, known, extended)
            if request.dtypes is not None and self._known(asked.event.update) is None:
                self._same_dtypes(request.dtypes)
            return self._begin(asked)

    def _same_dtypes(self, fingerprint: str) -> None:
        """Check that the dtypes by which the trainer rounded are those that the participants hold now."""
        try:
            now = self._dtypes().fingerprint
        except LiveweightsError as error:
            raise self.error(Failure("dtypes_changed", str(error))) from None
        if now != fingerprint:
            raise self.error(Failure("dtypes_changed", f"{fingerprint[:12]} was read, now it is {now[:12]}"))

    def begin_rollback(self, request: RollbackRequest) -> Update:
        with self._counted(Kind.ROLLBACK):
            self.must_run()
            return self._begin(asked_rollback(request, self._machine.state.serial))

    @contextmanager
    def _counted(self, kind: Kind) -> Iterator[None]:
        """Count an error that is raised before an update begins, and fill in what is live."""
        try:
            yield
        except LiveweightsError as error:
            error.live_version = error.live_version or self._machine.live_version
            self._metrics.refused(kind.value, error.code)
            raise

    def _begin(self, asked: ParsedRequest) -> Update:
        event = asked.event
        known = self._known(event.update)
        if known is not None:
            if known.body_hash != event.body_hash:
                raise self.error(Failure("id_reused", f"{event.update!r} was used with another body"))
            return self.find(event.update)
        update = self._new(event.update, event.body_hash, asked.body, event.kind, asked.version)
        update.source = asked.source
        if event.manifest:
            self._keep(update, event.manifest)
        answer = self._machine.ask(event)
        if isinstance(answer, Denied):
            self._running.pop(update.id, None)
            raise self._denied(answer)
        seconds = self._lease_seconds(asked)
        if seconds is not None and not update.done.is_set():
            update.lease = Lease(self._clock, seconds, lambda: self._machine.feed(ev.LeaseExpired(update.id)))
        return update

    def _keep(self, update: Update, manifest: str) -> None:
        try:
            update.manifests.add(self._journal.keep_manifest(manifest))
        except JournalError:
            self._running.pop(update.id, None)
            raise

    def _new(self, update_id: str, body_hash: str, body: str, kind: Kind, version: str) -> Update:
        update = Update(update_id, body_hash, body, kind, version, self._clock.stamp(), PhaseTimer(self._clock.now()))
        self._running[update_id] = update
        return update

    def _lease_seconds(self, asked: ParsedRequest) -> float | None:
        """A disk push that commits by itself needs no client to come back."""
        if asked.lease_s is not None:
            return asked.lease_s
        manual = asked.event.policy.commit is CommitMode.MANUAL
        needed = manual or isinstance(asked.event.offer, StreamOffer)
        return self._settings.deadlines.update_lease_s if needed else None

    def _known(self, update_id: str) -> Before | None:
        running = self._running.get(update_id)
        if running is not None:
            return Before(running.body_hash)
        request = self._journal.request(update_id)
        if request is None:
            return None
        if not request.receipt:
            return Before(request.body_hash)
        return Before(request.body_hash, Receipt.model_validate_json(request.receipt), settled(request).source)

    # -- while it runs

    def find(self, update_id: str) -> Update:
        """An update that runs, waits or ended. Raises `not_found`."""
        running = self._running.get(update_id)
        if running is not None:
            return running
        request = self._journal.request(update_id)
        if request is None or request.receipt is None:
            raise self.error(Failure("not_found", f"no update {update_id!r}"))
        return ended_update(request, Receipt.model_validate_json(request.receipt))

    def view(self, update: Update) -> UpdateState:
        state = update.state(self._clock.now())
        if update.receipt is None:
            return state.model_copy(update={"offer": self._offer(update)})
        return state.model_copy(update={"phases_ms": update.receipt.phases_ms})

    def _offer(self, update: Update) -> OfferState | None:
        running = self._machine.state.update
        if running is None or running.serial != update.serial or not isinstance(running.offer, StreamOffer):
            return None
        if self._machine.state.phase is not Phase.STAGING:
            return None
        return OfferState.model_validate(running.offer, from_attributes=True)

    def renew(self, update_id: str) -> Update:
        """Raises `lease_expired` if it comes too late; harmless for an update without a lease."""
        update = self._going_on(update_id)
        if update.lease is not None:
            update.lease.renew()
        return update

    def seal(self, update_id: str, digests: Mapping[str, str]) -> Update:
        """The stream is complete. Where the commit comes by itself, no client has to come back from here on."""
        update = self._going_on(update_id)
        running = self._machine.state.update
        seal = ev.Seal(update_id)
        if running is not None and running.update == update_id and running.awaits_seal and digests:
            manifest = sealed_manifest(running.manifest, digests)
            update.manifests.add(self._journal.keep_manifest(manifest.to_json()))
            seal = ev.Seal(update_id, tuple(digests.items()), manifest.to_json(), manifest.digest)
        self._tell(update, seal)
        if update.lease is not None and running is not None and running.policy.commit is CommitMode.AUTO:
            update.lease.cancel()
            update.lease = None
        return update

    def commit(self, update_id: str) -> Update:
        """A manual commit. Once it is accepted the coordinator's deadlines rule, not the client's lease."""
        update = self._tell(self._going_on(update_id), ev.CommitRequested(update_id))
        if update.lease is not None:
            update.lease.cancel()
            update.lease = None
        return update

    def abort(self, update_id: str, causes: tuple[Failure, ...] = ()) -> Update:
        """`causes`: in the client's words. Raises `bad_request` for one that names a replica without a part in it."""
        update = self._going_on(update_id)
        running = self._machine.state.update
        participants = running.participants if running is not None and running.update == update_id else ()
        strangers = {cause.replica for cause in causes if cause.replica} - {replica for replica, _ in participants}
        if strangers:
            raise self.error(Failure("bad_request", f"{min(strangers)!r} takes no part in {update_id}"))
        return self._tell(update, ev.AbortRequested(update_id, causes))

    def _going_on(self, update_id: str) -> Update:
        self.must_run()
        update = self.find(update_id)
        if update.receipt is not None:
            code = "lease_expired" if update.receipt.reason == "lease_expired" else "wrong_phase"
            raise self.error(Failure(code, f"{update_id} ended: {update.receipt.outcome}"))
        if update.lease is not None and update.lease.left <= 0:
            # Hazard 9: what comes after the lease and before its timer is late all the same.
            self._machine.feed(ev.LeaseExpired(update_id))
            raise self.error(Failure("lease_expired", f"the lease of {update_id} is over"))
        return update

    def _tell(self, update: Update, event: ev.ClientEvent) -> Update:
        answer = self._machine.ask(event)
        if isinstance(answer, Denied):
            raise self._denied(answer)
        return update

    # -- what the machine reports

    def on_moved(self, before: Fleet, after: Fleet) -> None:
        """Tell the timeline and the watchers the phase of the running update."""
        update = self._by_serial(after.update.serial) if after.update is not None else None
        if update is None or after.update is None:
            return
        update.attempt = after.update.attempt
        if before.phase is Phase.VERIFYING and after.phase in (Phase.READY, Phase.PAUSING):
            self._settle(update, after.update)
        if before.phase is not after.phase or before.update is None:
            update.phase, update.progress = after.phase.value, None
            update.timeline.enter(after.phase, self._clock.now())
            update.events.enter(after.phase)
            self._show(update)

    def _settle(self, update: Update, voted: Transaction) -> None:
        """The vote is complete and nothing has paused: what it said becomes durable."""
        phases_ms = update.timeline.phases_ms(self._clock.now())
        update.facts = facts_of(voted, update.plans, update.observed, phases_ms, update.source)
        self._journal.put_facts(update.id, wire.encode(update.facts).decode())

    def _show(self, update: Update) -> None:
        """Show the update's state to its watchers. Nothing is made within the pause if no client watches."""
        if update.events.watchers:
            update.events.tell("phase", self.view(update))

    def progress(self, serial: int, done: int, total: int) -> None:
        """Bytes of a staging, over all members."""
        update = self._by_serial(serial)
        if update is not None:
            update.progress = ProgressState(done=done, total=total)
            update.events.tell("progress", {"phase": update.phase, "done": done, "total": total})

    def on_event(self, event: ev.Event) -> None:
        """Keep what a member replied, and tell the watchers."""
        update = self._by_serial(event.fence.serial) if isinstance(event, ev.Replied) else None
        if isinstance(event, ev.Replied) and update is not None:
            update.heard(event.replica, event.reply)
            update.events.tell("progress", {"replica": event.replica, "verb": event.verb, "phase": update.phase})

    def on_started(self, started: Started) -> None:
        """The serial becomes durable before anybody hears of it."""
        update = self._running.get(started.update)
        if update is None:
            name = started.update or f"catch-up-{started.serial}"
            update = self._new(name, "", "{}", started.kind, str(started.version))
        update.serial, update.version = started.serial, str(started.version)
        self._journal.add_request(request_of(update))
        self._move_now(update)

    def _move_now(self, update: Update) -> None:
        state = self._machine.state
        if state.update is not None and state.update.serial == update.serial:
            update.phase = state.phase.value
            update.timeline.enter(state.phase, self._clock.now())
            self._show(update)

    def on_finished(self, finish: Finish, before: Fleet) -> None:
        """The receipt is durable before anybody reads it. It names a member too that left by what ended the update."""
        result = finish.result
        update = self._by_serial(result.serial) if result.serial else self._running.get(result.update)
        if update is None:
            return
        known = {(each.replica, each.incarnation): each for each in (*before.members, *self._machine.state.members)}
        members = {each.replica: self._member(known[each.replica, each.incarnation]) for each in result.members}
        receipt = receipt_of(update, result, members, self._clock.now(), self._clock.stamp())
        if not update.serial:
            self._journal.add_request(request_of(update))
        self._journal.put_receipt(update.id, receipt.model_dump_json())
        self._running.pop(update.id, None)
        self._metrics.ended(receipt)
        update.end(receipt)
        self._clock.call_later(0, self._tidy)  # after the clients have their answers

    def _tidy(self) -> None:
        if self._machine.stopped is None:
            with suppress(JournalError):
                self._journal.tidy()
                self._unpruned += 1
                if self._unpruned >= max(1, self._settings.history // 10):
                    self._prune()

    def _prune(self) -> None:
        """Old requests, records and manifests go. Now and then, since it looks at all of them."""
        self._unpruned = 0
        named = {name for update in self._running.values() for name in update.manifests}
        self._journal.prune(self._settings.history, shortened, named, self._clock.wall())

    def recover(self, found: RecoveredFleet) -> None:
        """After a restart: what goes on is waited for again, what ended without a receipt gets one."""
        for request in found.going_on:
            update = self._new(request.id, request.body_hash, request.body, Kind(request.kind), "")
            update.serial, update.created = request.serial, request.created
            update.restarted, update.facts = True, settled(request)
        for ended in found.ended:
            now = self._clock.now()
            update = past_update(ended.request, now)
            update.restarted, update.facts = True, settled(ended.request)
            receipt = receipt_of(update, result_of(ended, found.state), {}, now, self._clock.stamp())
            self._journal.put_receipt(update.id, receipt.model_dump_json())
            self._metrics.ended(receipt)
        self._prune()

    def on_stopped(self, failure: Failure) -> None:
        """End the wait of every client: this coordinator will know no more of its updates."""
        self.closed = failure
        for update in self._running.values():
            update.end(None)

    def _by_serial(self, serial: int) -> Update | None:
        return next((update for update in self._running.values() if update.serial == serial and serial), None)

    def put_manifest(self, digest: str, text: bytes) -> str:
        """Keep an uploaded manifest. Raises `manifest_invalid`, `manifest_mismatch`."""
        self.must_run()
        manifest = checked_manifest(text)
        if manifest.digest != digest:
            raise self.error(Failure("manifest_mismatch", f"the document's digest is {manifest.digest}"))
        self._journal.put_manifest(digest, manifest.to_json())
        return digest

    def manifest(self, digest: str) -> str:
        text = self._journal.manifest(digest)
        if text is None:
            raise self.error(Failure("not_found", f"no manifest {digest}"))
        return text

    # -- views and errors

    @property
    def running(self) -> tuple[Update, ...]:
        """The updates that run or wait."""
        return tuple(self._running.values())

    def history(self, limit: int) -> list[Receipt]:
        """Receipts of the past, newest first."""
        requests = self._journal.requests(limit=limit)
        return [Receipt.model_validate(json.loads(each.receipt)) for each in requests if each.receipt is not None]

    def must_run(self) -> None:
        failure = self.closed or self._machine.stopped
        if failure is not None:
            raise self.error(failure)

    def _denied(self, answer: Denied) -> LiveweightsError:
        """The error of a refusal, with the id of the update in the way, so that the caller can watch or abort it
        (B144).
        """
        error = self.error(*answer.failures)
        if not answer.active:
            return error
        return RejectedWith(*error.failures, live_version=error.live_version, members={"active": answer.active})

    def error(self, *failures: Failure) -> LiveweightsError:
        """Refused at the door, with what is live."""
        kind = Unavailable if CODES[failures[0].code] in (500, 503) else Rejected
        return kind(*failures, live_version=self._machine.live_version)
