"""How an update begins: who is in the way, which version it gets, who takes part; and what IDLE does on its own."""

from __future__ import annotations

from dataclasses import replace

from updater.core.errors import Failure
from updater.core.fleet.effects import (
    Accepted,
    Append,
    Denied,
    Effect,
    Finish,
    Label,
    Outcome,
    Record,
    RecordKind,
    Result,
    Started,
)
from updater.core.fleet.events import Begin
from updater.core.fleet.flow import Moved, current, enter, present, undo
from updater.core.fleet.members import left_behind
from updater.core.fleet.requests import first_word, join_request, live
from updater.core.fleet.state import Fleet, Member, Phase, Published, Standing, Transaction
from updater.core.participant import DiskOffer, Kind, Offer, Seats, StreamOffer
from updater.core.policy import CommitMode, OnBusy, conflict
from updater.core.version import START, Version

#: Updates that may wait behind a running one.
QUEUE_LIMIT = 16


def begin(state: Fleet, event: Begin) -> Moved:
    """A client's begin. While a coordinator with history still listens for fronts, the begin waits in the queue."""
    if state.phase is Phase.IDLE and not state.starting and not (state.listening and state.live is not None):
        failures = refusals(state, event)
        return (state, (Denied(failures),)) if failures else start(state, event)
    active = state.update
    if active is None or _gives_way(active, event) or event.policy.on_busy is not OnBusy.REFUSE:
        return _begin_later(state, event)
    return state, (Denied((Failure("busy", f"update {active.update} is running"),), active.update),)


def _gives_way(active: Transaction, event: Begin) -> bool:
    return active.kind is Kind.CATCH_UP or (active.gives_way and not event.dry_run)


def _begin_later(state: Fleet, event: Begin) -> Moved:
    """Wait, or take the place of a running update. What a catch-up or a dry run does can wait, so neither makes a
    client wait that publishes.
    """
    active = state.update
    if len(state.queue) >= QUEUE_LIMIT:
        return state, (Denied((Failure("busy", f"{QUEUE_LIMIT} updates are waiting"),)),)
    waiting = replace(state, queue=(*state.queue, event))
    accepted = Accepted(event.update, queued=True)
    if active is None:
        return waiting, (accepted,)
    if _gives_way(active, event):
        moved = undo(waiting, "superseded") or (waiting, ())
        return moved[0], (accepted, *moved[1])
    if event.policy.on_busy is OnBusy.WAIT:
        return waiting, (accepted,)
    first = replace(state, queue=(event, *state.queue))
    if event.kind is Kind.UPDATE and wanted_version(state, event) <= active.version:
        failure = Failure("busy", f"{active.update} is not older than what wants to supersede it")
        return state, (Denied((failure,), active.update),)
    superseded = undo(first, "superseded")
    if superseded is None:
        return state, (Denied((Failure("busy", f"{active.update} is past its decision"),), active.update),)
    return superseded[0], (accepted, *superseded[1])


# --- checks


def refusals(state: Fleet, event: Begin) -> tuple[Failure, ...]:
    """The failures for which this update cannot begin now; empty if it can."""
    if state.hold is not None:
        return (state.hold,)
    unsupported = conflict(event.policy)
    if unsupported is not None:
        return (Failure("mode_unsupported", unsupported),)
    foreign = tuple(member.foreign for member in state.members if member.foreign is not None and not member.shut)
    if foreign:
        return foreign
    if state.live is None or not candidates(state, event.kind):
        return (Failure("no_members", "no replica to publish to"),)
    blocked = tuple(_blocks(state, event.kind))
    if blocked:
        return blocked
    problem = _rollback_problem(state, event) if event.kind is Kind.ROLLBACK else _update_problem(state, event)
    return (problem,) if problem else ()


def candidates(state: Fleet, kind: Kind) -> tuple[Member, ...]:
    """The members that take part: those that serve, and for an update also those that join. Members that are not led
    yet are left out.
    """
    standings = (Standing.OK,) if kind is Kind.ROLLBACK else (Standing.OK, Standing.JOINING)
    return tuple(member for member in state.members if member.standing in standings and not member.unled)


def _blocks(state: Fleet, kind: Kind) -> list[Failure]:
    """A silent member may be open on the old version. A joiner that was told to open is fenced by taking part, but a
    rollback leaves joiners out.
    """
    return [
        Failure("member_blocked", f"{member.standing.value}, and not known to be shut", replica=member.replica)
        for member in state.members
        if not member.shut
        and (
            member.standing in (Standing.LOST, Standing.QUARANTINED)
            or (kind is Kind.ROLLBACK and member.standing is Standing.JOINING)
        )
    ]


