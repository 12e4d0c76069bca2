"""The participant contract: what a coordinator asks of the front of a replica, and what it answers.

Over HTTP each verb is `POST /participant/v1/{verb}` with the request as JSON; the answer is the reply as JSON, or a
problem document whose `failures` become a refusal. As a Ray actor each verb is a method of the same name.

Rules for every verb:

- every request carries a `Fence`. Another fleet, epoch, owner or incarnation, or an older (serial, attempt), is refused
  with `replica_fenced` and leaves no mark. Only `lead` changes which fleet, epoch and owner a front obeys (I11);
- every verb is idempotent by (serial, attempt): a repeated call joins the running one or gets the first answer again;
- a refusal has no effect on what serves;
- `install`, `invalidate` and `restore` may not be refused for any reason but the state table: what they need was
  checked before.

| verb | when | how often | may it refuse |
|---|---|---|---|
| describe | before a join, any time | any | no |
| lead | a coordinator's first word: at its start, to a joiner, when it adopts | any | another fleet, an older epoch |
| join | after describe, fleet idle | once per incarnation | another fleet, another live digest |
| plan | PLANNING | once per update | yes: names, shapes, dtypes, coverage, space, modes |
| stage | STAGING | once per update | yes: read errors, changed source, non-finite values |
| verify | VERIFYING | once per update | yes: coverage, digests: this is the vote |
| pause | PAUSING | once per attempt | yes: not staged, asleep, ranks at different steps, time |
| install | INSTALLING, after `decided` | once per attempt | only by the state table |
| invalidate | INVALIDATING | once per attempt | a cache tier that did not clear |
| restore | RESTORING | once per attempt | only by the state table |
| resume | RESUMING, REOPENING | until acknowledged | only by the state table |
| discard | DISCARDING | until acknowledged | no |
| status | any time | any | no |
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from updater.core.front import (
    Call as Call,
)
from updater.core.front import (
    Claim as Claim,
)
from updater.core.front import (
    Claimed as Claimed,
)
from updater.core.front import (
    Description as Description,
)
from updater.core.front import (
    FrontState as FrontState,
)
from updater.core.front import (
    FrontStatus as FrontStatus,
)
from updater.core.front import (
    Progress as Progress,
)
from updater.core.front import (
    RankInfo as RankInfo,
)
from updater.core.front import (
    Released as Released,
)
from updater.core.front import (
    ReleaseTo as ReleaseTo,
)
from updater.core.front import (
    Spare as Spare,
)
from updater.core.front import (
    SpareState as SpareState,
)
from updater.core.front import (
    same_definition as same_definition,
)
from updater.core.policy import CachePolicy, InFlight, InstallMode, SourceLayout


class Kind(StrEnum):
    """What a transaction does: new bytes, the kept copy back, or a late joiner brought to the live version."""

    UPDATE = "update"
    ROLLBACK = "rollback"
    CATCH_UP = "catch_up"


@dataclass(frozen=True, slots=True)
class Fence:
    """Who is talking about what. Ordered by (epoch, serial, attempt); the rest must be equal.

    `fleet`: the random identity of the fleet (I11), not its name. `owner`: random id of one life of a coordinator; two
    that were started on copies of one journal differ in nothing else.
    """

    fleet: str
    epoch: int
    serial: int
    attempt: int
    incarnation: str
    owner: str = ""

    def order(self) -> tuple[int, int, int]:
        return (self.epoch, self.serial, self.attempt)


@dataclass(frozen=True, slots=True)
class Ack:
    """The plain answer: done, or was done."""

    fence: Fence
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """Admits a verified joiner: it opens on `version`. Refused unless its live digest equals `digest`."""

    fence: Fence
    version: str
    digest: str


@dataclass(frozen=True, slots=True)
class DiskOffer:
    """`path`: a safetensors file or a directory; links resolved, it must lie under one of the roots."""

    path: str
    kind: Literal["disk"] = "disk"


@dataclass(frozen=True, slots=True)
class Seats:
    """Where the ranks of one participant sit among the receivers of a stream: `ranks` of them, from `first` on."""

    replica: str
    incarnation: str
    first: int
    ranks: int


#: Transports that push: the bytes come once, from a sender that listens at an address.
STREAMS = ("broadcast", "shared_memory", "cuda_ipc")


@dataclass(frozen=True, slots=True)
class StreamOffer:
    """A sender that every rank of every participant receives from, once.

    `address`: `host:port` of a broadcast's store, else the path of a Unix socket. `session`: what the sender calls
    its state of now; it takes a new one after every end that was not normal, so no receiver meets leftovers. `seats`:
    filled in when the participants are frozen; receivers are numbered over all of them in this order.
    """

    kind: Literal["broadcast", "shared_memory", "cuda_ipc"]
    address: str
    session: str
    seats: tuple[Seats, ...] = ()

    @property
    def receivers(self) -> int:
        return sum(each.ranks for each in self.seats)

    def first_of(self, incarnation: str) -> int:
        """Number of the first receiver of a participant. Raises LookupError for one without seats."""
        for each in self.seats:
            if each.incarnation == incarnation:
                return each.first
        raise LookupError(f"no seats for {incarnation}")

    def name_of(self, number: int) -> tuple[str, int]:
        """(replica, rank) of a receiver, for messages. Raises LookupError."""
        for each in self.seats:
            if each.first <= number < each.first + each.ranks:
                return each.replica, number - each.first
        raise LookupError(f"no receiver {number}")


Offer = DiskOffer | StreamOffer


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """`manifest`: the manifest as JSON text, or empty to take the one beside the source, if any.

    For a rollback `offer` is None, and `version` and `digest` name what the spare must hold as `previous`. For a
    catch-up `digest` is the content digest that staging must arrive at.
    `allow_suspicious`, `layouts`: as in the policy.
    """

    fence: Fence
    kind: Kind
    update: str
    version: str
    offer: Offer | None
    manifest: str
    digest: str
    in_flight: InFlight
    cache: CachePolicy
    install: InstallMode
    require_digests: bool
    allow_narrowing: tuple[tuple[str, str], ...]
    allow_nonfinite: bool
    allow_suspicious: tuple[str, ...] = ()
    layouts: tuple[tuple[str, SourceLayout], ...] = ()
    require_config: bool = False
    allow_config: tuple[str, ...] = ()


Held = Literal["engine", "none"]


@dataclass(frozen=True, slots=True)
class Compared:
    """What of a version, beside its tensors, was held against the engine that takes it: `engine`, or `none`."""

    config: Held = "none"
    tokenizer: Held = "none"
    quantisation: Held = "none"

    def both(self, other: Compared) -> Compared:
        """The capabilities that two engines have in common."""

        def held(mine: Held, theirs: Held) -> Held:
            return mine if mine == theirs else "none"

        return Compared(
            held(self.config, other.config),
            held(self.tokenizer, other.tokenizer),
            held(self.quantisation, other.quantisation),
        )


NOT_COMPARED = Compared()


@dataclass(frozen=True, slots=True)
class PlanReply:
    """No tensor byte was read. `manifest_digest` is empty where there is no manifest."""

    fence: Fence
    manifest_digest: str
    tensors: int
    bytes_to_read: int  # over all ranks
    install: InstallMode  # what `auto` resolved to
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0
    compared: Compared = NOT_COMPARED


@dataclass(frozen=True, slots=True)
class StageRequest:
    fence: Fence
    deadline_s: float


@dataclass(frozen=True, slots=True)
class StageReply:
    fence: Fence
    bytes_read: int
    seconds: float


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """`digests`: (tensor, digest) that the trainer could promise only once its stream was sealed."""

    fence: Fence
    deadline_s: float
    digests: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class VerifyReply:
    """The vote. `observed`: content digest of what the spares of all ranks hold together, in checkpoint terms.

    `proof` is `digests` where every tensor was compared with the trainer's, else `structure_only`.
    """

    fence: Fence
    observed: str
    proof: str
    tensors_changed: int
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PauseRequest:
    fence: Fence
    in_flight: InFlight
    quiesce_s: float
    lease_s: float


@dataclass(frozen=True, slots=True)
class PauseReply:
    """Re-asserts what the vote said, at the moment when nothing runs. `step`: engine step, equal on all ranks."""

    fence: Fence
    staged_serial: int
    staged_digest: str
    step: int
    asleep: bool
    aborted: int = 0
    requeued: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class InvalidateRequest:
    fence: Fence
    cache: CachePolicy


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """`published`: reopen on `version`, `digest`; else reopen on the old one, which they then name."""

    fence: Fence
    published: bool
    version: str
    digest: str


@dataclass(frozen=True, slots=True)
class DiscardRequest:
    """Drop the staging of `fence.serial` and remember that (serial, attempt) may never install."""

    fence: Fence


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """Carries no fence: it changes nothing."""


@dataclass(frozen=True, slots=True)
class FenceRequest:
    """A verb that needs nothing but its fence: lead, install, restore."""

    fence: Fence


# --- asked by an operator of one replica, not by its coordinator: `POST /replica/v1/{verb}`


@dataclass(frozen=True, slots=True)
class ReadmitRequest:
    """Take a quarantined replica back if every rank proves one version: it joins again as `incarnation`."""

    fence: Fence
    incarnation: str


@dataclass(frozen=True, slots=True)
class ReleaseRequest:
    """Open a replica that has installed and whose coordinator is gone."""

    fence: Fence
    to: ReleaseTo


#: verb -> (request type, reply type)
MESSAGES: dict[str, tuple[type, type]] = {
    "describe": (StatusRequest, Description),
    "status": (StatusRequest, FrontStatus),
    "lead": (FenceRequest, FrontStatus),
    "join": (JoinRequest, Ack),
    "plan": (PlanRequest, PlanReply),
    "stage": (StageRequest, StageReply),
    "verify": (VerifyRequest, VerifyReply),
    "pause": (PauseRequest, PauseReply),
    "install": (FenceRequest, Ack),
    "invalidate": (InvalidateRequest, Ack),
    "restore": (FenceRequest, Ack),
    "resume": (ResumeRequest, Ack),
    "discard": (DiscardRequest, Ack),
}
