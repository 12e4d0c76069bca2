"""The fleet table as data. The interpreter in `flow.py` walks it; `diagram.py` draws it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from updater.core.fleet.effects import RecordKind
from updater.core.fleet.state import Phase
from updater.core.participant import Kind
from updater.core.policy import Policy

#: seconds on top of a deadline that the fronts keep themselves, so that their own report usually comes first
GRACE_S = 5.0
#: one round of messages that wait for nothing but the network and one flip of a switch
ROUND_S = 10.0


@dataclass(frozen=True, slots=True)
class Row:
    """One phase.

    `verb`: sent to every participant on entry, after `record` (if any) is durable. `done`: where it leads when all
    acknowledged (None: where the way out says). `trouble`: any refusal, loss or deadline (None: cannot happen, or
    `tolerant`: that member drops out and is marked, the others go on). `undo`: where client abort, supersede and the
    end of the update lease lead; None: they come too late. `timer`: the phase on whose entry the running deadline was
    set, `seconds` how long that is.
    """

    phase: Phase
    entry: str
    done: Phase | None = None
    verb: str = ""
    record: RecordKind | None = None
    trouble: Phase | None = None
    undo: Phase | None = None
    tolerant: bool = False
    timer: Phase | None = None
    seconds: Callable[[Policy], float] | None = None


def _prepare(policy: Policy) -> float:
    return policy.deadline_s


def _pause(policy: Policy) -> float:
    return policy.quiesce_s + GRACE_S


def _install(policy: Policy) -> float:
    return policy.pause_lease_s


def _round(policy: Policy) -> float:
    return ROUND_S


ROWS = (
    Row(
        Phase.PLANNING,
        "freeze members; plan: placement, coverage, space, modes",
        verb="plan",
        done=Phase.STAGING,
        trouble=Phase.DISCARDING,
        undo=Phase.DISCARDING,
        timer=Phase.PLANNING,
        seconds=_prepare,
    ),
    Row(
        Phase.STAGING,
        "stage on every rank; serving goes on",
        verb="stage",
        done=Phase.VERIFYING,
        trouble=Phase.DISCARDING,
        undo=Phase.DISCARDING,
        timer=Phase.PLANNING,
    ),
    Row(
        Phase.VERIFYING,
        "completeness and digests, read back: the vote",
        verb="verify",
        done=Phase.READY,
        trouble=Phase.DISCARDING,
        undo=Phase.DISCARDING,
        timer=Phase.PLANNING,
    ),
    Row(
        Phase.READY,
        "wait for the commit, or for the back-off",
        done=Phase.PAUSING,
        trouble=Phase.DISCARDING,
        undo=Phase.DISCARDING,
    ),
    Row(
        Phase.PAUSING,
        "close admission, quiesce, re-assert the vote",
        verb="pause",
        done=Phase.DECIDING,
        trouble=Phase.REOPENING,
        undo=Phase.REOPENING,
        timer=Phase.PAUSING,
        seconds=_pause,
    ),
    Row(Phase.DECIDING, "append decided", record=RecordKind.DECIDED, done=Phase.INSTALLING),
    Row(
        Phase.INSTALLING,
        "install on every rank",
        verb="install",
        done=Phase.INVALIDATING,
        trouble=Phase.RESTORING,
        timer=Phase.INSTALLING,
        seconds=_install,
    ),
    Row(
        Phase.INVALIDATING,
        "reset or re-namespace every cache tier",
        verb="invalidate",
        done=Phase.PUBLISHING,
        trouble=Phase.RESTORING,
        timer=Phase.INVALIDATING,
        seconds=_install,
    ),
    Row(Phase.PUBLISHING, "append published: the commit point", record=RecordKind.PUBLISHED, done=Phase.RESUMING),
    Row(
        Phase.RESUMING,
        "reopen on the new version",
        verb="resume",
        done=Phase.IDLE,
        tolerant=True,
        timer=Phase.RESUMING,
        seconds=_round,
    ),
    Row(
        Phase.RESTORING,
        "append reverted; put bytes, label and namespace back; tombstone",
        verb="restore",
        record=RecordKind.REVERTED,
        done=Phase.REOPENING,
        tolerant=True,
        timer=Phase.RESTORING,
        seconds=_install,
    ),
    Row(
        Phase.REOPENING,
        "reopen on the old version",
        verb="resume",
        tolerant=True,
        timer=Phase.REOPENING,
        seconds=_round,
    ),
    Row(
        Phase.DISCARDING,
        "drop staging; tombstone",
        verb="discard",
        done=Phase.IDLE,
        tolerant=True,
        timer=Phase.DISCARDING,
        seconds=_round,
    ),
)

TABLE = {row.phase: row for row in ROWS}

#: Phases that a kind passes through without stopping. A catch-up publishes nothing, so it records nothing.
SKIPPED: dict[Kind, frozenset[Phase]] = {
    Kind.UPDATE: frozenset(),
    Kind.ROLLBACK: frozenset({Phase.STAGING}),
    Kind.CATCH_UP: frozenset({Phase.DECIDING, Phase.PUBLISHING}),
}

#: Only time ran out: worth another attempt at pausing with the staging kept.
TIME_CODES = frozenset({"quiesce_timeout", "phase_timeout"})


def backoff_s(attempt: int) -> float:
    """Seconds before the attempt after `attempt`: 1, 2, 4, at most 8."""
    return float(min(2 ** (attempt - 1), 8))
