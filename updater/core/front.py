"""What a front says of itself: states, status, description, its call. `updater.core.participant` has all of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from updater.core.errors import Failure
from updater.core.policy import Capabilities


class FrontState(StrEnum):
    """States of the replica table, docs/state-machines.md."""

    JOINING = "joining"
    OPEN = "open"
    CLOSING = "closing"
    PAUSED = "paused"
    INSTALLING = "installing"
    INSTALLED = "installed"
    INVALIDATED = "invalidated"
    RESTORING = "restoring"
    ORPHANED = "orphaned"
    QUARANTINED = "quarantined"
    BROKEN = "broken"


class SpareState(StrEnum):
    EMPTY = "empty"
    STAGING = "staging"
    STAGED = "staged"
    PREVIOUS = "previous"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Spare:
    """`serial` for staging and staged; `version` and `digest` (content digest) for staged and previous."""

    state: SpareState
    serial: int = 0
    version: str = ""
    digest: str = ""


@dataclass(frozen=True, slots=True)
class RankInfo:
    rank: int
    pid: int
    parameters: int
    weight_bytes: int  # of this rank's shard, in the parameters' dtypes
    device: str = "cpu"


class ReleaseTo(StrEnum):
    """What an operator opens a replica on whose coordinator is gone: what is installed, or what served before."""

    LIVE = "live"
    PREVIOUS = "previous"


@dataclass(frozen=True, slots=True)
class Released:
    """An operator opened this replica by hand, on `version`, in the middle of (serial, attempt)."""

    to: ReleaseTo
    version: str
    serial: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Of a staging that runs, over all ranks: bytes read, and bytes that the plan counted."""

    serial: int
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class FrontStatus:
    """Everything a coordinator may know of a replica. `live_version` is a label; digests are content digests."""

    replica: str
    incarnation: str
    fleet: str  # "" before a coordinator has led it
    epoch: int
    serial: int
    attempt: int
    state: FrontState
    live_version: str
    live_digest: str
    spare: Spare
    in_flight: int = 0
    waiting: int = 0
    asleep: bool = False
    lease_left_s: float | None = None
    staged_serial: int = 0
    failure: Failure | None = None
    released: Released | None = None  # until a coordinator has published since
    ranks: int = 0  # how many worker processes it has; 0: not said
    progress: Progress | None = None  # while it stages
    owner: str = ""  # whom it obeys in this epoch
    release: str = "0.1.0"  # which said neither this nor
    wire: int = 1  # the number of its messages
    rival: str = ""  # another owner of the same epoch that led it, or asked to
    unclaimed: bool = False  # its coordinator does not know it: it serves on and obeys nothing until it is led


@dataclass(frozen=True, slots=True)
class Description:
    """What a front says of itself before it joins. `config_hash` names its definition (`v2:...`). `dtypes`: see
    `updater.core.dtypes`; empty where not known.

    `document`: `updater.protocol.model_document.ModelDocument` as JSON, or empty; the machine does not look into it.
    """

    status: FrontStatus
    engine: str
    url: str
    capabilities: Capabilities
    config_hash: str
    model: str
    ranks: tuple[RankInfo, ...]
    dtypes: tuple[tuple[str, str], ...] = ()
    document: str = ""


def same_definition(one: str, other: str) -> bool:
    """Whether two config hashes can be compared: they name one definition. Those of release 0.1.0 name none."""
    return ":" in one and one.partition(":")[0] == other.partition(":")[0]


# --- asked by a front of its coordinator, every few seconds: `POST /v1/fleet/replicas/{id}/claim`


@dataclass(frozen=True, slots=True)
class Call:
    """Am I still a member? What the front obeys (`fleet`, `epoch`, `serial`), and what it holds as live."""

    replica: str
    incarnation: str
    fleet: str
    epoch: int
    serial: int
    version: str
    digest: str
    state: FrontState


class Claim(StrEnum):
    """What a coordinator says to a call. Only these three documents count; silence and any other answer say nothing."""

    MEMBER = "member"
    REMOVED = "removed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Claimed:
    """`fleet`, `epoch`: of the coordinator that says it; `fleet` is empty while it has none."""

    claim: Claim
    fleet: str
    epoch: int
