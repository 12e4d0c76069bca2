"""What the fleet machine remembers: frozen values without behaviour beyond look-ups."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from updater.core.errors import Failure
from updater.core.fleet.effects import Label, Outcome, Record, Send
from updater.core.fleet.events import Begin
from updater.core.participant import NOT_COMPARED, Compared, Fence, Kind, Offer, StreamOffer
from updater.core.policy import Policy
from updater.core.version import START, Version


class Phase(StrEnum):
    """Rows of the fleet table."""

    IDLE = "idle"
    PLANNING = "planning"
    STAGING = "staging"
    VERIFYING = "verifying"
    READY = "ready"
    PAUSING = "pausing"
    DECIDING = "deciding"
    INSTALLING = "installing"
    INVALIDATING = "invalidating"
    PUBLISHING = "publishing"
    RESUMING = "resuming"
    RESTORING = "restoring"
    REOPENING = "reopening"
    DISCARDING = "discarding"
    STOPPED = "stopped"


class Standing(StrEnum):
    """How a member stands with the coordinator. Not a state of the front."""

    JOINING = "joining"
    OK = "ok"
    LOST = "lost"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class Member:
    """`shut`: known to be shut, so that it cannot serve anything whatever it hears late; only then does a member that
    is lost or quarantined not block. `admitted`: it once acknowledged that it serves. `live`: content digest at its
    last description. `previous`: what its spare keeps for a rollback. `owed`: the message that it still has to
    acknowledge after the phase that sent it ended; the shell retries it for ever. `gave_up_on`: the label that an
    admission or a catch-up failed to reach, not tried again; `why`: what failed it, until it is admitted. `foreign`:
    it is of another release, so that nothing is said to it. `unled`: it does not obey this epoch yet; `lead` is the
    first word that it hears, and until it has acknowledged that it takes part in nothing (I11).
    """

    replica: str
    incarnation: str
    standing: Standing
    live: str
    shut: bool = False
    admitted: bool = False
    previous: Label | None = None
    spare_unknown: bool = False
    owed: Send | None = None
    gave_up_on: Label | None = None
    why: Failure | None = None
    foreign: Failure | None = None
    url: str = ""
    config_hash: str = ""
    ranks: int = 0
    unled: bool = False


@dataclass(frozen=True, slots=True)
class Published:
    """A version that is or was live, with where its bytes came from and what was allowed of them."""

    label: Label
    manifest_digest: str = ""
    offer: Offer | None = None
    manifest: str = ""
    policy: Policy = field(default_factory=Policy)


@dataclass(frozen=True, slots=True)
class Transaction:
    """One update. `participants`: (replica, incarnation), frozen; `enlisted`: those of them that were joining.

    `one_way`: those of them whose install keeps nothing to go back to.
    `waiting`: who has not answered in this phase. `end`: set on the way out: outcome to finish with.
    `sealed`: the stream is complete; `digests`: what the trainer promised with that.
    `dry_run`: it ends once it is planned. `attempt` is 0 until the first PAUSING. `retry`: only time ran out in
    PAUSING. `recording`: this phase's record is not durable yet.
    """

    update: str
    body_hash: str
    kind: Kind
    serial: int
    version: Version
    policy: Policy
    offer: Offer | None
    manifest: str
    participants: tuple[tuple[str, str], ...]
    dry_run: bool = False
    enlisted: frozenset[str] = frozenset()
    one_way: frozenset[str] = frozenset()
    attempt: int = 0
    waiting: frozenset[str] = frozenset()
    digest: str = ""
    manifest_digest: str = ""
    replies: tuple[tuple[str, Any], ...] = ()
    sealed: bool = False
    digests: tuple[tuple[str, str], ...] = ()
    commit_requested: bool = False
    backing_off: bool = False
    recording: bool = False
    retry: bool = False
    end: Outcome | None = None
    failures: tuple[Failure, ...] = ()
    proof: str = ""
    bytes_read: int = 0
    tensors_changed: int = 0
    warnings: tuple[str, ...] = ()
    compared: Compared = NOT_COMPARED
    aborted_requests: int = 0
    requeued_requests: int = 0

    @property
    def label(self) -> Label:
        return Label(self.version, self.digest)

    @property
    def gives_way(self) -> bool:
        """Whether it can be done again later as well, so that what a client wants to publish comes first."""
        return self.kind is Kind.CATCH_UP or self.dry_run

    @property
    def awaits_seal(self) -> bool:
        """Whether more of a pushed stream may come."""
        return isinstance(self.offer, StreamOffer) and not self.sealed


@dataclass(frozen=True, slots=True)
class Fleet:
    """`serial`: the highest used; never repeats, also over restarts. `highest`: highest decided version.

    `before`: the version before the live one, so that a catch-up after a rollback knows its source.
    `starting`: the publication of `start` while it is not durable yet. `fleet`, `owner`: as in `Fence`. `hold`: why
    nothing is published and no replica is admitted: `listening`, `adopt_needed` or `behind` (I11). `gone`: (replica,
    incarnation) of the last that were removed or replaced; an empty incarnation: whichever it was.
    """

    fleet: str
    epoch: int
    serial: int = 0
    phase: Phase = Phase.IDLE
    members: tuple[Member, ...] = ()
    live: Published | None = None
    before: Published | None = None
    highest: Version = START
    update: Transaction | None = None
    queue: tuple[Begin, ...] = field(default=())
    starting: Record | None = None
    owner: str = ""
    hold: Failure | None = None
    gone: tuple[tuple[str, str], ...] = ()

    def member(self, replica: str) -> Member | None:
        return next((member for member in self.members if member.replica == replica), None)

    def with_member(self, member: Member) -> Fleet:
        """Added or replaced; members stay sorted by id, so that equal histories give equal states."""
        others = [other for other in self.members if other.replica != member.replica]
        return replace(self, members=tuple(sorted([*others, member], key=lambda each: each.replica)))

    def without_member(self, replica: str) -> Fleet:
        return replace(self, members=tuple(member for member in self.members if member.replica != replica))

    def serving(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.standing is Standing.OK)

    @property
    def rollback_to(self) -> Label | None:
        """What the spares of all serving members hold, or None."""
        return common(member.previous for member in self.serving())

    def fence(self, serial: int, attempt: int, incarnation: str) -> Fence:
        return Fence(self.fleet, self.epoch, serial, attempt, incarnation, self.owner)

    @property
    def listening(self) -> bool:
        """Whether a replica that this journal does not know may still call: updates and admissions wait for that."""
        return self.hold is not None and self.hold.code == "listening"

    @property
    def may_lead(self) -> bool:
        return self.live is not None and (self.hold is None or self.listening)

    @property
    def has_history(self) -> bool:
        """Whether anything was ever published by the fleet that the journal tells of."""
        return self.live is not None or self.starting is not None


def common(labels: Iterable[Label | None]) -> Label | None:
    """The one label that all have, or None."""
    distinct = set(labels)
    return distinct.pop() if len(distinct) == 1 else None
