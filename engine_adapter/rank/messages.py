"""What a front tells its ranks and what they answer, over the channel between two processes of one replica.

A rank obeys only its front: fencing, leases and the replica table are the front's; the rank checks serials only to
be idempotent. Every reply is an `Answer` or a `Refused` with failures; a rank never lets an exception travel.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine_adapter.placement.values import RankVerifyReply, SourceBoxes, TensorCuts, WireTensor
from updater.core.errors import Failure
from updater.core.participant import Offer, RankInfo
from updater.core.policy import CachePolicy, Capabilities, InstallMode, SourceLayout
from updater.protocol.model_document import ModelDocument


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a rank, unasked, when its model is loaded."""

    info: RankInfo
    size: int
    engine: str
    capabilities: Capabilities
    config_hash: str
    model: ModelDocument | None = None  # of rank 0


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Open the source, make the placement, prove this rank's destination coverage. Reads no tensor byte.

    `roots`: folders under which the path of a disk offer must lie, links resolved. `start`: this is the replay of the
    start checkpoint. `first`: number of the replica's first receiver in a stream; ranks follow in order. `known`: what
    the content must be is known already, and the vote compares it (a catch-up). `layouts`: (glob of source names, how
    they lie).
    """

    serial: int
    offer: Offer
    roots: tuple[str, ...]
    manifest: str
    allow_narrowing: tuple[tuple[str, str], ...] = ()
    allow_nonfinite: bool = False
    start: bool = False
    first: int = 0
    known: bool = False
    layouts: tuple[tuple[str, SourceLayout], ...] = ()


@dataclass(frozen=True, slots=True)
class RankPlanReply:
    """`tensors`: every loaded source tensor (rank 0 only, else empty). `redundant`: alias -> canonical name.

    `dtypes`: of the start checkpoint's plan alone, what this rank holds each source tensor in: `updater.core.dtypes`.
    """

    tensors: tuple[WireTensor, ...]
    boxes: tuple[SourceBoxes, ...]
    redundant: tuple[tuple[str, str], ...]
    manifest_digest: str
    bytes_to_read: int
    warnings: tuple[str, ...] = ()
    dtypes: tuple[tuple[str, str], ...] = ()
    model: ModelDocument | None = None  # what the source says of the model, of rank 0


@dataclass(frozen=True, slots=True)
class RankStage:
    serial: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class RankStageReply:
    bytes_read: int


@dataclass(frozen=True, slots=True)
class RankVerify:
    """Read the spare back through the placement and digest every atom that this rank holds."""

    serial: int
    cuts: tuple[TensorCuts, ...]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class RankCheckPrevious:
    """Rollback's vote: the spare still is `previous` with exactly the bytes it had when it was live."""

    serial: int
    version: str
    digest: str


@dataclass(frozen=True, slots=True)
class RankPause:
    serial: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class RankPauseReply:
    """`running`: hash of the ids of the requests that the scheduler holds, equal on all ranks at one step."""

    step: int
    running: str
    staged_serial: int
    asleep: bool


@dataclass(frozen=True, slots=True)
class RankInstall:
    """Make the spare live and the live spare, and set label and namespace at the same point. Idempotent."""

    serial: int
    attempt: int
    mode: InstallMode
    version: str
    digest: str
    cache: CachePolicy


@dataclass(frozen=True, slots=True)
class RankRestore:
    """Undo `install` of (serial, attempt) if it happened here, wholly or in part; else do nothing."""

    serial: int
    attempt: int
    version: str
    digest: str


@dataclass(frozen=True, slots=True)
class RankInvalidate:
    serial: int
    attempt: int
    cache: CachePolicy


@dataclass(frozen=True, slots=True)
class CacheTier:
    name: str
    cleared: bool


@dataclass(frozen=True, slots=True)
class RankInvalidateReply:
    tiers: tuple[CacheTier, ...]


@dataclass(frozen=True, slots=True)
class RankResume:
    """Let the engine run again. Unknown serials too: a rank that never paused answers at once."""

    serial: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class RankDiscard:
    """Drop staging of `serial` if it is there. The spare is then `empty`, or still `previous` if nothing was spent."""

    serial: int


@dataclass(frozen=True, slots=True)
class RankStatus:
    pass


@dataclass(frozen=True, slots=True)
class RankStatusReply:
    live_version: str
    spare_state: str
    spare_serial: int
    spare_version: str
    paused: bool
    spare_bytes: int


@dataclass(frozen=True, slots=True)
class RankAudit:
    """Background check after a publication: digest the live parameters (or the spare) against what was voted."""

    what: str  # live | spare


@dataclass(frozen=True, slots=True)
class RankAuditReply:
    """`mismatched`: parameter names whose parameter digest is not the one recorded at the vote."""

    checked: int
    mismatched: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RankDigests:
    """Parameter digests of every live parameter of this rank, for tests and comparisons."""


@dataclass(frozen=True, slots=True)
class NamedDigest:
    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class RankDigestsReply:
    digests: tuple[NamedDigest, ...]


@dataclass(frozen=True, slots=True)
class RankDone:
    """The plain answer."""


@dataclass(frozen=True, slots=True)
class Refused:
    failures: tuple[Failure, ...]


#: verb -> (request type, reply type)
RANK_MESSAGES: dict[str, tuple[type, type]] = {
    "plan": (RankPlan, RankPlanReply),
    "stage": (RankStage, RankStageReply),
    "verify": (RankVerify, RankVerifyReply),
    "check_previous": (RankCheckPrevious, RankDone),
    "pause": (RankPause, RankPauseReply),
    "install": (RankInstall, RankDone),
    "restore": (RankRestore, RankDone),
    "invalidate": (RankInvalidate, RankInvalidateReply),
    "resume": (RankResume, RankDone),
    "discard": (RankDiscard, RankDone),
    "status": (RankStatus, RankStatusReply),
    "audit": (RankAudit, RankAuditReply),
    "digests": (RankDigests, RankDigestsReply),
}