def wanted_version(state: Fleet, event: Begin) -> Version:
    """The version an update asks for. A bare step is one of the current run, or of the next with `new_run`."""
    highest = state.highest
    run = event.run if event.run is not None else highest.run + 1 if event.policy.new_run else highest.run
    if event.step is None:
        return Version(run, highest.step + 1 if run == highest.run else 0)
    return Version(run, event.step)


def _update_problem(state: Fleet, event: Begin) -> Failure | None:
    serving = live(state)
    if event.offer is None:
        return Failure("bad_request", "an update needs an offer")
    if isinstance(event.offer, StreamOffer):
        unknown = next((member for member in candidates(state, event.kind) if not member.ranks), None)
        if unknown is not None:
            return Failure("transport_unsupported", "does not say how many ranks it has", replica=unknown.replica)
    version = wanted_version(state, event)
    if version.step < 0:
        return Failure("bad_request", f"step {version.step} is negative")
    expected_run = state.highest.run + 1 if event.policy.new_run else state.highest.run
    if version <= state.highest:
        return Failure("stale_version", f"{version} does not exceed {state.highest}, the highest decided one")
    if version.run != expected_run:
        hint = "give a bare step for the current run; new_run (--new-run) opens the next one"
        return Failure("bad_request", f"run {version.run} is not {expected_run}", hint=hint)
    if event.base is not None and event.base != serving.version:
        return Failure("base_mismatch", f"made on {event.base}, but {serving.version} is live")
    return _expected_problem(event, serving)


def _expected_problem(event: Begin, serving: Label) -> Failure | None:
    if event.expected is not None and event.expected != serving.version:
        return Failure("expected_mismatch", f"expected {event.expected}, but {serving.version} is live")
    return None


def _rollback_problem(state: Fleet, event: Begin) -> Failure | None:
    target = state.rollback_to
    if target is None:
        return Failure("no_rollback", "the serving members hold no common previous version")
    if event.target is not None and event.target != target.version:
        return Failure("no_rollback", f"the members hold {target.version}, not {event.target}")
    return _expected_problem(event, live(state))


# --- beginning


def start(state: Fleet, event: Begin) -> Moved:
    """Begin a checked update: it gets its serial, and its members are frozen."""
    target = state.rollback_to if event.kind is Kind.ROLLBACK else None
    members = candidates(state, event.kind)
    update = Transaction(
        update=event.update,
        body_hash=event.body_hash,
        kind=event.kind,
        serial=state.serial + 1,
        version=target.version if target else wanted_version(state, event),
        policy=event.policy,
        offer=_seated(event.offer, members),
        manifest=event.manifest,
        participants=tuple((member.replica, member.incarnation) for member in members),
        dry_run=event.dry_run,
        enlisted=frozenset(member.replica for member in members if member.standing is Standing.JOINING),
        digest=target.digest if target else "",
        commit_requested=event.policy.commit is CommitMode.AUTO,
    )
    update = replace(update, warnings=left_behind(state, update))
    return _launch(state, update, (Accepted(event.update, update.serial),))


def _seated(offer: Offer | None, members: tuple[Member, ...]) -> Offer | None:
    """A stream's receivers are numbered when its participants are frozen."""
    if not isinstance(offer, StreamOffer):
        return offer
    seats, first = [], 0
    for member in members:
        seats.append(Seats(member.replica, member.incarnation, first, member.ranks))
        first += member.ranks
    return replace(offer, seats=tuple(seats))


def _launch(state: Fleet, update: Transaction, before: tuple[Effect, ...]) -> Moved:
    state = replace(state, serial=update.serial, update=update)
    for member in present(state):
        # The plan's later fence kills a join or discard that is still on its way; a reply to it no longer counts.
        state = state.with_member(replace(member, owed=None))
    started = Started(update.update, update.serial, update.kind, update.version)
    after, effects = enter(state, Phase.PLANNING)
    return after, (*before, started, *effects)


# --- what IDLE does on its own


def settle(state: Fleet) -> Moved:
    """In IDLE: the next in the queue, the publication of `start`, admissions, one catch-up; in this order."""
    effects: tuple[Effect, ...] = ()
    while state.phase is Phase.IDLE and not state.starting and not state.listening and state.queue:
        state, more = _next_in_queue(state)
        effects += more
    if state.phase is Phase.IDLE and not state.starting:
        state, more = _admissions(state)
        effects += more
    return state, effects


