"""Everything that can happen in a simulation, as data: each `Action` names a method `do_<kind>`."""

from __future__ import annotations

from typing import Any

from updater.core.errors import Failure
from updater.core.fleet import events
from updater.core.fleet.effects import (
    Accepted,
    Denied,
    Effect,
)
from updater.core.fleet.state import Phase
from updater.core.participant import (
    Call,
    Claimed,
    DiskOffer,
    FrontState,
    Kind,
    ReadmitRequest,
    ReleaseRequest,
    ReleaseTo,
    SpareState,
    StreamOffer,
)
from updater.core.replica.state import Asked, AuditFailed, LeaseTimer, RankDied, SpareLost, Told
from updater.core.replica.table import SERVING, SHUT_UNINSTALLED
from updater.testing.promises import Watched
from updater.testing.shell import short
from updater.testing.values import Action, Disk, SimulatedSource, Violation


class Happenings(Watched):
    """`actions`, `timers` and `retries` list what may happen next; `perform` lets one thing happen."""

    # --- clients

    def join(self, name: str) -> Effect | None:
        process = self.replicas[name]
        known = self.state.member(name) if self.state else None
        gone = known is not None and known.incarnation != process.incarnation
        self.feed(events.Joined(process.describe(self.now), old_gone=gone))
        return self.answers[-1] if self.answers else None

    def begin(
        self,
        update: str,
        step: int | None,
        *,
        content: str | None = None,
        manifest: str = "",
        stream: bool = False,
        **rest: Any,
    ) -> Effect:
        """Ask for step `step` of the current run, from a path that holds `content`, or from a sender of it."""
        path = f"/{update}"
        self.sources[path] = SimulatedSource(content or f"bytes-{update}")
        offer = StreamOffer("broadcast", path, "s") if stream else DiskOffer(path)
        return self.ask(events.Begin(update, update, step=step, offer=offer, manifest=manifest, **rest))

    def rollback(self, update: str, **rest: Any) -> Effect:
        return self.ask(events.Begin(update, update, kind=Kind.ROLLBACK, **rest))

    def ask(self, event: events.ClientEvent) -> Effect:
        """A client's event; its one answer."""
        count = len(self.answers)
        self.note(f"client: {type(event).__name__} {getattr(event, 'update', getattr(event, 'replica', ''))}".rstrip())
        self.feed(event)
        given = self.answers[count:]
        if self.state is not None and len(given) != 1:
            raise Violation("I9", f"{type(event).__name__} was answered {len(given)} times")
        if given and isinstance(given[0], Accepted) and isinstance(event, events.Begin) and self.state is not None:
            self.open_updates.add(event.update)
            self.open_updates -= {result.update for result in self.results}
        self.check()
        return given[0] if given else Denied((Failure("coordinator_restarted", "died before it answered"),))

    # --- what may happen

    def actions(self) -> list[Action]:
        """Everything that can happen next without anybody outside doing anything, most natural first."""
        found = [Action("recorded")] if self.durable else []
        found += [Action("deliver", (packet.number,)) for packet in self.wire]
        found += [Action("work", (p.name, queue)) for p in self.replicas.values() if p.alive for queue in p.jobs]
        return found

    def timers(self) -> list[Action]:
        """Deadlines, back-offs and leases that may run out."""
        found = [Action("backoff")] if self.backoff and self.state else []
        found += [Action("deadline")] if self.deadline and self.state else []
        if self.state and self.state.phase is Phase.READY and not self.backoff:
            found.append(Action("update_lease"))
        found += [Action("lease", (p.name,)) for p in self.replicas.values() if p.alive and p.lease_timer is not None]
        return found

    def retries(self) -> list[Action]:
        """Sends that were not answered may go out again."""
        return [Action("retry", (name,)) for name in sorted(self.outbox)]

    def perform(self, action: Action) -> None:
        """Let it happen, then check every promise."""
        self.happenings += 1
        if self.dies_at is not None and self.happenings > self.dies_at[0]:
            victim, self.dies_at = self.dies_at[1], None
            self.do_die(victim)
            if action not in self.actions():
                return
        getattr(self, f"do_{action.kind}")(*action.args)
        self.check()

    def do_recorded(self) -> None:
        self.feed(self.durable.pop(0))

    def do_deliver(self, number: int, keep: bool = False) -> None:
        """`keep`: the network delivers it once more later."""
        packet = next(each for each in self.wire if each.number == number)
        if not keep:
            self.wire.remove(packet)
        if packet.to:
            process = self.replicas.get(packet.to)
            if process is not None and process.alive and isinstance(packet.payload, Told):
                self.note(f"-> {packet.to}: is told that it is {packet.payload.claim.value}")
                process.handle(packet.payload, self.now)
            elif process is not None and process.alive:
                self.note(f"-> {packet.to}: {packet.payload.verb} {short(packet.payload.fence)}")
                process.handle(Asked(packet.payload.verb, packet.payload.request), self.now)
            return
        event = packet.payload
        if self.state is None or packet.epoch != self.state.epoch:
            return
        if isinstance(event, events.Replied | events.Refused):
            said = "ok" if isinstance(event, events.Replied) else event.failures[0].code
            self.note(f"<- {event.replica}: {event.verb} {short(event.fence)} {said}")
            send = self.outbox.get(event.replica)
            if send is not None and (send.verb, send.fence) == (event.verb, event.fence):
                del self.outbox[event.replica]
        self.feed(event)

    def do_drop(self, number: int) -> None:
        self.wire = [packet for packet in self.wire if packet.number != number]

    def do_repeat(self, number: int) -> None:
        self.do_deliver(number, keep=True)

    def do_work(self, name: str, queue: str) -> None:
        self.replicas[name].advance(queue, self.now)

    def do_fault(self, name: str, verb: str, code: str = "rank_failed", after: int = 0) -> None:
        """The next `verb` work of this replica fails when `after` ranks have done theirs."""
        self.replicas[name].faults[verb] = (Failure(code, "injected"), after)

    def do_retry(self, name: str) -> None:
        self._transmit(self.outbox[name])

    def do_deadline(self) -> None:
        event, self.deadline = self.deadline, None
        self.note("clock: deadline")
        if event is not None:
            self.feed(event)

    def do_backoff(self) -> None:
        event, self.backoff = self.backoff, None
        self.note("clock: back-off ends")
        if event is not None:
            self.feed(event)

    def do_update_lease(self) -> None:
        """The client that should have committed went away."""
        if self.state is not None and self.state.update is not None:
            self.note("clock: update lease is over")
            self.feed(events.LeaseExpired(self.state.update.update))

    def do_lease(self, name: str) -> None:
        """Time passes until this lease is over, and its timer fires."""
        process = self.replicas[name]
        self.do_pass_lease(name)
        process.handle(LeaseTimer(), self.now)

    def do_pass_lease(self, name: str) -> None:
        """Time passes, but the timer is late: only handling a message notices."""
        self.now = max(self.now, self.replicas[name].lease_timer or self.now)
        self.note(f"clock: lease of {name} is over")

    def do_lost(self, name: str) -> None:
        member = self.state.member(name) if self.state else None
        if member is not None:
            self.note(f"coordinator: {name} is out of reach")
            self.feed(events.Lost(name, member.incarnation, Failure("replica_lost", "no answer", replica=name)))

    def do_poll(self, name: str) -> None:
        """A status is read now and arrives whenever the network likes."""
        process = self.replicas[name]
        if process.alive and self.state is not None:
            self._put("", events.Seen(name, process.describe(self.now).status))

    def do_die(self, name: str) -> None:
        self.note(f"{name}: dies")
        self.replicas[name].die()

    def do_rank_dies(self, name: str) -> None:
        self.note(f"{name}: a rank dies")
        self.replicas[name].handle(RankDied(Failure("rank_died", "injected", replica=name, rank=1)), self.now)

    def do_audit_fails(self, name: str, rotten: bool = True) -> None:
        """The audit finds other bytes on the last rank. Not `rotten`: it erred."""
        process = self.replicas[name]
        if not process.alive or process.state.state not in (*SERVING, *SHUT_UNINSTALLED):
            return
        self.note(f"{name}: an audit fails")
        if rotten:
            process.ranks[-1].live = "rotten"
        audited, failure = process.state.live, Failure("tensor_digest", "injected", replica=name, rank=1)
        process.handle(AuditFailed(audited, failure), self.now)

    def do_spare_lost(self, name: str) -> None:
        """The audit finds other bytes in the kept copy of the last rank."""
        process = self.replicas[name]
        kept = process.state.spare
        if not process.alive or process.state.state not in SERVING or kept.state is not SpareState.PREVIOUS:
            return
        self.note(f"{name}: the kept copy is lost")
        process.ranks[-1].spare = "rotten"
        process.handle(SpareLost(kept, Failure("tensor_digest", "injected", replica=name, rank=1)), self.now)

    def do_readmit(self, name: str) -> None:
        """An operator asks a quarantined replica to prove itself."""
        process = self.replicas[name]
        self.lives[name] += 1
        self.note(f"operator: readmit {name}")
        request = ReadmitRequest(process.state.last_heard(), f"{name}{self.lives[name]}")
        process.handle(Asked("readmit", request), self.now)

    def do_release(self, name: str, to: ReleaseTo = ReleaseTo.LIVE) -> None:
        """An operator opens a replica by hand."""
        process = self.replicas[name]
        self.note(f"operator: release {name} to {to.value}")
        process.handle(Asked("release", ReleaseRequest(process.state.last_heard(), to)), self.now)

    # --- whom a front obeys

    def do_call(self, name: str) -> None:
        """A front asks whether it is still a member; the answer takes the network's time."""
        process = self.replicas[name]
        if not process.alive or process.state.state in (FrontState.JOINING, FrontState.BROKEN) or self.state is None:
            return
        said = process.describe(self.now).status
        call = Call(name, said.incarnation, said.fleet, said.epoch, said.serial, said.live_version, said.live_digest,
                    said.state)  # fmt: skip
        held = self.state.hold
        self.feed(events.Called(call))
        answer = self.answers[-1] if self.answers else None
        if not isinstance(answer, Claimed):
            return
        self.answers.pop()
        if self.state is not None and self.state.hold is not None and self.state.hold != held:
            self.note(f"coordinator: holds: {self.state.hold.code}")
        self.heard_from.add((name, said.incarnation))
        self._put(name, Told(answer.claim, answer.fleet, answer.epoch, said.incarnation))

    def do_hold_ends(self) -> None:
        """Two watch intervals are over: by then every front that lives and has history has called."""
        waiting = [p for p in self.replicas.values() if p.alive and p.state.fleet and p.admission is not None]
        if all((p.name, p.incarnation) in self.heard_from for p in waiting):
            self.note("clock: the coordinator has listened long enough")
            self.feed(events.HoldEnded())

    def do_rejoin(self, name: str) -> None:
        """An orphan calls again, is told the same, and proves its bytes to join as a new incarnation."""
        if self.replicas[name].state.state is FrontState.ORPHANED:
            self.do_readmit(name)

    def open_labels(self) -> dict[str, tuple[str, str]]:
        """Who is open, on what, of those that no operator has called dead."""
        return {
            p.name: p.admission
            for p in self.replicas.values()
            if p.alive and p.admission is not None and (p.name, p.incarnation) not in self.removed
        }

    def do_adopt_all(self) -> None:
        """What an operator does about a coordinator that holds: the fronts that hold the last version are adopted, and
        the others are restarted. If there is none, a new fleet begins.
        """
        last = self.published
        label = (str(last.version), last.digest) if last is not None else None
        names = ""
        for process in self.replicas.values():
            held = process.state.held
            ours = process.alive and process.state.fleet and (held.version, held.digest) == label
            if ours and process.state.state in (FrontState.OPEN, FrontState.ORPHANED):
                names += process.name
            elif process.alive and process.state.fleet:
                self.do_die(process.name)
        for name in self.replicas:
            if not self.replicas[name].alive:
                self.start_replica(name)
        if names:
            self.adopt(names)
        else:
            self.crash()
            self.restart(new_fleet=True)

    def lose_journal(self, older: Disk | None = None) -> None:
        """The coordinator is gone and so is what it knew, or all but an older copy."""
        if self.state is not None:
            self.crash()
        self.note(
            "operator: the journal is lost" if older is None else "operator: an older journal is put in its place"
        )
        self.disk = older.copy() if older is not None else Disk(fleet=f"other{self.coordinators}")
        self.listens = True
        if older is not None and not self._proofs():
            # It served nowhere yet, or where it did is gone: who reads the older journal cannot know of it.
            self.truth = list(self.disk.records)

    def _proofs(self) -> list[str]:
        """Replicas of a fleet that say they hold its last publication."""
        last = self.published
        label = (str(last.version), last.digest) if last is not None else None
        states = {name: process.state for name, process in self.replicas.items() if process.alive}
        of_fleet = {
            name: state for name, state in states.items() if state.fleet and state.state is not FrontState.BROKEN
        }
        return [name for name, state in of_fleet.items() if (state.held.version, state.held.digest) == label]

    def do_reborn(self, name: str) -> None:
        self.start_replica(name)

    def do_join(self, name: str) -> None:
        self.join(name)

    def do_remove(self, name: str) -> None:
        """An operator confirms that a process is dead, which it is."""
        if self.state is None:
            return
        member = self.state.member(name)
        self.ask(events.Left(name, dead=True))
        if member is not None:
            self.removed.add((name, member.incarnation))
        self.disk.remove(name)

    def do_crash(self) -> None:
        self.crash()

    def do_crash_in(self, effects: int) -> None:
        self.crash_in = effects

    def do_restart(self, silent: tuple[str, ...] = ()) -> None:
        self.restart(frozenset(silent))

    def do_generate(self, name: str) -> None:
        self.requests += 1
        token = self.replicas[name].generate(self.requests // 3, self.requests % 2)
        if token is None:
            return
        if (name, self.replicas[name].incarnation) in self.removed:
            return  # an operator said that it is dead
        last = self.published
        if last is None or (token.label, set(token.made_by)) != (str(last.version), {last.digest}):
            raise Violation("I3", f"{name} answers {token.label} made by {token.made_by}")
