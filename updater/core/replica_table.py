"""The replica table of the design as data. `replica.py` walks it, `diagram.py` draws it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from updater.core import replica_actions as actions
from updater.core.participant import FrontState as S
from updater.core.replica_state import ReplicaState, Step


@dataclass(frozen=True, slots=True)
class Row:
    """In one of `sources`, on `trigger`, do `act`; the state afterwards is one of `targets`.

    Triggers: a verb, `<verb> done`, `<verb> failed` (of ranks' work), `lease ends`, `a rank dies`. A verb without a
    row is refused. `act` may refuse too; it then changes nothing.
    """

    sources: tuple[S, ...]
    trigger: str
    act: Callable[[ReplicaState, Any, float], Step]
    targets: tuple[S, ...]


SERVING = (S.JOINING, S.OPEN)
SHUT_UNINSTALLED = (S.CLOSING, S.PAUSED)
INSTALLED = (S.INSTALLING, S.INSTALLED, S.INVALIDATED)
REOPENED = (S.OPEN, S.JOINING)
ALIVE = tuple(state for state in S if state is not S.BROKEN)

ROWS = (
    # admission
    Row((S.JOINING,), "join", actions.join, (S.JOINING,)),
    Row((S.JOINING,), "join done", actions.join_done, (S.OPEN,)),
    Row((S.OPEN,), "join", actions.join_again, (S.OPEN,)),
    # staging goes on beside serving
    Row(SERVING, "plan", actions.plan, SERVING),
    Row(SERVING, "stage", actions.stage, SERVING),
    Row(SERVING, "seal", actions.seal, SERVING),
    Row(SERVING, "verify", actions.verify, SERVING),
    Row(SERVING, "plan done", actions.plan_done, SERVING),
    Row(SERVING, "stage done", actions.stage_done, SERVING),
    Row(SERVING, "verify done", actions.verify_done, SERVING),
    # the pause and its lease
    Row(SERVING, "pause", actions.pause, (*SERVING, S.CLOSING)),
    Row((S.CLOSING,), "pause done", actions.quiesced, (S.PAUSED,)),
    Row((S.CLOSING,), "pause failed", actions.failed, (S.CLOSING,)),
    Row((S.PAUSED,), "pause", actions.pause_again, (S.PAUSED,)),
    Row(SHUT_UNINSTALLED, "renew", actions.renew, SHUT_UNINSTALLED),
    Row(SHUT_UNINSTALLED, "lease ends", actions.lease_ends, SHUT_UNINSTALLED),
    Row(SHUT_UNINSTALLED, "resume", actions.reopen_old, SHUT_UNINSTALLED),
    Row(SHUT_UNINSTALLED, "resume done", actions.reopened, REOPENED),
    Row(SHUT_UNINSTALLED, "resume failed", actions.reopen_failed, SHUT_UNINSTALLED),
    # installation
    Row((S.PAUSED,), "install", actions.install, (S.PAUSED, S.INSTALLING)),
    Row((S.INSTALLING,), "install done", actions.installed, (S.INSTALLED, S.RESTORING)),
    Row((S.INSTALLING,), "install failed", actions.install_failed, (S.INSTALLING, S.RESTORING)),
    Row((S.INSTALLED, S.INVALIDATED), "install", actions.acknowledge_same, (S.INSTALLED, S.INVALIDATED)),
    Row((S.INSTALLED,), "invalidate", actions.invalidate, (S.INSTALLED,)),
    Row((S.INSTALLED,), "invalidate done", actions.invalidated, (S.INVALIDATED, S.RESTORING)),
    Row((S.INSTALLED,), "invalidate failed", actions.invalidate_failed, (S.INSTALLED, S.RESTORING)),
    Row((S.INVALIDATED,), "invalidate", actions.acknowledge_same, (S.INVALIDATED,)),
    # publication
    Row((S.INVALIDATED,), "resume", actions.resume_new, (S.INVALIDATED,)),
    Row((S.INVALIDATED,), "resume done", actions.published, (S.OPEN,)),
    Row((S.INVALIDATED,), "resume failed", actions.resume_failed, (S.INVALIDATED,)),
    Row((S.OPEN,), "resume", actions.resume_again, (S.OPEN,)),
    Row((S.JOINING,), "resume", actions.resume_joining, (S.JOINING,)),
    # the way back
    Row(INSTALLED, "restore", actions.restore, (*INSTALLED, S.RESTORING)),
    Row((S.RESTORING,), "restore done", actions.restored, (S.PAUSED,)),
    Row((S.RESTORING,), "restore failed", actions.restore_failed, (S.QUARANTINED,)),
    Row((*SERVING, *SHUT_UNINSTALLED), "restore", actions.restore_nothing, (*SERVING, *SHUT_UNINSTALLED)),
    Row((*SERVING, *SHUT_UNINSTALLED), "restore done", actions.discarded, (*SERVING, *SHUT_UNINSTALLED)),
    Row((*SERVING, *SHUT_UNINSTALLED), "restore failed", actions.discard_failed, (*SERVING, *SHUT_UNINSTALLED)),
    # the end of staging
    Row((*SERVING, *SHUT_UNINSTALLED), "discard", actions.discard, (*SERVING, *SHUT_UNINSTALLED)),
    Row((*SERVING, *SHUT_UNINSTALLED), "discard done", actions.discarded, (*SERVING, *SHUT_UNINSTALLED)),
    Row((*SERVING, *SHUT_UNINSTALLED), "discard failed", actions.discard_failed, (*SERVING, *SHUT_UNINSTALLED)),
    # whatever work fails in a state that keeps its meaning
    Row((S.JOINING,), "join failed", actions.failed_once, (S.JOINING,)),
    Row(SERVING, "plan failed", actions.failed, SERVING),
    Row(SERVING, "stage failed", actions.stage_failed, SERVING),
    Row(SERVING, "verify failed", actions.failed, SERVING),
    Row(ALIVE, "a rank dies", actions.rank_died, (S.BROKEN,)),
)
