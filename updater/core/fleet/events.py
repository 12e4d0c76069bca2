"""What may happen to the fleet machine. Frozen values; the shell makes them, `machine.step` takes them.

The shell owns sockets, clocks and the journal. It turns client calls, replies, timers and durable writes into these
events, one at a time, and performs the effects that come back (`effects.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from updater.core.errors import Failure
from updater.core.participant import Call, Description, Fence, FrontStatus, Kind, Offer
from updater.core.policy import Policy
from updater.core.version import Version

# --- asked by clients: each is answered by exactly one `Accepted` or `Denied` among the effects of its step


@dataclass(frozen=True, slots=True)
class Begin:
    """A new update or rollback. Idempotency by `update` (same id, same body) is the shell's: a repeat never gets here.

    `step`, `run`: the version that an update asks for; `run` None is the current run, or the next with
    `policy.new_run`; `step` None, of a dry run, is the step that comes next. For a rollback `target` is what to go back
    to (None: whatever `rollback_to` is).
    `base` / `expected`: what must be live (`base_mismatch`, `expected_mismatch`), None: not asked.
    `dry_run`: end once everything is planned. Nothing is staged, and what another client begins meanwhile comes first.
    """

    update: str
    body_hash: str
    kind: Kind = Kind.UPDATE
    step: int | None = 0
    run: int | None = None
    base: Version | None = None
    target: Version | None = None
    expected: Version | None = None
    offer: Offer | None = None
    manifest: str = ""
    policy: Policy = field(default_factory=Policy)
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Seal:
    """The stream of `update` is complete: no-op for disk offers.

    `digests`: what the trainer knows only now, (tensor, digest). With them `manifest` (JSON text) and
    `manifest_digest` are those of the manifest that they complete; without, all three are empty.
    """

    update: str
    digests: tuple[tuple[str, str], ...] = ()
    manifest: str = ""
    manifest_digest: str = ""


@dataclass(frozen=True, slots=True)
class CommitRequested:
    """`commit=manual`: go on when READY (remembered if it comes earlier)."""

    update: str


@dataclass(frozen=True, slots=True)
class AbortRequested:
    """Of the running update before its decision, or of one that waits in the queue.

    `causes`: what the client says went wrong on its side, the first one first.
    """

    update: str
    causes: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class Joined:
    """A front asks to become a member; `description` was just fetched from it.

    `old_gone`: the process that holds this id under another incarnation missed as many probes as make it lost, or
    another one answers in its place. Without it the second of two processes with one id is denied
    (`replica_id_taken`). `differs`: what its config has other than the members', where the shell could compare them;
    None: the hashes have to do.
    """

    description: Description
    old_gone: bool = False
    differs: tuple[Failure, ...] | None = None


@dataclass(frozen=True, slots=True)
class Left:
    """DELETE of a member. `dead`: confirmed dead by an operator, or the front itself says that it is shut for good."""

    replica: str
    dead: bool = False


@dataclass(frozen=True, slots=True)
class Called:
    """A front asks whether it is still a member. Answered by `Claimed` instead."""

    call: Call


ClientEvent = Begin | Seal | CommitRequested | AbortRequested | Joined | Left | Called

# --- the update lease, not answered


@dataclass(frozen=True, slots=True)
class LeaseExpired:
    """The client of `update` stopped renewing. Too late once commit is accepted, and then ignored."""

    update: str


# --- from fronts


@dataclass(frozen=True, slots=True)
class Replied:
    """The reply of a verb, `reply` as in `participant.MESSAGES`. `fence`: that of the request it answers."""

    replica: str
    verb: str
    fence: Fence
    reply: Any


@dataclass(frozen=True, slots=True)
class Refused:
    """The front answered with a problem. At least one failure."""

    replica: str
    verb: str
    fence: Fence
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """The member with this incarnation is gone or out of reach for good as far as the shell can tell."""

    replica: str
    incarnation: str
    failure: Failure


@dataclass(frozen=True, slots=True)
class Seen:
    """A status poll was answered. Lets a silent member count again; never moves an update."""

    replica: str
    status: FrontStatus


# --- timers that the machine asked for


@dataclass(frozen=True, slots=True)
class Deadline:
    """Echo of a `SetDeadline`. One that is no longer current is ignored."""

    phase: str
    serial: int
    attempt: int


@dataclass(frozen=True, slots=True)
class BackoffEnded:
    """Echo of a `SetBackoff`."""

    serial: int
    attempt: int


@dataclass(frozen=True, slots=True)
class HoldEnded:
    """Two watch intervals went by since the start, and no front with history has called."""


# --- from the journal


@dataclass(frozen=True, slots=True)
class Recorded:
    """The record of an `Append` is durable. `kind` is `decided`, `published` or `reverted`."""

    kind: str
    serial: int
    attempt: int


@dataclass(frozen=True, slots=True)
class JournalFailed:
    """Any journal error, a lost ownership row included. The machine stops: a read-back proves nothing."""

    failure: Failure


Event = (
    Begin
    | Seal
    | CommitRequested
    | AbortRequested
    | Joined
    | Left
    | Called
    | LeaseExpired
    | Replied
    | Refused
    | Lost
    | Seen
    | Deadline
    | BackoffEnded
    | HoldEnded
    | Recorded
    | JournalFailed
)
