"""A whole fleet in memory: the real machines, simulated replicas, a network, a journal and a clock that are all moved
by hand.

Nothing happens by itself. `actions()` lists what may happen next, `perform` lets one thing happen and then checks the
promises. Messages may be lost, repeated, late or out of order; a coordinator may crash before or after every effect.
Same actions, same history.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from updater.core import events, fleet, recovery, replica
from updater.core.effects import (
    Accepted,
    Admit,
    Append,
    ClearDeadline,
    Denied,
    Effect,
    Finish,
    Forget,
    Outcome,
    Record,
    RecordKind,
    Result,
    Send,
    SetBackoff,
    SetDeadline,
    Started,
    Stop,
)
from updater.core.errors import Failure
from updater.core.participant import DiskOffer, Fence, FrontState, FrontStatus, Kind, SpareState
from updater.core.replica_state import Asked, LeaseTimer, RankDied
from updater.core.state import FleetState, Phase, Standing
from updater.testing.replica import SimulatedReplica, Source, Violation


@dataclass(frozen=True, slots=True)
class Machines:
    """What is under test: the real modules, or broken copies of them."""

    fleet: Any = fleet
    replica: Any = replica
    recovery: Any = recovery


@dataclass(frozen=True, slots=True)
class Packet:
    """On the wire. `to` is a replica, or "" for the coordinator. `epoch`: the life of the coordinator that it left or
    is for; replies to a dead one go nowhere.
    """

    number: int
    to: str
    epoch: int
    payload: Any


@dataclass(frozen=True, slots=True)
class Action:
    """Something that may happen. `kind` names a method `do_<kind>` of the simulation."""

    kind: str
    args: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return " ".join([self.kind, *(str(arg) for arg in self.args)])


@dataclass(slots=True)
class Disk:
    """What survives a coordinator."""

    records: list[Record] = field(default_factory=list)
    members: dict[str, recovery.KnownMember] = field(default_factory=dict)
    epoch: int = 0
    serial: int = 0


class Simulation:
    """`fleet_name` with no member yet. See `actions`, `perform`, `settle`."""

    def __init__(self, *, machines: Machines | None = None, ranks: int = 2) -> None:
        self.machines, self.rank_count = machines or Machines(), ranks
        self.now = 0.0
        self.sources: dict[str, Source] = {}
        self.replicas: dict[str, SimulatedReplica] = {}
        self.lives: dict[str, int] = {}
        self.disk = Disk(epoch=1)
        self.state: FleetState | None = FleetState("fleet", 1)
        self.wire: list[Packet] = []
        self.packets = 0
        self.outbox: dict[str, Send] = {}
        self.deadline: events.Deadline | None = None
        self.backoff: events.BackoffEnded | None = None
        self.durable: list[events.Recorded] = []
        self.crash_in: int | None = None
        self.effects = 0
        self.happenings = 0
        self.dies_at: tuple[int, str] | None = None
        self.results: list[Result] = []
        self.ended: dict[str, tuple[int, Outcome]] = {}
        self.open_updates: set[str] = set()
        self.answers: list[Effect] = []
        self.requests = 0
        self.log: list[str] = []
        self.stopped = False

    # --- a coordinator's shell

    def feed(self, event: events.Event) -> None:
        """One step of the fleet machine, and its effects."""
        if self.state is None:
            return
        before = self.state.phase
        after, effects = self.machines.fleet.step(self.state, event)
        self.state = after
        if after.phase is not before:
            attempt = after.update.attempt if after.update else 0
            self.note(
                f"coordinator: {before.value} -> {after.phase.value}" + (f" (attempt {attempt})" if attempt else "")
            )
        if isinstance(event, events.Joined) and any(isinstance(effect, Accepted) for effect in effects):
            self._remember(event)
        self.do_effects(effects)

    def _remember(self, event: events.Joined) -> None:
        """A member is journaled before anything is done about it."""
        status = event.description.status
        known = recovery.KnownMember(status.replica, status.incarnation, event.description.url, "config")
        self.disk.members[status.replica] = known

    def do_effects(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            if self._crashes():
                return
            self._perform(effect)
        if effects:
            self._crashes()

    def _crashes(self) -> bool:
        """The coordinator dies before the effect whose turn it is."""
        self.effects += 1
        if self.crash_in is None:
            return False
        self.crash_in -= 1
        if self.crash_in >= 0:
            return False
        self.crash()
        return True

    def crash(self) -> None:
        self.note("coordinator: dies")
        self.state, self.crash_in = None, None
        self.outbox, self.deadline, self.backoff, self.durable = {}, None, None, []
        self.open_updates = set()
        self.wire = [packet for packet in self.wire if packet.to]

    def restart(self, silent: frozenset[str] = frozenset(), *, adopt: bool = False) -> None:
        """A new life on the same disk; `silent` members do not answer its first question."""
        known = tuple(self.disk.members.values())
        reports: dict[str, FrontStatus | None] = {}
        for name in sorted(self.disk.members):
            process = self.replicas.get(name)
            answers = process is not None and process.alive and name not in silent
            reports[name] = process.describe(self.now).status if process and answers else None
        journal = recovery.Journal(tuple(self.disk.records), known, self.disk.epoch, self.disk.serial)
        plan = self.machines.recovery.recover("fleet", journal, reports, adopt=adopt)
        if plan.refusal is not None:
            self.note(f"coordinator: refuses to start ({plan.refusal.code})")
            self.answers.append(Denied((plan.refusal,)))
            return
        self.state = plan.state
        self.disk.epoch, self.disk.serial = plan.state.epoch, max(self.disk.serial, plan.state.serial)
        self.note(f"coordinator: starts as epoch {plan.state.epoch}, {plan.state.phase.value}")
        self.do_effects(plan.effects)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            self.outbox[effect.replica] = effect
            self._transmit(effect)
        elif isinstance(effect, Append):
            self._append(effect.record)
        elif isinstance(effect, SetDeadline):
            self.deadline = events.Deadline(effect.phase, effect.serial, effect.attempt)
        elif isinstance(effect, ClearDeadline):
            self.deadline = None
        elif isinstance(effect, SetBackoff):
            self.backoff = events.BackoffEnded(effect.serial, effect.attempt)
        elif isinstance(effect, Forget):
            self.outbox.pop(effect.replica, None)
        elif isinstance(effect, Finish):
            self._finish(effect.result)
        elif isinstance(effect, Started):
            self.disk.serial = max(self.disk.serial, effect.serial)
        elif isinstance(effect, Accepted | Denied):
            self._answer_client(effect)
        elif isinstance(effect, Stop):
            self.note("coordinator: stops")
            self.stopped = True
            self.crash()
        elif isinstance(effect, Admit):
            self.note(f"coordinator: {effect.replica} serves")

    def _append(self, record: Record) -> None:
        """Durable at once; that it is, is told later or never."""
        if any(old.kind is RecordKind.PUBLISHED and old.serial == record.serial for old in self.disk.records):
            raise Violation("I3", f"serial {record.serial} was published and now: {record.kind}")
        if record.kind is RecordKind.DECIDED and record.op is Kind.UPDATE:
            decided = [old.version for old in self.disk.records if old.kind is RecordKind.DECIDED]
            if any(record.version <= old for old in decided):
                raise Violation("I3", f"{record.version} is decided after {max(decided)}")
        self.note(f"journal: {record.kind.value} {record.version} of {[name for name, _ in record.members]}")
        self.disk.records.append(record)
        self.disk.serial = max(self.disk.serial, record.serial)
        self.durable.append(events.Recorded(record.kind, record.serial, record.attempt))

    def _finish(self, result: Result) -> None:
        old = self.ended.get(result.update) if result.update else None
        if old is not None and (self.state is None or old[0] == self.state.epoch or old[1] is not result.outcome):
            raise Violation("I4", f"update {result.update} ends twice")
        self.ended[result.update] = (self.state.epoch if self.state else 0, result.outcome)
        self.open_updates.discard(result.update)
        self.results.append(result)
        self.note(
            f"coordinator: {result.kind.value} of {result.version} {result.outcome.value} {result.reason}".rstrip()
        )

    def _answer_client(self, effect: Accepted | Denied) -> None:
        self.answers.append(effect)
        what = "accepted" if isinstance(effect, Accepted) else f"denied ({effect.failures[0].code})"
        self.note(f"client: {what}")

    def _transmit(self, send: Send) -> None:
        self._put(send.replica, send)

    def _put(self, to: str, payload: Any) -> None:
        self.packets += 1
        epoch = self.state.epoch if self.state else 0
        self.wire.append(Packet(self.packets, to, epoch, payload))

    def note(self, line: str) -> None:
        self.log.append(line)

    # --- processes and clients

    def start_replica(self, name: str, base: str = "base") -> SimulatedReplica:
        """A new process under this name; an old one must be dead."""
        self.lives[name] = self.lives.get(name, 0) + 1
        process = SimulatedReplica(
            name,
            f"{name}{self.lives[name]}",
            self.sources,
            lambda verb, fence, reply: self._reply(name, verb, fence, reply),
            ranks=self.rank_count,
            base=base,
            step=self.machines.replica.step,
        )
        process.log = self.note
        process.on_install = lambda *args: self._may_install(*args)
        self.replicas[name] = process
        self.note(f"{name}: starts on {base}")
        return process

    def _reply(self, name: str, verb: str, fence: Fence, reply: Any) -> None:
        event: events.Event
        if isinstance(reply, tuple):
            event = events.Refused(name, verb, fence, reply)
        else:
            event = events.Replied(name, verb, fence, reply)
        if self.state is not None:
            self._put("", event)

    def _may_install(self, process: SimulatedReplica, plan: Any, fence: Fence) -> None:
        """I8: a durable decision, of exactly this attempt; a catch-up only to what is published."""
        if plan.kind is Kind.CATCH_UP:
            last = self.published
            if last is None or (plan.version, plan.digest) != (str(last.version), last.digest):
                raise Violation("I8", f"{process.name} is caught up to {plan.version}, which is not live")
            return
        keys = {(r.serial, r.attempt) for r in self.disk.records if r.kind is RecordKind.DECIDED}
        if (fence.serial, fence.attempt) not in keys:
            raise Violation("I8", f"{process.name} installs {plan.version}, which is not decided")

    @property
    def published(self) -> Record | None:
        """The last durable publication."""
        return next((r for r in reversed(self.disk.records) if r.kind is RecordKind.PUBLISHED), None)

    def join(self, name: str) -> Effect | None:
        process = self.replicas[name]
        known = self.state.member(name) if self.state else None
        gone = known is not None and known.incarnation != process.incarnation
        self.feed(events.Joined(process.describe(self.now), old_gone=gone))
        return self.answers[-1] if self.answers else None

    def begin(self, update: str, step: int, *, content: str | None = None, manifest: str = "", **rest: Any) -> Effect:
        """Ask for step `step` of the current run, from a path that holds `content`."""
        path = f"/{update}"
        self.sources[path] = Source(content or f"bytes-{update}")
        event = events.Begin(update, update, step=step, offer=DiskOffer(path), manifest=manifest, **rest)
        return self.ask(event)

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
            if process is not None and process.alive:
                self.note(f"-> {packet.to}: {packet.payload.verb} {_short(packet.payload.fence)}")
                process.handle(Asked(packet.payload.verb, packet.payload.request), self.now)
            return
        event = packet.payload
        if self.state is None or packet.epoch != self.state.epoch:
            return
        if isinstance(event, events.Replied | events.Refused):
            said = "ok" if isinstance(event, events.Replied) else event.failures[0].code
            self.note(f"<- {event.replica}: {event.verb} {_short(event.fence)} {said}")
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

    def do_reborn(self, name: str) -> None:
        self.start_replica(name)

    def do_join(self, name: str) -> None:
        self.join(name)

    def do_remove(self, name: str) -> None:
        """An operator confirms that a process is dead, which it is."""
        self.ask(events.Left(name, dead=True))
        self.disk.members.pop(name, None)

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
        last = self.published
        if last is None or (token.label, set(token.made_by)) != (str(last.version), {last.digest}):
            raise Violation("I3", f"{name} answers {token.label} made by {token.made_by}")

    # --- promises

    def check(self) -> None:
        """Raise Violation if any promise is broken now."""
        last = self.published
        for process in self.replicas.values():
            process.check()
            label = process.admission
            if label is not None and (last is None or label != (str(last.version), last.digest)):
                raise Violation("I1", f"{process.name} is open on {label}, live is {last and last.version}")
        if self.state is not None:
            self._check_coordinator(self.state)

    def _check_coordinator(self, state: FleetState) -> None:
        last = self.published
        if state.live and last and state.live.label.digest != last.digest and state.phase is not Phase.PUBLISHING:
            raise Violation("I3", f"live is {state.live.label}, published is {last.version}")
        update = state.update
        if update is not None and update.waiting and self.deadline is None and not update.recording:
            raise Violation("I9", f"waits for {sorted(update.waiting)} in {state.phase} without a deadline")
        if state.phase is Phase.IDLE and (update is not None or self.deadline is not None):
            raise Violation("I4", "idle with an update or a deadline left")

    # --- moving it by hand

    def run(
        self, *, until: Phase | None = None, hold: Callable[[Packet], bool] = lambda _: False, limit: int = 1000
    ) -> None:
        """What happens naturally, without retries and timers, up to the entry of phase `until`. Packets for which
        `hold` says yes stay on the wire.
        """
        for _ in range(limit):
            if until is not None and self.state is not None and self.state.phase is until:
                return
            kept = {packet.number for packet in self.wire if hold(packet)}
            ready = [action for action in self.actions() if not (action.kind == "deliver" and action.args[0] in kept)]
            if not ready:
                return
            self.perform(ready[0])

    def work(self, name: str, queue: str = "control", times: int | None = None) -> None:
        """Ranks of one replica do `times` pieces of work, or all there is."""
        process = self.replicas[name]
        while queue in process.jobs and times != 0:
            self.perform(Action("work", (name, queue)))
            times = None if times is None else times - 1

    def on_wire(self, verb: str, to: str = "") -> list[Packet]:
        """Requests for replica `to`, or replies of that verb."""
        return [packet for packet in self.wire if packet.to == to and getattr(packet.payload, "verb", "") == verb]

    # --- the end of a history

    def settle(self, *, timers: bool = True, limit: int = 4000) -> None:
        """Everything that can happen happens, on a network that loses nothing: first messages and work, then retries,
        and timers only when nothing else is left.
        """
        for _ in range(limit):
            natural = self.actions()
            if natural:
                self.perform(natural[0])
                continue
            waiting = [a for a in self.retries() if self.replicas[a.args[0]].alive]
            if waiting:
                self.perform(waiting[0])
                if not self.actions():
                    raise Violation("I9", f"{waiting[0]} has no effect")
                continue
            pending = self.timers() if timers else []
            if not pending:
                return
            self.perform(pending[0])
        raise Violation("I9", f"does not settle; last: {self.log[-12:]}")

    def heal(self) -> None:
        """Operators do what they must: the coordinator runs, broken and dead processes are replaced, all rejoin."""
        self.crash_in = None
        if self.state is None:
            self.restart()
        for _ in range(3):
            self.settle()
            for name in list(self.replicas):
                self._repair(name)

    def _repair(self, name: str) -> None:
        process = self.replicas[name]
        if process.alive and process.state.state in (FrontState.BROKEN, FrontState.QUARANTINED):
            process.die()
        if not process.alive:
            self.start_replica(name)
        process.faults.clear()
        self.do_poll(name)
        self.settle()
        self.join(name)
        self.settle()

    def check_settled(self) -> None:
        """After `heal`: nothing hangs, nothing is held, everybody serves the one live version or is joining."""
        state = self.state
        if state is None or state.phase is not Phase.IDLE or state.queue or self.open_updates:
            raise Violation("I4", f"not at rest: {state and state.phase}, unfinished {sorted(self.open_updates)}")
        for process in self.replicas.values():
            if process.state.spare.state is SpareState.UNKNOWN:
                continue  # its ranks failed to let go, and it says so
            if process.jobs or process.held or process.state.plan is not None:
                raise Violation("I6", f"{process.name} still holds {sorted(process.held)} {process.jobs}")
        for member in state.members:
            stuck = member.standing not in (Standing.OK, Standing.JOINING)
            process = self.replicas[member.replica]
            if stuck or (member.standing is Standing.OK) != (process.admission is not None):
                raise Violation("I9", f"{member.replica} is {member.standing}, its front {process.state.state}")
            if member.standing is Standing.JOINING and self._could_serve(state):
                raise Violation("I9", f"{member.replica} is not brought to the live version")

    def _could_serve(self, state: FleetState) -> bool:
        """Whether a joiner can be caught up at all: the source is known, still there and unchanged."""
        live = state.live
        if live is None or live.offer is None:
            return False
        source = self.sources.get(live.offer.path)
        return source is not None and source.content == live.label.digest


def _short(fence: Fence) -> str:
    return f"{fence.epoch}.{fence.serial}.{fence.attempt}"
