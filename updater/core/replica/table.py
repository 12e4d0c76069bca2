"""The replica table as data. `replica.py` walks it, `diagram.py` draws it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from updater.core.participant import FrontState as S
from updater.core.replica import claims, staging, steps
from updater.core.replica import install as installing
from updater.core.replica import operator as operating
from updater.core.replica import pause as pausing
from updater.core.replica.state import ReplicaState, Step


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """In one of `sources`, on `trigger`, do `act`; the state afterwards is one of `targets`.

    Triggers: a verb, `<verb> done`, `<verb> failed` (of ranks' work), `lease ends`, `a rank dies`, `an audit fails`,
    `the spare is lost`, `removed` (said by the coordinator of its own fleet). Two verbs are an operator's: readmit,
    release. A verb without a row is refused. `act` may refuse too; it then changes nothing.
    """

    sources: tuple[S, ...]
    trigger: str
    act: Callable[[ReplicaState, Any, float], Step]
    targets: tuple[S, ...]


SERVING = (S.JOINING, S.OPEN)
SHUT_UNINSTALLED = (S.CLOSING, S.PAUSED)
INSTALLED = (S.INSTALLING, S.INSTALLED, S.INVALIDATED)
REOPENED = (S.OPEN, S.JOINING)
AUDITED = (*SERVING, *SHUT_UNINSTALLED, *INSTALLED, S.RESTORING, S.ORPHANED)
STRANDED = (S.INSTALLED, S.INVALIDATED)
BEREFT = (S.OPEN, *SHUT_UNINSTALLED, *STRANDED)
KEEPING = (*SERVING, *SHUT_UNINSTALLED, S.ORPHANED)
ASIDE = (S.QUARANTINED, S.ORPHANED)
ALIVE = tuple(state for state in S if state is not S.BROKEN)

ROWS = (
    # whom it obeys (I11)
    ReplicaRow(tuple(S), "lead", claims.lead, tuple(S)),
    ReplicaRow(
        (S.OPEN, *SHUT_UNINSTALLED, *STRANDED),
        "removed",
        claims.removed,
        (S.OPEN, *SHUT_UNINSTALLED, *STRANDED, S.ORPHANED),
    ),
    ReplicaRow((S.ORPHANED,), "join", claims.join, (S.ORPHANED,)),
    ReplicaRow((S.ORPHANED,), "join done", claims.joined, (S.OPEN,)),
    ReplicaRow((S.ORPHANED,), "join failed", claims.not_proven, (S.QUARANTINED,)),
    ReplicaRow((S.ORPHANED,), "release", claims.release, (S.ORPHANED,)),
    ReplicaRow((S.ORPHANED,), "release done", claims.released, (S.OPEN,)),
    ReplicaRow((S.ORPHANED,), "release failed", claims.not_proven, (S.QUARANTINED,)),
    # admission
    ReplicaRow((S.JOINING,), "join", staging.join, (S.JOINING,)),
    ReplicaRow((S.JOINING,), "join done", staging.join_done, (S.OPEN,)),
    ReplicaRow((S.OPEN,), "join", staging.join_again, (S.OPEN,)),
    # staging goes on beside serving
    ReplicaRow(SERVING, "plan", staging.plan, SERVING),
    ReplicaRow(SERVING, "stage", staging.stage, SERVING),
    ReplicaRow(SERVING, "verify", staging.verify, SERVING),
    ReplicaRow(SERVING, "plan done", staging.plan_done, SERVING),
    ReplicaRow(SERVING, "stage done", staging.stage_done, SERVING),
    ReplicaRow(SERVING, "verify done", staging.verify_done, SERVING),
    # the pause and its lease
    ReplicaRow(SERVING, "pause", pausing.pause, (*SERVING, S.CLOSING)),
    ReplicaRow((S.CLOSING,), "pause done", pausing.quiesced, (S.PAUSED,)),
    ReplicaRow((S.CLOSING,), "pause failed", steps.failed, (S.CLOSING,)),
    ReplicaRow((S.PAUSED,), "pause", pausing.pause_again, (S.PAUSED,)),
    ReplicaRow(SHUT_UNINSTALLED, "lease ends", pausing.lease_ends, SHUT_UNINSTALLED),
    ReplicaRow(SHUT_UNINSTALLED, "resume", pausing.reopen_old, SHUT_UNINSTALLED),
    ReplicaRow(SHUT_UNINSTALLED, "resume done", pausing.reopened, REOPENED),
    ReplicaRow(SHUT_UNINSTALLED, "resume failed", pausing.reopen_failed, SHUT_UNINSTALLED),
    # installation
    ReplicaRow((S.PAUSED,), "install", installing.install, (S.PAUSED, S.INSTALLING)),
    ReplicaRow((S.INSTALLING,), "install done", installing.installed, (S.INSTALLED, S.RESTORING)),
    ReplicaRow((S.INSTALLING,), "install failed", installing.install_failed, (S.INSTALLING, S.RESTORING)),
    ReplicaRow((S.INSTALLED, S.INVALIDATED), "install", installing.acknowledge_same, (S.INSTALLED, S.INVALIDATED)),
    ReplicaRow((S.INSTALLED,), "invalidate", installing.invalidate, (S.INSTALLED,)),
    ReplicaRow((S.INSTALLED,), "invalidate done", installing.invalidated, (S.INVALIDATED, S.RESTORING)),
    ReplicaRow((S.INSTALLED,), "invalidate failed", installing.invalidate_failed, (S.INSTALLED, S.RESTORING)),
    ReplicaRow((S.INVALIDATED,), "invalidate", installing.acknowledge_same, (S.INVALIDATED,)),
    # publication
    ReplicaRow((S.INVALIDATED,), "resume", installing.resume_new, (S.INVALIDATED,)),
    ReplicaRow((S.INVALIDATED,), "resume done", installing.published, (S.OPEN,)),
    ReplicaRow((S.INVALIDATED,), "resume failed", installing.resume_failed, (S.INVALIDATED,)),
    ReplicaRow((S.OPEN,), "resume", installing.resume_again, (S.OPEN,)),
    ReplicaRow((S.JOINING,), "resume", installing.resume_joining, (S.JOINING,)),
    # the way back
    ReplicaRow(INSTALLED, "restore", installing.restore, (*INSTALLED, S.RESTORING)),
    ReplicaRow((S.RESTORING,), "restore done", installing.restored, (S.PAUSED,)),
    ReplicaRow((S.RESTORING,), "restore failed", installing.restore_failed, (S.QUARANTINED,)),
    ReplicaRow((*SERVING, *SHUT_UNINSTALLED), "restore", installing.restore_nothing, (*SERVING, *SHUT_UNINSTALLED)),
    ReplicaRow((*SERVING, *SHUT_UNINSTALLED), "restore done", staging.discarded, (*SERVING, *SHUT_UNINSTALLED)),
    ReplicaRow((*SERVING, *SHUT_UNINSTALLED), "restore failed", staging.discard_failed, (*SERVING, *SHUT_UNINSTALLED)),
    # the end of staging
    ReplicaRow((*SERVING, *SHUT_UNINSTALLED), "discard", pausing.discard, (*SERVING, *SHUT_UNINSTALLED)),
    ReplicaRow((*SERVING, *SHUT_UNINSTALLED), "discard done", staging.discarded, (*SERVING, *SHUT_UNINSTALLED)),
    ReplicaRow((*SERVING, *SHUT_UNINSTALLED), "discard failed", staging.discard_failed, (*SERVING, *SHUT_UNINSTALLED)),
    # whatever work fails in a state that keeps its meaning
    ReplicaRow((S.JOINING,), "join failed", steps.failed, (S.JOINING,)),
    ReplicaRow(SERVING, "plan failed", steps.failed, SERVING),
    ReplicaRow(SERVING, "stage failed", steps.failed, SERVING),
    ReplicaRow(SERVING, "verify failed", steps.failed, SERVING),
    # out of service, and back
    ReplicaRow(ALIVE, "a rank dies", operating.rank_died, (S.BROKEN,)),
    ReplicaRow(AUDITED, "an audit fails", operating.audit_failed, (*AUDITED, S.QUARANTINED)),
    ReplicaRow(KEEPING, "the spare is lost", operating.spare_lost, KEEPING),
    ReplicaRow(ASIDE, "readmit", operating.readmit, ASIDE),
    ReplicaRow(ASIDE, "readmit done", operating.readmitted, (S.JOINING,)),
    ReplicaRow(ASIDE, "readmit failed", operating.readmit_failed, (S.QUARANTINED,)),
    # the coordinator is gone for long
    ReplicaRow(STRANDED, "release", operating.release, STRANDED),
    ReplicaRow(STRANDED, "release done", operating.released, REOPENED),
    ReplicaRow(STRANDED, "release failed", operating.release_failed, (*STRANDED, S.QUARANTINED)),
)
