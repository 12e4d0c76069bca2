"""What `Pusher` and `push` take beside weights and a version: each name, type, default and meaning stands here once.

`Options` and `Asked` hold the values. The typed dictionaries beside them are the same names for signatures
(`**options: Unpack[...]`), so that a type checker sees every keyword argument.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict, cast

from trainer_side.flows import UPDATE_S
from trainer_side.folder import SHARD_BYTES
from trainer_side.hooks import Hooks
from trainer_side.request import Terms
from trainer_side.session import STALL_S
from trainer_side.sources.casts import Dtypes
from transports.buckets import BUCKET_BYTES
from updater.core.policy import Policy
from updater.core.version import Version

#: Folder for pushed checkpoints, where `directory` is not given. The coordinator must have it among its roots.
DIRECTORY_ENV = "LIVEWEIGHTS_DIRECTORY"
Progress = Callable[[int], None]


def _silent(_bytes: int) -> None: ...


class PusherOptions(TypedDict, total=False):
    """Keyword arguments that become `Options`."""

    transport: str
    directory: str | os.PathLike[str] | None
    config_from: str | os.PathLike[str] | None
    keep: int
    shard_bytes: int
    dtypes: Dtypes | None
    bucket_bytes: int
    stall_s: float
    sender_options: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Options:
    """How all pushes of a `Pusher` go.

    `transport`: `disk`, `broadcast`, `shared_memory`, `cuda_ipc`, or `auto`: `disk` for a path or where a `directory`
    is named (here, or by LIVEWEIGHTS_DIRECTORY), else `shared_memory` if every replica is on this machine, else
    `broadcast`.
    `config_from`: model folder whose config and tokenizer the weights are of, for the engines to compare; without it a
    model of transformers says its own config. Over disk its files go with the weights, so that an engine can start
    there.
    For disk: `directory`: where `<run>-<step>` is written with its manifest.
    `keep`: how many folders of earlier pushes to leave in `directory`, besides those that the coordinator still needs.
    `shard_bytes`: of one file, at most.
    `dtypes`: {glob pattern: dtype} of what travels rounded, as in `sources.as_source`: `{"*": "BF16"}`; one dtype
    for all; or `"engine"`: what the fleet holds each tensor in.
    For streams: `bucket_bytes`: what travels at once; two of them are in memory. `stall_s`: how long one receiver may
    keep a stream waiting before it is given up. `sender_options`: for the transport's sender class.
    """

    transport: str = "auto"
    directory: str | os.PathLike[str] | None = None
    config_from: str | os.PathLike[str] | None = None
    keep: int = 2
    shard_bytes: int = SHARD_BYTES
    dtypes: Dtypes | None = None
    bucket_bytes: int = BUCKET_BYTES
    stall_s: float = STALL_S
    sender_options: Mapping[str, Any] | None = None


class Asking(TypedDict, total=False):
    """Keyword arguments that become `Asked`."""

    policy: Policy | Mapping[str, Any] | None
    allow_suspicious: Sequence[str]
    layouts: Mapping[str, str] | None
    allow_config: Sequence[str]
    hooks: Hooks | None
    id: str | None
    base_version: str | Version | None
    lease_s: float | None
    timeout_s: float
    progress: Progress


@dataclass(frozen=True, slots=True)
class Asked:
    """One push, beside its weights. Raises Rejected `bad_request` for a version that is none.

    `version`: a step of the current run, `run-step`, or a `Version`. `policy`: what differs from the defaults.
    `allow_suspicious`: patterns of tensors that may hold no normal number; `layouts`: {pattern: kind} of tensors that
    hold several of the model's (`updater.core.policy.SourceLayout`); `allow_config`: keys of config, tokenizer and
    quantisation in which the source may differ from the engine; all three are part of the policy.
    `base_version`: refuse unless this one is live. `id`: names this update; asked again it is the same one.
    `hooks`: called as it goes on. `lease_s`: how long a stream lives without a sign of this process (renewed in the
    background). `timeout_s`: how long to wait for the end. `progress`: told of bytes that were written or sent.
    """

    version: int | str | Version
    policy: Policy | Mapping[str, Any] | None = None
    allow_suspicious: Sequence[str] = ()
    layouts: Mapping[str, str] | None = None
    allow_config: Sequence[str] = ()
    hooks: Hooks | None = None
    id: str | None = None
    base_version: str | Version | None = None
    lease_s: float | None = None
    timeout_s: float = UPDATE_S
    progress: Progress = _silent
    terms: Terms = field(init=False)

    def __post_init__(self) -> None:
        terms = Terms.of(self.version, self.policy, self.id, self.base_version)
        terms = terms.allowing(self.allow_suspicious, self.layouts, self.allow_config)
        object.__setattr__(self, "terms", terms)

    def expecting(self, dtypes: str) -> Asked:
        """The same, for tensors that were rounded by what the fleet said; `dtypes`: the fingerprint of that."""
        made = copy(self)
        object.__setattr__(made, "terms", replace(self.terms, dtypes=dtypes))
        return made


class PushOptions(PusherOptions, Asking, total=False):
    """Keyword arguments of `push` and `push_async`: those of a `Pusher` and those of its one push."""


def parted(options: PushOptions) -> tuple[PusherOptions, Asking]:
    """Those of the pusher and those of the push. What neither knows is left with the first, which then refuses it."""
    mine = {name: value for name, value in options.items() if name in Asking.__optional_keys__}
    rest = {name: value for name, value in options.items() if name not in mine}
    return cast(PusherOptions, rest), cast(Asking, mine)
