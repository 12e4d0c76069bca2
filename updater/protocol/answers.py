"""What the public HTTP API answers, as pydantic models: a client of another process reads what OpenAPI promises.

Times are Unix seconds, durations are named by their unit.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator

from updater.core.errors import Failure, Group
from updater.core.participant import NOT_COMPARED, Compared, Seats
from updater.protocol.problems import known_failure, known_group

# A coordinator or a journal of another release may tell a code that this one does not know: it is read as `internal`.
ToldFailure = Annotated[Failure, BeforeValidator(known_failure)]
ToldGroup = Annotated[Group, BeforeValidator(known_group)]


class DtypesState(BaseModel):
    """What the replicas hold each source tensor in. `dtypes`: name with every number written as `#`, or a whole name ->
    safetensors dtype; empty for a tensor that is quantised, or kept in another form. `fingerprint`: of these.
    """

    fingerprint: str
    dtypes: dict[str, str]
    replicas: list[str]


class MemberState(BaseModel):
    """One member as the coordinator sees it. `state` is the front's, or `lost`. `hint`: what ends a state in
    which it does not serve; `failures`: why it does not, the front's own first. `release`: of the
    front; `coordinator_release`: of who says all this."""

    replica: str
    url: str
    state: str
    incarnation: str
    live_version: str
    live_digest: str
    spare: str
    spare_version: str
    engine: str = ""
    model: str = ""
    ranks: list[dict[str, Any]] = []
    failures: list[ToldFailure] = []
    hint: str = ""
    release: str = ""
    coordinator_release: str = ""


class Pause(BaseModel):
    """Milliseconds on the coordinator's clock. `closed_ms`: first pause sent to last reopening acknowledged;
    `quiesce_ms`: until the last pause acknowledgement; `pause_ms`: the rest, which the parts add up to."""

    closed_ms: float
    quiesce_ms: float
    pause_ms: float
    decide_ms: float
    install_ms: float
    invalidate_ms: float
    publish_ms: float
    resume_ms: float
    restore_ms: float = 0.0  # taking back and reopening on the old version


class Receipt(BaseModel):
    """What an update answers. `observed`: content digest per member; `bytes_read`: over all members and ranks.

    `failures`: the first 1000 of `failures_count`; `groups`: all of them by code. `retryable`: of one that did not
    commit, whether the same request may succeed later.
    """

    id: str
    serial: int
    kind: Literal["update", "rollback", "catch_up"]
    outcome: Literal["committed", "planned", "rejected", "aborted", "rolled_back"]
    reason: str | None
    failures: list[ToldFailure]
    failures_count: int = 0
    groups: list[ToldGroup] = []
    retryable: bool = False
    version: str
    live_version: str | None
    rollback_to: str | None
    manifest_digest: str
    observed: dict[str, str]
    proof: Literal["digests", "structure_only", ""]
    compared: Compared = NOT_COMPARED
    install: str
    bytes_read: int
    tensors: int
    tensors_changed: int
    warnings: list[str]
    attempts: int
    aborted_requests: int = 0  # that the pause ended early
    requeued_requests: int = 0  # that it put back into the queue
    phases_ms: dict[str, float]
    pause: Pause | None
    update_ms: float
    pause_share: float | None
    members: list[MemberState]
    started_at: float
    ended_at: float


class OfferState(BaseModel):
    """A stream as its receivers were told of it: what a sender needs to know of them."""

    # Not the core's `StreamOffer`: here the seats are always told, and a kind of a later release can be read.
    kind: str
    address: str
    session: str
    seats: list[Seats]


class ProgressState(BaseModel):
    """Bytes read and bytes planned, over all ranks of all members."""

    done: int
    total: int


class UpdateState(BaseModel):
    """An update that runs or ran. `offer`: of a running stream, from `staging` on. `receipt` once it ended.

    `progress`: of a staging that takes longer than a moment.
    """

    id: str
    serial: int
    kind: str
    version: str
    phase: str
    attempt: int
    lease_left_s: float | None
    phases_ms: dict[str, float]
    offer: OfferState | None = None
    progress: ProgressState | None = None
    receipt: Receipt | None = None


class VersionState(BaseModel):
    version: str | None
    digest: str
    manifest_digest: str
    since: float | None
    rollback_to: str | None
    epoch: int


class StrangerState(BaseModel):
    """A front that calls and is no member. It obeys `fleet` and `epoch`."""

    replica: str
    url: str
    fleet: str
    epoch: int
    state: str
    live_version: str
    live_digest: str


class ModelState(BaseModel):
    """What the fleet's engines run on, beside tensors. `replica`: which of them said so; all members are alike.

    `document`: a `ModelDocument` of `updater.protocol.model_document`, or null where no member says one.
    `manifest_digest`: of what is live; empty where it came without a manifest.
    `allow_suspicious`: patterns that hold for every update of the fleet.
    """

    version: str | None
    manifest_digest: str
    replica: str
    document: dict[str, Any] | None
    allow_suspicious: list[str] = []


class FleetState(BaseModel):
    """`sources_needed`: paths that a late joiner or the running update may still be read from: do not delete them.

    `fleet`: the name; `identity`: random, kept by the journal and by every replica, empty while nothing was published.
    `hold`: why nothing is published and no replica admitted. `strangers`: replicas that call and are no members.
    `refused`: why replicas that asked to join within the last minute were not taken in, by replica.
    """

    fleet: str
    identity: str = ""
    hold: ToldFailure | None = None
    strangers: list[StrangerState] = []
    refused: list[ToldFailure] = []
    epoch: int
    phase: str
    live_version: str | None
    rollback_to: str | None
    update: str | None
    sources_needed: list[str]
    members: list[MemberState]
