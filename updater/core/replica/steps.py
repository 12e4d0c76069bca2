"""What all rows of the replica table share: idempotency, answers, tombstones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from updater.core.errors import Failure
from updater.core.participant import Ack, Fence, PlanRequest
from updater.core.replica.state import (
    Answer,
    Asked,
    Done,
    Failed,
    Refuse,
    ReplicaEffect,
    ReplicaState,
    Running,
    Step,
    Work,
    with_running,
)

#: Verbs that a tombstone kills.
FORWARD = frozenset({"plan", "stage", "verify", "pause", "install"})
#: Asked by an operator of the replica: they do not say that a coordinator is there.
OPERATOR = frozenset({"readmit", "release"})
#: Verbs whose first answer is kept; the others are idempotent by what the state says.
REMEMBERED = frozenset({"plan", "stage", "verify", "pause", "install", "invalidate"})
STAGING_VERBS = ("plan", "stage", "verify")


def repeated(state: ReplicaState, event: Asked) -> Step | None:
    """The first answer again, or a place among those who wait for the running work; None for a new request."""
    kept = state.answer(event.verb, event.fence)
    if isinstance(kept, tuple):
        return state, (Refuse(event.verb, event.fence, kept),)
    if kept is not None:
        return state, (Answer(event.verb, event.fence, kept),)
    work = None if event.verb in OPERATOR else state.work(event.verb)
    if work is None or (work.fence.serial, work.fence.attempt) != (event.fence.serial, event.fence.attempt):
        return None
    joined = replace(work, waiters=(*work.waiters, event.fence))
    return replace(state, running=tuple(joined if each is work else each for each in state.running)), ()


def running(state: ReplicaState, event: Done | Failed) -> Running | None:
    """The work that this reports on, unless it was cancelled."""
    work = state.work(event.verb)
    return work if work is not None and work.fence == event.fence else None


def begin(state: ReplicaState, event: Asked, *before: ReplicaEffect) -> Step:
    return with_running(state, event), (*before, Work(event.verb, event.request, state.plan))


def finish(state: ReplicaState, event: Done, reply: Any = None) -> Step:
    """Answer all who wait, and keep the answer."""
    work = running(state, event)
    waiters = work.waiters if work else ()
    answers = {fence: reply or Ack(fence, event.seconds) for fence in dict.fromkeys(waiters)}
    return _end(state, event, answers), tuple(Answer(event.verb, fence, answer) for fence, answer in answers.items())


def _end(state: ReplicaState, event: Done | Failed, answers: dict[Fence, Any]) -> ReplicaState:
    kept = state.answers
    if event.verb in REMEMBERED:
        kept = (*kept, *(((event.verb, *fence.order()), answer) for fence, answer in answers.items()))
    return replace(state, running=tuple(each for each in state.running if each.verb != event.verb), answers=kept)


def refuse(event: Asked, code: str, message: str) -> tuple[ReplicaEffect, ...]:
    return (Refuse(event.verb, event.fence, (Failure(code, message),)),)


def ack(event: Asked) -> tuple[ReplicaEffect, ...]:
    return (Answer(event.verb, event.fence, Ack(event.fence)),)


def drop_work(state: ReplicaState, verbs: tuple[str, ...], failure: Failure) -> Step:
    """No caller waits for this work any more; those that did are refused."""
    dropped = [work for work in state.running if work.verb in verbs]
    refusals = tuple(Refuse(work.verb, fence, (failure,)) for work in dropped for fence in dict.fromkeys(work.waiters))
    return replace(state, running=tuple(work for work in state.running if work not in dropped)), refusals


def superseded(asked: Asked) -> tuple[ReplicaEffect, ...]:
    return refuse(asked, "replica_fenced", "was asked again")


def tombstone(state: ReplicaState, fence: Fence) -> ReplicaState:
    """The tombstone: nothing up to here may ever install."""
    return replace(state, dead=max(state.dead, (fence.serial, fence.attempt), state.key))


def failed(state: ReplicaState, event: Failed, now: float) -> Step:
    """The work failed and the state keeps its meaning: answer, and answer the same again."""
    work = running(state, event)
    answers = dict.fromkeys(dict.fromkeys(work.waiters if work else ()), event.failures)
    refusals = tuple(Refuse(event.verb, fence, event.failures) for fence in answers)
    return _end(state, event, answers), refusals


def planned(state: ReplicaState) -> PlanRequest:
    if state.plan is None:
        raise LookupError("nothing is planned")
    return state.plan


def reached(state: ReplicaState, event: Asked, reached: str) -> bool:
    return state.serial == event.fence.serial and state.reached == reached
