"""Broken machines, as data: each is one small change of the source that a promise or a story must notice."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from types import ModuleType

import updater.core
from updater.testing import Machines

#: In the order of their imports. The others (values, events, effects) are shared with the test.
MODULES = (
    "fleet.table",
    "fleet.votes",
    "fleet.requests",
    "fleet.flow",
    "fleet.members",
    "fleet.begin",
    "fleet.lineage",
    "fleet.machine",
    "fleet.recovery",
    "replica.steps",
    "replica.staging",
    "replica.pause",
    "replica.install",
    "replica.operator",
    "replica.claims",
    "replica.table",
    "replica.machine",
)
SOURCES = Path(updater.core.__file__).parent


@dataclass(frozen=True, slots=True)
class Change:
    """`before` stands exactly once in the module's source."""

    module: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    changes: tuple[Change, ...]


def one(name: str, module: str, before: str, after: str) -> Mutant:
    return Mutant(name, (Change(module, before, after),))


MUTANTS = (
    one(
        "published without one invalidate acknowledgement",
        "fleet.flow",
        "    if update.waiting or update.recording:",
        "    if len(update.waiting) > (state.phase is Phase.INVALIDATING) or update.recording:",
    ),
    one(
        "decided without one pause acknowledgement",
        "fleet.flow",
        "    if update.waiting or update.recording:",
        "    if len(update.waiting) > (state.phase is Phase.PAUSING) or update.recording:",
    ),
    one(
        "ready without one vote",
        "fleet.flow",
        "    if update.waiting or update.recording:",
        "    if len(update.waiting) > (state.phase is Phase.VERIFYING) or update.recording:",
    ),
    one(
        "verified before the stream was sealed",
        "fleet.flow",
        "    if state.phase is Phase.STAGING and update.awaits_seal:",
        "    if state.phase is Phase.STOPPED and update.awaits_seal:",
    ),
    one("resumed before published", "fleet.table", "done=Phase.PUBLISHING,", "done=Phase.RESUMING,"),
    one("installed without a decision", "fleet.table", "done=Phase.DECIDING,", "done=Phase.INSTALLING,"),
    Mutant(
        "decided after the install",
        (
            Change("fleet.table", "done=Phase.DECIDING,", "done=Phase.INSTALLING,"),
            Change("fleet.table", "done=Phase.INVALIDATING,", "done=Phase.DECIDING,"),
            Change("fleet.table", "done=Phase.INSTALLING)", "done=Phase.INVALIDATING)"),
        ),
    ),
    Mutant(
        "no cache is invalidated",
        (
            Change("fleet.table", "done=Phase.INVALIDATING,", "done=Phase.PUBLISHING,"),
            Change(
                "replica.table",
                'ReplicaRow((S.INVALIDATED,), "resume", installing.resume_new',
                'ReplicaRow((S.INSTALLED, S.INVALIDATED), "resume", installing.resume_new',
            ),
            Change(
                "replica.table",
                'ReplicaRow((S.INVALIDATED,), "resume done"',
                'ReplicaRow((S.INSTALLED, S.INVALIDATED), "resume done"',
            ),
        ),
    ),
    one("a stale version is accepted", "fleet.begin", "if version <= state.highest:", "if version == state.live:"),
    one(
        "a rollback frees its version",
        "fleet.flow",
        "return replace(state, live=new, before=old)",
        "return replace(state, live=new, before=old, highest=new.label.version)",
    ),
    one("lost members do not block", "fleet.begin", "        if not member.shut\n", "        if False\n"),
    one(
        "lost members count as shut",
        "fleet.flow",
        "    return replace(member, standing=Standing.LOST, owed=owed)",
        "    return replace(member, standing=Standing.LOST, owed=owed, shut=True)",
    ),
    one(
        "the vote is not compared",
        "fleet.votes",
        'return _unequal(observed, "copies_differ", "the members hold different bytes") or',
        "return",
    ),
    Mutant(
        "a catch-up takes what it finds",
        (
            Change("replica.staging", "if plan.digest and reply.observed != plan.digest:", "if False:"),
            Change("fleet.votes", "if value != update.digest", "if False"),
            Change("fleet.votes", "if reply.staged_digest != update.digest:", "if False:"),
        ),
    ),
    one(
        "the pause does not re-assert",
        "fleet.votes",
        "    if phase is not Phase.PAUSING or not isinstance(reply, PauseReply):",
        "    if phase is not Phase.PAUSING or isinstance(reply, PauseReply):",
    ),
    one("any failed pause is tried again", "fleet.flow", "failure.code in TIME_CODES for", "failure.code for"),
    one(
        "the restore skips a member",
        "fleet.flow",
        "for member in present(state) if not (row.tolerant and",
        "for member in present(state)[state.phase is Phase.RESTORING :] if not (row.tolerant and",
    ),
    one(
        "the install is not taken back",
        "fleet.table",
        "trouble=Phase.RESTORING,\n        timer=Phase.INSTALLING",
        "trouble=Phase.REOPENING,\n        timer=Phase.INSTALLING",
    ),
    one(
        "a client aborts after the decision",
        "fleet.table",
        "trouble=Phase.RESTORING,\n        timer=Phase.INVALIDATING",
        "trouble=Phase.RESTORING,\n        undo=Phase.RESTORING,\n        timer=Phase.INVALIDATING",
    ),
    one(
        "late answers count",
        "fleet.machine",
        "return event.verb == TABLE[state.phase].verb and event.fence == wanted",
        "return wanted is not None",
    ),
    one(
        "the loss of an old incarnation counts",
        "fleet.machine",
        "    if member is None or member.incarnation != event.incarnation:\n        return state, ()\n",
        "    if member is None:\n        return state, ()\n",
    ),
    one(
        "joiners are admitted at any time",
        "fleet.begin",
        "    if state.phase is Phase.IDLE and not state.starting:\n        state, more = _admissions",
        "    if not state.starting:\n        state, more = _admissions",
    ),
    one(
        "a second live process takes the id",
        "fleet.members",
        "known.standing is not Standing.LOST and not event.old_gone",
        "known.standing is Standing.OK and event.old_gone",
    ),
    one(
        "the journal fails and it goes on",
        "fleet.machine",
        "return replace(state, phase=Phase.STOPPED), (Stop(event.failure),)",
        "return state, ()",
    ),
    one(
        "no deadline for the restore",
        "fleet.table",
        "timer=Phase.RESTORING,\n        seconds=_install,",
        "timer=Phase.RESTORING,",
    ),
    # recovery
    one("recovery keeps the epoch", "fleet.lineage", "epoch = 1 + max(known, newest)", "epoch = max(known, newest)"),
    one(
        "recovery reuses serials",
        "fleet.recovery",
        "serial=max([journal.serial, *(r.serial for r in journal.records), *(r.serial for r in answered)]),",
        "serial=0,",
    ),
    one(
        "recovery goes forward on one report",
        "fleet.recovery",
        "    if all(report is not None and _has_installed(last, report) for report in same):",
        "    if any(report is not None and _has_installed(last, report) for report in same):",
    ),
    one(
        "recovery takes back what is published",
        "fleet.recovery",
        "        if last.kind is RecordKind.PUBLISHED:\n            return _resume(state, update, Phase.RESUMING)\n",
        "",
    ),
    one(
        "recovery forgets silent members",
        "fleet.recovery",
        "    state, sends = _owed_by_silent(state, last, reports)\n",
        "    sends: tuple[Effect, ...] = ()\n",
    ),
    one(
        "an empty journal is trusted",
        "fleet.lineage",
        "            state = replace(state, hold=members.adopt_needed(call.replica, call.fleet))",
        "            pass",
    ),
    one(
        "an empty journal does not listen",
        "fleet.recovery",
        "hold=None if new_fleet else LISTENING,",
        "hold=None,",
    ),
    one(
        "an older journal is trusted",
        "fleet.recovery",
        "    if older or otherwise(state, journal, reports):",
        "    if older and not older:",
    ),
    one(
        "an older journal leads whoever answers",
        "fleet.lineage",
        'return not_newest("a member does not answer", replica)',
        "continue",
    ),
    one(
        "an older journal takes an adopted fleet back",
        "fleet.lineage",
        "    if journal.taken_over or newest // ADOPTION > known // ADOPTION:",
        "    if False:",
    ),
    one(
        "an unknown front was removed",
        "fleet.lineage",
        "        elif call.state in SERVES:",
        "        elif not (claim := Claim.REMOVED):",
    ),
    one("joiners are told before they are led", "fleet.begin", "        if member.unled:\n", "        if False:\n"),
    one(
        "a held coordinator begins", "fleet.begin", "    if state.hold is not None:\n        return (state.hold,)\n", ""
    ),
    one("a held coordinator admits", "fleet.begin", "    if state.hold is not None:\n        return state, ()\n", ""),
    one(
        "a fleet that was taken over is not given up",
        "fleet.lineage",
        "    if status.fleet == state.fleet and status.epoch > state.epoch:",
        "    if False:",
    ),
    one(
        "two coordinators on one journal live on",
        "replica.machine",
        'fence.epoch == state.epoch and "" != state.owner < fence.owner',
        "False",
    ),
    one(
        "any verb leads",
        "replica.machine",
        "    if (fence.fleet, fence.epoch, fence.owner) != (state.fleet, state.epoch, state.owner):",
        "    if False:",
    ),
    one(
        "an unclaimed front is shut",
        "replica.machine",
        "        return replace(state, unclaimed=True), ()",
        '        return _apply(state, "removed", event, now)',
    ),
    # the front
    one("old messages are obeyed", "replica.machine", "if fence.order() < state.mark:", "if False:"),
    one(
        "tombstones are ignored",
        "replica.machine",
        "if event.verb in steps.FORWARD and state.tombstoned(event.fence):",
        "if False:",
    ),
    one(
        "leases are only checked by their timer",
        "replica.machine",
        "    expired, effects = _end_lease(state, now)\n",
        "    expired, effects = _end_lease(state, now) if isinstance(event, LeaseTimer) else (state, ())\n",
    ),
    Mutant(
        "the lease runs on while ranks install",
        (
            Change(
                "replica.install",
                "state=FrontState.INSTALLING, lease_end=None, old=state.live)",
                "state=FrontState.INSTALLING, old=state.live)",
            ),
            Change(
                "replica.table",
                'ReplicaRow(SHUT_UNINSTALLED, "lease ends"',
                'ReplicaRow((*SHUT_UNINSTALLED, S.INSTALLING), "lease ends"',
            ),
        ),
    ),
    one(
        "an install is not compared and set",
        "replica.install",
        "    return begin(state, event, ClearLease())",
        "    return begin(replace(state, state=FrontState.PAUSED), event, ClearLease())",
    ),
    one("a repeated request runs twice", "replica.steps", "    if work is None or (", "    if True or ("),
    one(
        "a restore does not wait for ranks to stop",
        "replica.install",
        'if state.postponed is None or state.work("install") or state.work("invalidate"):',
        "if state.postponed is None:",
    ),
    one(
        "a restore leaves the label",
        "replica.install",
        "        live=state.old or state.live,\n",
        "        live=state.live,\n",
    ),
    one(
        "a lease that ends leaves the admission shut",
        "replica.pause",
        "    return reopen(tombstone(state, fence), fence, ())",
        "    return replace(tombstone(state, fence), lease_end=None), (ClearLease(),)",
    ),
    one(
        "a joiner opens without being asked",
        "replica.install",
        "    return tombstone(state, event.fence), ack(event)\n\n\n# --- the way back",
        "    opened = replace(tombstone(state, event.fence), state=FrontState.OPEN)\n"
        "    return opened, (OpenAdmission(state.live.version, state.live.digest), *ack(event))\n\n\n# ---",
    ),
    one(
        "a join is not compared", "replica.staging", "    if state.live.digest != request.digest:\n", "    if False:\n"
    ),
    one(
        "discarding keeps the staging",
        "replica.staging",
        "    if state.plan is None and state.spare.state in (SpareState.EMPTY, SpareState.PREVIOUS):\n",
        "    if True:\n",
    ),
    one(
        "a failed audit goes on serving",
        "replica.operator",
        "    after, effects = _out_of_service(state, FrontState.QUARANTINED, event.failure)\n",
        "    after, effects = state, ()\n",
    ),
    one("a lost copy stays the way back", "replica.operator", "spare=EMPTY, reached=", "reached="),
    one(
        "a readmission opens by itself",
        "replica.operator",
        "    return fresh, (Rejoin(), *answers)",
        "    opened = OpenAdmission(fresh.live.version, fresh.live.digest)\n"
        "    return replace(fresh, state=FrontState.OPEN), (Rejoin(), opened, *answers)",
    ),
    one(
        "a readmission forgets what was taken back",
        "replica.operator",
        "        live=state.old or state.live,\n",
        "        live=state.live,\n",
    ),
    one(
        "a readmission is the same life",
        "replica.operator",
        "incarnation=request.incarnation",
        "incarnation=state.incarnation",
    ),
)


