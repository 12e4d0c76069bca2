"""What clients send to the public HTTP API, as pydantic models. Unknown fields and wrong JSON types are refused.

Nothing is coerced. Durations are named by their unit. `updater.protocol.answers` has what comes back.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from updater.core.participant import FrontState as ReplicaState
from updater.core.policy import CachePolicy, CommitMode, InFlight, InstallMode, OnBusy, PreviousMode, SourceLayout

MAX_STEP = 10**18 - 1
Id = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


class _Body(BaseModel):
    # strict: "7" is not 7 and 1 is not true; enums arrive as their JSON strings.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class RunStep(_Body):
    run: Annotated[int, Field(ge=0, le=MAX_STEP)]
    step: Annotated[int, Field(ge=0, le=MAX_STEP)]


class SourceBody(_Body):
    """Where the bytes are. Kinds that are not there yet are refused with `transport_unsupported`.

    `disk`: `path`. `broadcast`, `shared_memory`, `cuda_ipc`: a sender listens at `address` (`host:port`, or the path
    of a Unix socket) and calls its state `session`; the update then needs a manifest, and `seal` ends its stream.
    """

    kind: Annotated[str, StringConstraints(max_length=40)] = "disk"
    path: Annotated[str, StringConstraints(min_length=1, max_length=4096)] = ""
    address: Annotated[str, StringConstraints(min_length=1, max_length=300)] = ""
    session: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")] = ""


#: A pattern of tensor names, as of a shell: `*`, `?`, `[...]`.
Glob = Annotated[str, StringConstraints(min_length=1, max_length=500)]


class PolicyBody(_Body):
    # Not the core's `Policy`, which has none of these limits and keeps pairs where JSON has objects and lists.
    in_flight: InFlight = Field(default=InFlight.DRAIN, strict=False)
    cache: CachePolicy = Field(default=CachePolicy.RESET, strict=False)
    install: InstallMode = Field(default=InstallMode.AUTO, strict=False)
    commit: CommitMode = Field(default=CommitMode.AUTO, strict=False)
    on_busy: OnBusy = Field(default=OnBusy.REFUSE, strict=False)
    previous: PreviousMode = Field(default=PreviousMode.SPEND, strict=False)
    require_digests: bool = False
    allow_narrowing: Annotated[
        list[Annotated[list[Annotated[str, StringConstraints(max_length=20)]], Field(min_length=2, max_length=2)]],
        Field(max_length=100),
    ] = []
    allow_nonfinite: bool = False
    allow_suspicious: Annotated[
        list[Glob],
        Field(max_length=1000, description="Patterns of tensors that may hold no normal number."),
    ] = []
    layouts: Annotated[
        dict[Glob, Annotated[SourceLayout, Field(strict=False)]],
        Field(max_length=1000, description="How tensors lie that hold several of the model's; the first hit counts."),
    ] = {}
    require_config: Annotated[
        bool, Field(description="Refuse a source whose config cannot be compared with the engine's.")
    ] = False
    allow_config: Annotated[
        list[Annotated[str, StringConstraints(min_length=1, max_length=500)]],
        Field(max_length=1000, description="Keys of config, tokenizer and quantisation that may differ."),
    ] = []
    new_run: bool = False
    partial: bool = False
    deadline_s: Seconds = 600.0
    quiesce_s: Seconds = 30.0
    pause_lease_s: Seconds = 30.0
    attempts: Annotated[int, Field(ge=1, le=10)] = 3


class UpdateRequest(_Body):
    """`{"path": "/ckpts/v7", "version": 7}` is enough.

    `version`: a step of the current run, `"run-step"`, or `{"run", "step"}`. `path` is short for a disk source.
    `manifest`: the document, or the SHA-256 of one that was put to `/v1/manifests/{digest}`; without it the one
    beside the checkpoint counts. `dtypes`: fingerprint of `GET /v1/fleet/dtypes` that the tensors were rounded by.
    `lease_s`: how long the update lives without a renewal; a disk push with
    `commit=auto` has no lease unless this is given, a stream has one until it is sealed.
    `dry_run`: end with `planned` where a publication would begin to read tensors, or with what refuses it. Nothing is
    read, staged, paused or spent, and no version is used up. Only this may leave the version out: the next step.
    """

    version: int | Annotated[str, StringConstraints(max_length=40)] | RunStep | None = None
    path: Annotated[str, StringConstraints(min_length=1, max_length=4096)] | None = None
    source: SourceBody | None = None
    id: Id | None = None
    base_version: Annotated[str, StringConstraints(max_length=40)] | None = None
    manifest: dict[str, Any] | Sha256 | None = None
    adapter: Annotated[str, StringConstraints(max_length=200)] | None = None
    dtypes: Sha256 | None = None
    policy: PolicyBody = PolicyBody()
    lease_s: Seconds | None = None
    dry_run: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> UpdateRequest:
        if self.version is None and not self.dry_run:
            raise ValueError("give a version")
        if (self.path is None) == (self.source is None):
            raise ValueError("give exactly one of path and source")
        return self

    @property
    def disk_path(self) -> str:
        return self.path or (self.source.path if self.source else "")

    @property
    def transport(self) -> str:
        return self.source.kind if self.source else "disk"


class SealBody(_Body):
    """`digests`: name -> digest (16 hex digits) of tensors whose digests the manifest did not have yet."""

    digests: Annotated[
        dict[
            Annotated[str, StringConstraints(min_length=1, max_length=500)],
            Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")],
        ],
        Field(max_length=1_000_000),
    ] = {}


#: What a client may give as the cause of its abort: what a trainer knows of its tensors, files, ranks and stream.
#: Never what only a coordinator, a front or a replica's rank can know.
CauseCode = Literal[
    "source_missing",
    "source_changed",
    "file_truncated",
    "file_header",
    "file_dtype",
    "file_range",
    "file_duplicate",
    "index_mismatch",
    "shard_missing",
    "read_failed",
    "stream_mismatch",
    "peer_lost",
    "peer_timeout",
    "manifest_mismatch",
    "tensor_missing",
    "tensor_unexpected",
    "tensor_duplicate",
    "tensor_shape",
    "tensor_dtype",
    "tensor_nonfinite",
    "copies_differ",
    "no_space",
    "rank_failed",
    "release_mismatch",
]
CAUSES: frozenset[str] = frozenset(get_args(CauseCode))
#: Of these alone a client may name a replica: the sender of a stream sees which receiver does not take it.
PEER_CAUSES = frozenset({"peer_lost", "peer_timeout", "release_mismatch"})
MAX_CAUSES = 20
MAX_TEXT = 500


class CauseBody(_Body):
    """`rank`: of the trainer; of the replica, where one is named."""

    code: CauseCode
    message: Annotated[str, StringConstraints(max_length=MAX_TEXT)] = ""
    replica: Id | None = None
    rank: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    tensor: Annotated[str, StringConstraints(max_length=MAX_TEXT)] = ""
    file: Annotated[str, StringConstraints(max_length=MAX_TEXT)] = ""
    hint: Annotated[str, StringConstraints(max_length=MAX_TEXT)] = ""

    @model_validator(mode="after")
    def _own_side(self) -> CauseBody:
        if self.replica is not None and self.code not in PEER_CAUSES:
            raise ValueError(f"{self.code} of a replica is for that replica to say")
        return self


class AbortBody(_Body):
    """`failures`: what went wrong on the client's side, the cause first. They come first in the receipt, too."""

    failures: Annotated[list[CauseBody], Field(max_length=MAX_CAUSES)] = []


