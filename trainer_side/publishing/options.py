"""What `Pusher` and `push` take beside weights and a version, for all pushes: each name, type and default stands once.

`request.RequestOptions` are those of one push.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypedDict, cast

from trainer_side.client.request import REQUEST_DEFAULTS, RequestOptions
from trainer_side.client.session import STALL_S
from trainer_side.publishing.folder import SHARD_BYTES
from trainer_side.sources.casts import Dtypes
from transports.buckets import BUCKET_BYTES

#: Folder for pushed checkpoints, where `directory` is not given. The coordinator must have it among its roots.
DIRECTORY_ENV = "LIVEWEIGHTS_DIRECTORY"


class PusherOptions(TypedDict, total=False):
    """How all pushes of a `Pusher` go.

    `transport`: `disk`, `broadcast`, `shared_memory`, `cuda_ipc`, or `auto`: `disk` for a path or where a `directory`
    is named (here, or by LIVEWEIGHTS_DIRECTORY), else `shared_memory` if every replica is on this machine, else
    `broadcast`.
    `config_from`: model folder whose config and tokenizer the weights are of, for the engines to compare; without it a
    model of transformers gives its own config. Over disk its files go with the weights, so that an engine can start
    there.
    For disk: `directory`: where `<run>-<step>` is written with its manifest.
    `keep`: how many folders of earlier pushes to leave in `directory`, besides those that the coordinator still needs.
    `shard_bytes`: of one file, at most.
    `dtypes`: {glob pattern: dtype} of what travels rounded, as in `sources.as_source`: `{"*": "BF16"}`; one dtype
    for all; or `"engine"`: what the fleet holds each tensor in.
    For streams: `bucket_bytes`: what travels at once; two of them are in memory. `stall_s`: how long one receiver may
    keep a stream waiting before it is given up. `sender_options`: for the transport's sender class.
    """

    transport: str
    directory: str | os.PathLike[str] | None
    config_from: str | os.PathLike[str] | None
    keep: int
    shard_bytes: int
    dtypes: Dtypes | None
    bucket_bytes: int
    stall_s: float
    sender_options: Mapping[str, Any] | None


PUSHER_DEFAULTS: PusherOptions = {
    "transport": "auto",
    "directory": None,
    "config_from": None,
    "keep": 2,
    "shard_bytes": SHARD_BYTES,
    "dtypes": None,
    "bucket_bytes": BUCKET_BYTES,
    "stall_s": STALL_S,
    "sender_options": None,
}


class PushOptions(PusherOptions, RequestOptions, total=False):
    """Keyword arguments of `push` and `push_async`: those of a `Pusher` and those of its one push."""


PUSH_DEFAULTS: PushOptions = {**PUSHER_DEFAULTS, **REQUEST_DEFAULTS}


def parted(options: PushOptions) -> tuple[PusherOptions, RequestOptions]:
    """Those of the pusher and those of the push. A name that is neither stays with the first, which then refuses it."""
    mine = {name: value for name, value in options.items() if name in REQUEST_DEFAULTS}
    rest = {name: value for name, value in options.items() if name not in mine}
    return cast(PusherOptions, rest), cast(RequestOptions, mine)
