"""`push(weights, version)`: from a state dict or a checkpoint folder to a published version."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import torch

from trainer_side import flows, retention
from trainer_side.client import UPDATE_S, AsyncClient, Client
from trainer_side.flows import Flow
from trainer_side.folder import SHARD_BYTES, write_folder
from trainer_side.source import take
from updater.core.errors import refuse
from updater.core.policy import Policy
from updater.core.version import Version
from updater.schemas import Receipt

#: Folder for pushed checkpoints, where `directory` is not given. The coordinator must have it among its roots.
DIRECTORY_ENV = "LIVEWEIGHTS_DIRECTORY"
Weights = Mapping[str, torch.Tensor] | str | os.PathLike[str]


def push(
    weights: Weights,
    version: int | str | Version,
    *,
    url: str | None = None,
    token: str | None = None,
    directory: str | os.PathLike[str] | None = None,
    config_from: str | os.PathLike[str] | None = None,
    policy: Policy | Mapping[str, Any] | None = None,
    id: str | None = None,
    keep: int = 2,
    shard_bytes: int = SHARD_BYTES,
    timeout_s: float = UPDATE_S,
    progress: Callable[[int], None] = lambda _bytes: None,
) -> Receipt:
    """Publish `weights` as `version` and wait for the receipt.

    `weights`: a state dict (any device; one tensor at a time is copied), which is written to
    `directory/<run>-<step>` with its manifest, or the path of a checkpoint that exists.
    `version`: a step of the current run, `run-step`, or a `Version`.
    `config_from`: model folder whose config and tokenizer files go with the weights, so that an engine can start there.
    `keep`: how many folders of earlier pushes to leave in `directory`, besides those that the coordinator still needs.

    Raises Rejected, Aborted or RolledBack (with `error.receipt`, saying what is live), Unavailable, Unauthorized.
    """
    with Client(url, token) as client:
        request = _Request(version, policy, id, timeout_s)
        if isinstance(weights, Mapping):
            label = client.run(_label(version, request.policy))
            folder = _write(weights, label, directory, config_from, shard_bytes, progress)
            receipt = client.run(request.flow(folder))
            client.run(retention.tidy(folder.parent, keep))
            return receipt
        return client.run(request.flow(_existing(weights)))


def push_async(
    weights: Weights,
    version: int | str | Version,
    *,
    url: str | None = None,
    token: str | None = None,
    directory: str | os.PathLike[str] | None = None,
    config_from: str | os.PathLike[str] | None = None,
    policy: Policy | Mapping[str, Any] | None = None,
    id: str | None = None,
    keep: int = 2,
    shard_bytes: int = SHARD_BYTES,
    timeout_s: float = UPDATE_S,
    progress: Callable[[int], None] = lambda _bytes: None,
) -> Coroutine[Any, Any, Receipt]:
    """The async twin of `push`: copies the weights before it returns, so the trainer may step at once.

    The coroutine that it returns publishes the copy. A bare step is taken as one of the run that is live now.
    """
    request = _Request(version, policy, id, timeout_s)
    if not isinstance(weights, Mapping):
        return _publish(request, _existing(weights), None, url, token)
    with Client(url, token) as client:
        label = client.run(_label(version, request.policy))
    folder = _write(weights, label, directory, config_from, shard_bytes, progress)
    return _publish(request, folder, keep, url, token)


async def _publish(request: _Request, folder: Path, keep: int | None, url: str | None, token: str | None) -> Receipt:
    async with AsyncClient(url, token) as client:
        receipt = await client.run(request.flow(folder))
        if keep is not None:
            await client.run(retention.tidy(folder.parent, keep))
        return receipt


class _Request:
    """Everything of a push but the bytes, checked before a byte is written."""

    def __init__(
        self,
        version: int | str | Version,
        policy: Policy | Mapping[str, Any] | None,
        id: str | None,
        timeout_s: float,
    ) -> None:
        if isinstance(version, str):
            version = _parsed(version)
        self.version: int | str = str(version) if isinstance(version, Version) else version
        self.policy = _policy(policy)
        self.id, self.timeout_s = id, timeout_s

    def flow(self, folder: Path) -> Flow[Receipt]:
        body: dict[str, Any] = {"version": self.version, "path": str(folder)}
        if self.policy:
            body["policy"] = self.policy
        if self.id is not None:
            body["id"] = self.id
        answer = yield from flows.begin(body, wait=True, timeout_s=self.timeout_s)
        return Receipt.model_validate(answer)


def _policy(policy: Policy | Mapping[str, Any] | None) -> dict[str, Any]:
    """As the API spells it: only what differs from the defaults."""
    from updater import wire

    if policy is None:
        return {}
    if isinstance(policy, Policy):
        plain, usual = wire.plain(policy), wire.plain(Policy())
        return {key: value for key, value in plain.items() if value != usual[key]}
    return dict(policy)


def _parsed(text: str) -> Version:
    try:
        return Version.parse(text)
    except ValueError as error:
        raise refuse("bad_request", str(error)) from None


def _label(version: int | str | Version, policy: Mapping[str, Any]) -> Flow[str]:
    """The folder's name; a bare step belongs to the run that is live, or with `new_run` to the next one."""
    if not isinstance(version, int):
        return str(version)
    answer = yield from flows.get("/v1/version")
    live = _parsed(str(answer.get("version") or "start"))
    return str(Version(live.run + 1 if policy.get("new_run") else live.run, version))


def _write(
    weights: Mapping[str, torch.Tensor],
    label: str,
    directory: str | os.PathLike[str] | None,
    config_from: str | os.PathLike[str] | None,
    shard_bytes: int,
    progress: Callable[[int], None],
) -> Path:
    checked = take(weights)
    parent = directory or os.environ.get(DIRECTORY_ENV)
    if not parent:
        raise refuse("bad_request", f"say where to write: directory=... or {DIRECTORY_ENV}")
    root = Path(parent).resolve()
    root.mkdir(parents=True, exist_ok=True)
    folder = retention.free_name(root, label)
    write_folder(
        checked,
        folder,
        config_from=Path(config_from) if config_from else None,
        shard_bytes=shard_bytes,
        progress=progress,
    )
    return folder


def _existing(path: str | os.PathLike[str]) -> Path:
    folder = Path(path).resolve()
    if not folder.exists():
        raise refuse("source_missing", "no such file or folder", file=str(folder))
    return folder
