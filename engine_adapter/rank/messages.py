"""What a front tells its ranks and what they answer, over the channel between two processes of one replica.

A rank obeys only its front: fencing, leases and the replica table are the front's; the rank checks serials only to
be idempotent. Every reply is an `Answer` or a `RankRefused` with failures; a rank never lets an exception travel.
`RankHello` is how a rank introduces its engine, `hello_of` makes it.
"""

from __future__ import annotations

import os
from copy import deepcopy
from dataclasses import dataclass, replace

from engine_adapter.base import EngineSpec, KnowsConfig, RankEngine
from engine_adapter.placement.values import RankVerifyReply, SourceBoxes, TensorCuts, WireTensor
from transports.disk.hashes import folder_document
from updater.core.errors import Failure, Rejected, refuse
from updater.core.participant import Offer, RankInfo
from updater.core.policy import CachePolicy, Capabilities, InstallMode, SourceLayout
from updater.protocol.model_config import config_part, quantisation_part
from updater.protocol.model_document import ModelDocument, config_hash, whole
from updater.protocol.model_tokenizer import TokenizerData


@dataclass(frozen=True, slots=True)
class RankHello:
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
class RankRefused:
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


def hello_of(engine: RankEngine, spec: EngineSpec) -> RankHello:
    """`spec`: what the engine was built from."""
    parameters = engine.parameters()
    info = RankInfo(
        rank=spec.rank,
        pid=os.getpid(),
        parameters=len(parameters),
        weight_bytes=sum(parameter.local.nbytes for parameter in parameters.values()),
        device=next((str(parameter.local.device) for parameter in parameters.values()), "cpu"),
    )
    model = running_document(spec.model, engine)
    # Rank 0 says what it is; the others only that it is the same.
    said = model if spec.rank == 0 else None
    return RankHello(info, spec.size, engine.name, engine.capabilities, config_hash(model), said)


def running_document(folder: str, engine: object) -> ModelDocument:
    """What the engine runs on: the documents of its start folder, and what it was told to read otherwise. Nothing is
    known of a folder whose files cannot be read: the engine has loaded it all the same.
    """
    try:
        model = folder_document(folder, ("/",))
    except Rejected:
        return ModelDocument()
    if isinstance(engine, KnowsConfig):
        model = told_otherwise(model, engine)
    return completed(model, engine)


def told_otherwise(model: ModelDocument, engine: KnowsConfig) -> ModelDocument:
    """`model` as the engine reads it. Raises Rejected `config_mismatch` for what cannot be compared."""
    model = replace(model, tokenizer=_tokenizer(model.tokenizer, engine))
    read = {**(model.config or {}), **({"quantization_config": model.quantization} if model.quantization else {})}
    try:
        runs = dict(engine.running_config(deepcopy(read)))
        if runs == read:
            return model
        return replace(model, config=config_part(runs), quantization=quantisation_part(runs))
    except Exception as error:  # the boundary to a library; also what it says may be too much, or no JSON
        why = f"what the engine's options make of the config cannot be compared: {type(error).__name__}: {error}"
        raise refuse("config_mismatch", why) from None


def _tokenizer(started: TokenizerData | None, engine: KnowsConfig) -> TokenizerData | None:
    """`started`: of the start folder."""
    try:
        folder = engine.tokenizer_folder()
        return folder_document(folder, ("/",)).tokenizer if folder else started
    except Exception:  # the boundary to a library, or files that cannot be read: then it is not known
        return None


def completed(model: ModelDocument, engine: object) -> ModelDocument:
    """With what the engine's own config class makes of the config."""
    if model.config is None or not isinstance(engine, KnowsConfig):
        return model
    try:
        full = dict(engine.completed_config(deepcopy(model.config)))  # a library fills in what it is handed
    except Exception:  # the boundary to a library: what its class cannot read is compared as it is written
        return model
    return replace(model, completed=whole(full))