def _next_in_queue(state: Fleet) -> Moved:
    event, state = state.queue[0], replace(state, queue=state.queue[1:])
    failures = refusals(state, event)
    if failures:
        return state, (never_began(state, event, Outcome.REJECTED, failures),)
    after, effects = start(state, event)
    return after, effects[1:]  # the client heard `Accepted` when the update was queued


def never_began(state: Fleet, event: Begin, outcome: Outcome, failures: tuple[Failure, ...]) -> Finish:
    """End an update that waited in the queue and cannot begin any more."""
    version = None if event.kind is Kind.ROLLBACK else wanted_version(state, event)
    return Finish(
        Result(
            update=event.update,
            serial=0,
            attempts=0,
            kind=event.kind,
            outcome=outcome,
            reason=failures[0].code,
            failures=failures,
            version=version,
            digest="",
            manifest_digest="",
            proof="",
            bytes_read=0,
            tensors_changed=0,
            warnings=(),
            aborted_requests=0,
            requeued_requests=0,
            members=(),
            live=state.live.label if state.live else None,
            rollback_to=state.rollback_to,
        )
    )


def _admissions(state: Fleet) -> Moved:
    if state.hold is not None:
        return state, ()
    joiners = [member for member in state.members if member.standing is Standing.JOINING and member.owed is None]
    if not joiners:
        return state, ()
    if state.live is None:
        return _publish_start(state, joiners[0])
    state, effects = _leads(state, joiners)
    joiners = [member for member in joiners if not member.unled]
    label = live(state)
    for member in joiners:
        if member.live == label.digest and member.gave_up_on != label:
            state, sends = _join(state, member)
            effects += sends
    behind = [member for member in joiners if member.live != label.digest and member.gave_up_on != label]
    # What was streamed cannot be asked for again: its late joiners are enlisted in the next update.
    serving = state.live
    if behind and serving is not None and isinstance(serving.offer, DiskOffer):
        state, more = _catch_up(state, serving, behind[0])
        effects += more
    return state, effects


def _leads(state: Fleet, joiners: list[Member]) -> Moved:
    effects: tuple[Effect, ...] = ()
    for member in joiners:
        if member.unled:
            send = first_word(state, member)
            state, effects = state.with_member(replace(member, owed=send)), (*effects, send)
    return state, effects


def _publish_start(state: Fleet, member: Member) -> Moved:
    """The first join makes what it observed the version `start` of the fleet."""
    serial = state.serial + 1
    record = Record(
        kind=RecordKind.PUBLISHED,
        epoch=state.epoch,
        serial=serial,
        attempt=0,
        update="",
        body_hash="",
        op=Kind.UPDATE,
        version=START,
        digest=member.live,
        manifest_digest="",
        members=((member.replica, member.incarnation),),
    )
    return replace(state, serial=serial, starting=record), (Append(record),)


def start_published(state: Fleet) -> Fleet:
    """The record of `start` is durable. The replica that joined first may be gone; the fleet keeps its digest."""
    if state.starting is None:
        raise LookupError("no publication of start is under way")
    label = Label(state.starting.version, state.starting.digest)
    # What was followed may be what the journal knew, with its source.
    live = state.live if state.live is not None and state.live.label == label else Published(label)
    return replace(state, live=live, highest=max(state.highest, label.version), starting=None)


def _join(state: Fleet, member: Member) -> Moved:
    serial = state.serial + 1
    send = join_request(state, serial, member)
    # Told to open, it may be serving whatever becomes of its answer.
    return replace(state.with_member(replace(member, owed=send, shut=False)), serial=serial), (send,)


def _catch_up(state: Fleet, serving: Published, member: Member) -> Moved:
    update = Transaction(
        update="",
        body_hash="",
        kind=Kind.CATCH_UP,
        serial=state.serial + 1,
        version=serving.label.version,
        policy=replace(serving.policy, commit=CommitMode.AUTO),
        offer=serving.offer,
        manifest=serving.manifest,
        participants=((member.replica, member.incarnation),),
        enlisted=frozenset({member.replica}),
        digest=serving.label.digest,
        commit_requested=True,
    )
    return _launch(state, update, ())


def owner(state: Fleet, update: str) -> bool:
    """Whether `update` is the running one."""
    return state.update is not None and current(state).update == update and current(state).kind is not Kind.CATCH_UP
