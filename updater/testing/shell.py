"""What lies around the fleet machine in memory: a network, a journal, clocks, processes, and a coordinator that may die
at any effect.
"""

from __future__ import annotations

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
from updater.core.participant import Fence, FrontStatus, Kind
from updater.core.replica_steps import OPERATOR
from updater.core.state import FleetState
from updater.testing.replica import SimulatedReplica
from updater.testing.values import Source, Violation


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


class Shell:
    """A coordinator and its replicas. Performs effects; decides nothing and lets nothing happen by itself."""

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

    # --- processes

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
        if verb in OPERATOR:
            self.note(f"{name}: {verb} {reply[0].code if isinstance(reply, tuple) else 'ok'}")
            return
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

    def check(self) -> None:
        """See `promises`."""


def short(fence: Fence) -> str:
    return f"{fence.epoch}.{fence.serial}.{fence.attempt}"
