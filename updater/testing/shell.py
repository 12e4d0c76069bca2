"""What lies around the fleet machine in memory: a network, a journal, clocks, processes, and a coordinator that may die
at any effect.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from updater.core.fleet import events, lineage, recovery
from updater.core.fleet.effects import (
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
from updater.core.fleet.state import Fleet
from updater.core.participant import Claimed, Fence, FenceRequest, FrontStatus, Kind
from updater.core.replica.state import Asked
from updater.core.replica.steps import OPERATOR
from updater.testing.replica import SimulatedReplica
from updater.testing.values import Disk, Machines, Packet, Parked, SimulatedSource, Violation


class Shell:
    """A coordinator and its replicas. Performs effects; decides nothing and lets nothing happen by itself."""

    def __init__(self, *, machines: Machines | None = None, ranks: int = 2) -> None:
        self.machines, self.rank_count = machines or Machines(), ranks
        self.now = 0.0
        self.sources: dict[str, SimulatedSource] = {}
        self.replicas: dict[str, SimulatedReplica] = {}
        self.lives: dict[str, int] = {}
        self.disk = Disk(epoch=1)
        self.state: Fleet | None = Fleet("fleet", 1, owner="c1")
        self.coordinators = 1
        self.truth: list[Record] = []  # everything that was ever made durable, also in journals that were lost
        self.removed: set[tuple[str, str]] = set()  # members that an operator removed, or that were replaced
        self.owed: dict[tuple[str, Fence], Any] = {}
        self.listens = False  # whether a new life of the coordinator listens before it publishes and admits
        self.heard_from: set[tuple[str, str]] = set()  # fronts that called this life of the coordinator
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
        known = self.disk.members.get(status.replica)
        if known is not None and known.incarnation != status.incarnation:
            self.disk.remove(status.replica)
            self.removed.add((known.replica, known.incarnation))
        self.disk.gone = [pair for pair in self.disk.gone if pair != (status.replica, status.incarnation)]
        known = lineage.KnownMember(status.replica, status.incarnation, event.description.url, "v2:config")
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

    def restart(self, silent: frozenset[str] = frozenset(), *, new_fleet: bool | None = None) -> None:
        """A new life on the same disk; `silent` members do not answer its first question. `new_fleet`: it does not
        listen first; by default it does once a journal was lost.
        """
        self.heard_from = set()
        new_fleet = not self.listens if new_fleet is None else new_fleet
        self.coordinators += 1
        owner, disk = f"c{self.coordinators}", self.disk
        journal, names = disk.known(), sorted(disk.members)
        found = self.machines.lineage.survey(disk.fleet, journal, self._reports(names, silent))
        if found.hold is not None:
            plan = recovery.Recovery(self.machines.lineage.nobody_led(disk.fleet, journal, found))
        else:
            # Without a record nothing was ever said to anybody.
            reports = self._reports(names, silent)
            if disk.records:
                reports = self._lead(disk.fleet, found.epoch, owner, reports)
            plan = self.machines.recovery.recover(
                disk.fleet,
                journal,
                reports,
                epoch=found.epoch,
                owner=owner,
                older=found.older,
                new_fleet=new_fleet,
            )
        held = f", holds: {plan.state.hold.code}" if plan.state.hold else ""
        self.note(f"coordinator: starts as epoch {plan.state.epoch}, {plan.state.phase.value}{held}")
        self._take_up(plan)

    def adopt(self, names: str, silent: frozenset[str] = frozenset()) -> None:
        """An operator has the coordinator take over a fleet whose journal is lost."""
        self.coordinators += 1
        owner = f"c{self.coordinators}"
        reports = self._reports(list(names), silent)
        named = {name: lineage.KnownMember(name, report.incarnation if report else "")
                 for name, report in reports.items()}  # fmt: skip
        journal = replace(self.disk.known(), members=tuple(named.values()))
        found = self.machines.recovery.may_adopt(journal, reports)
        if found.refusal is not None:
            self.note(f"operator: adoption refused ({found.refusal.code})")
            self.answers.append(Denied((found.refusal,)))
            return
        reports = self._lead(found.fleet, found.epoch, owner, reports)
        plan = self.machines.recovery.adopt(found, journal, reports, owner=owner)
        self.disk.fleet, self.disk.members = found.fleet, named
        self.note(f"coordinator: adopts {', '.join(named)} as epoch {plan.state.epoch}")
        self._take_up(plan)

    def park(self) -> Parked:
        """The coordinator stands still: neither its messages nor its journal move until it is unparked."""
        parked = Parked(self.state, self.disk, self.outbox, self.deadline, self.backoff, self.durable)
        self.note("coordinator: stands still")
        self.state, self.disk, self.outbox = None, Disk(), {}
        self.deadline, self.backoff, self.durable = None, None, []
        self.wire = [packet for packet in self.wire if packet.to]
        return parked

    def unpark(self, parked: Parked) -> None:
        """It goes on as if nothing had happened. One that runs is gone."""
        self.note("coordinator: wakes up")
        self.state, self.disk, self.outbox = parked.state, parked.disk, parked.outbox
        self.deadline, self.backoff, self.durable = parked.deadline, parked.backoff, parked.durable

    def _reports(self, names: list[str], silent: frozenset[str]) -> dict[str, FrontStatus | None]:
        found: dict[str, FrontStatus | None] = {}
        for name in names:
            process = self.replicas.get(name)
            answers = process is not None and process.alive and name not in silent
            found[name] = process.describe(self.now).status if process and answers else None
        return found

    def _lead(
        self, fleet_id: str, epoch: int, owner: str, reports: dict[str, FrontStatus | None]
    ) -> dict[str, FrontStatus | None]:
        """The first word to every front that answered; its answer is what a recovery goes by."""
        for name, report in reports.items():
            if report is not None:
                fence = Fence(fleet_id, epoch, 0, 0, report.incarnation, owner)
                self.owed[(name, fence)] = None
                self.replicas[name].handle(Asked("lead", FenceRequest(fence)), self.now)
                answer = self.owed.pop((name, fence))
                reports[name] = answer if isinstance(answer, FrontStatus) else None
        return reports

    def _take_up(self, plan: recovery.Recovery) -> None:
        self.state = plan.state
        self.disk.epoch, self.disk.serial = plan.state.epoch, max(self.disk.serial, plan.state.serial)
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
        elif isinstance(effect, Claimed):
            self.answers.append(effect)
        elif isinstance(effect, Accepted | Denied):
            self._answer_client(effect)
        elif isinstance(effect, Stop):
            self.note(f"coordinator: stops ({effect.failure.code})")
            self.stopped = True
            self.disk.taken_over |= effect.failure.code == "taken_over"
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
        self.truth.append(record)
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
        if (name, fence) in self.owed:
            self.owed[(name, fence)] = reply
            return
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
        keys = {(r.serial, r.attempt) for r in self.truth if r.kind is RecordKind.DECIDED}
        if (fence.serial, fence.attempt) not in keys:
            raise Violation("I8", f"{process.name} installs {plan.version}, which is not decided")

    @property
    def published(self) -> Record | None:
        """The last durable publication."""
        return next((r for r in reversed(self.truth) if r.kind is RecordKind.PUBLISHED), None)

    def check(self) -> None:
        """See `promises`."""


def short(fence: Fence) -> str:
    return f"{fence.epoch}.{fence.serial}.{fence.attempt}"