class RollbackRequest(_Body):
    """`target`: the version to go back to; `expected_live`: what the caller believes serves now. Both as labels.

    `policy`: `in_flight`, `cache`, `on_busy`, `commit`, `attempts` and the deadlines; the rest is 422.
    """

    target: Annotated[str, StringConstraints(max_length=40)]
    expected_live: Annotated[str, StringConstraints(max_length=40)]
    id: Id | None = None
    policy: PolicyBody = PolicyBody()


#: A front over HTTP, also below a path of its server, or a Ray actor as `ray://<actor name>@<namespace>`.
_FRONT = r"^(https?://[^\s/?#@]+(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*/?|ray://[A-Za-z0-9._:-]+@[A-Za-z0-9._:-]+)$"


class JoinBody(_Body):
    replica: Id
    url: Annotated[str, StringConstraints(pattern=_FRONT, max_length=300)]


class AdoptBody(_Body):
    """Take over a fleet with history under an empty journal, with the members that are given."""

    members: Annotated[list[JoinBody], Field(min_length=1, max_length=1000)]
    confirm: Literal[True]


class ClaimBody(_Body):
    """What a front says of itself when it asks whether it is still a member. `version`: a label; `fleet`: the identity
    that it obeys, empty if none.
    """

    incarnation: Id
    url: Annotated[str, StringConstraints(pattern=_FRONT, max_length=300)]
    fleet: Annotated[str, StringConstraints(max_length=128)]
    epoch: Annotated[int, Field(ge=0)]
    serial: Annotated[int, Field(ge=0)]
    version: Annotated[str, StringConstraints(pattern=r"^(start|\d+-\d+)$", max_length=40)]
    digest: Annotated[str, StringConstraints(max_length=128)]
    state: ReplicaState = Field(strict=False)
