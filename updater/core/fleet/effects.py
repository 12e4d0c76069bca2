"""What the fleet machine wants done, in order. Frozen values; the shell performs them and feeds results back.

Rules for the shell: perform the effects of one step in order and before the next step. A `Send` never blocks the
machine: retry it over transport errors until its reply or refusal came (`Replied`, `Refused`), or until a later `Send`
to the same replica or a `Forget` of it supersedes it. Timers echo themselves as events.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from updater.core.errors import Failure
from updater.core.participant import NOT_COMPARED, Compared, Fence, Kind, Offer
from updater.core.participant import Claimed as Claimed
from updater.core.policy import Policy
from updater.core.version import Version


class Outcome(StrEnum):
    """How an update ends, exactly once (I4). `planned`: of a dry run that a publication would have gone on from."""

    COMMITTED = "committed"
    PLANNED = "planned"
    REJECTED = "rejected"
    ABORTED = "aborted"
    ROLLED_BACK = "rolled_back"


class RecordKind(StrEnum):
    DECIDED = "decided"
    PUBLISHED = "published"
    REVERTED = "reverted"


@dataclass(frozen=True, slots=True)
class Label:
    """A version and the content digest of its bytes: what a spare holds as `previous`, what a front serves."""

    version: Version
    digest: str


@dataclass(frozen=True, slots=True)
class Record:
    """One durable line. `members`: (replica, incarnation) of every participant.

    `offer` and `manifest` (JSON text, may be megabytes: store it by digest) let a late joiner be caught up after a
    restart. `update` is empty for the publication of `start` by the first join.
    """

    kind: RecordKind
    epoch: int
    serial: int
    attempt: int
    update: str
    body_hash: str
    op: Kind
    version: Version
    digest: str
    manifest_digest: str
    members: tuple[tuple[str, str], ...]
    offer: Offer | None = None
    manifest: str = ""
    policy: Policy = field(default_factory=Policy)


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """Of one member at the end of an update. `standing`: joining, ok, lost, quarantined. `state` says what it did."""

    replica: str
    incarnation: str
    standing: str
    participated: bool


@dataclass(frozen=True, slots=True)
class Result:
    """The machine's part of a receipt; timings are the shell's. `live`, `rollback_to`: after the end.

    `proof` is `digests` only where every participant compared with the trainer's, else `structure_only`, or empty
    when no vote was reached. `reason`: the code of the first failure, empty when committed.
    """

    update: str
    serial: int
    attempts: int
    kind: Kind
    outcome: Outcome
    reason: str
    failures: tuple[Failure, ...]
    version: Version | None
    digest: str
    manifest_digest: str
    proof: str
    bytes_read: int
    tensors_changed: int
    warnings: tuple[str, ...]
    aborted_requests: int
    requeued_requests: int
    members: tuple[MemberFacts, ...]
    live: Label | None
    rollback_to: Label | None
    compared: Compared = NOT_COMPARED


# --- to clients: exactly one of these per client event


@dataclass(frozen=True, slots=True)
class Accepted:
    """`update` empty for joins and leaves. `queued`: it waits behind another one. `serial` 0 while queued."""

    update: str
    serial: int = 0
    queued: bool = False


@dataclass(frozen=True, slots=True)
class Denied:
    """Nothing happened. `failures[0].code` is the problem's code; `active` the id of the update in the way, if any."""

    failures: tuple[Failure, ...]
    active: str = ""


@dataclass(frozen=True, slots=True)
class Started:
    """An update leaves the queue (or was begun at once) and has a serial. Journal the serial: it must never repeat."""

    update: str
    serial: int
    kind: Kind
    version: Version


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of an update, also of one that was rejected when its turn came."""

    result: Result


# --- to fronts


@dataclass(frozen=True, slots=True)
class Send:
    """`request` as in `participant.MESSAGES[verb]`; `request.fence` names the incarnation it is for."""

    replica: str
    verb: str
    request: Any

    @property
    def fence(self) -> Fence:
        fence: Fence = self.request.fence
        return fence


@dataclass(frozen=True, slots=True)
class Forget:
    """Stop retrying whatever goes to this replica: it left, or came back as another process."""

    replica: str


# --- to the journal and the clock


@dataclass(frozen=True, slots=True)
class Append:
    """Write durably, then feed `Recorded(kind, serial, attempt)`; on any error feed `JournalFailed`."""

    record: Record


@dataclass(frozen=True, slots=True)
class SetDeadline:
    """One phase timer at a time: a new one replaces the old. Feeds `Deadline(phase, serial, attempt)`."""

    phase: str
    serial: int
    attempt: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ClearDeadline:
    pass


@dataclass(frozen=True, slots=True)
class SetBackoff:
    """Feeds `BackoffEnded(serial, attempt)` after `seconds`."""

    serial: int
    attempt: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Admit:
    """`replica` serves `live` from now on: it was admitted, came back, or was published to."""

    replica: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Perform nothing more, close the listening sockets, exit non-zero. Pause leases reopen what has not installed."""

    failure: Failure


Effect = (
    Claimed
    | Accepted
    | Denied
    | Started
    | Finish
    | Send
    | Forget
    | Append
    | SetDeadline
    | ClearDeadline
    | SetBackoff
    | Admit
    | Stop
)