@contextmanager
def machines(mutant: Mutant | None) -> Iterator[Machines]:
    """Fresh copies of the machine modules with the mutant's changes; None: unchanged copies."""
    names = [f"updater.core.{module}" for module in MODULES]
    saved = {name: sys.modules[name] for name in names}
    try:
        loaded = {module: _load(module, mutant) for module in MODULES}
    finally:
        for name, module in saved.items():
            sys.modules[name] = module
            _attach(name, module)
    machines = ("fleet.machine", "replica.machine", "fleet.recovery", "fleet.lineage")
    yield Machines(*(loaded[name] for name in machines))


def _load(module: str, mutant: Mutant | None) -> ModuleType:
    path = SOURCES / f"{module.replace('.', '/')}.py"
    source = path.read_text()
    for change in mutant.changes if mutant else ():
        if change.module == module:
            if source.count(change.before) != 1:
                raise LookupError(
                    f"{mutant and mutant.name}: found {source.count(change.before)} times: {change.before}"
                )
            source = source.replace(change.before, change.after)
    name = f"updater.core.{module}"
    spec = util.spec_from_file_location(name, path)
    if spec is None:
        raise LookupError(name)
    fresh = util.module_from_spec(spec)
    sys.modules[name] = fresh
    _attach(name, fresh)
    exec(compile(source, str(path), "exec"), fresh.__dict__)
    return fresh


def _attach(name: str, module: ModuleType) -> None:
    """As an attribute of its package too: `from updater.core.fleet import flow` reads it there."""
    package, _, last = name.rpartition(".")
    setattr(sys.modules[package], last, module)
