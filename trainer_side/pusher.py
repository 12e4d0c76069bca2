"""`push(weights, version)`: from a trainer's weights, however it holds them, to a published version."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import torch

from trainer_side import flows
from trainer_side.client import UPDATE_S, Client
from trainer_side.folder import SHARD_BYTES
from trainer_side.hooks import Hooks
from trainer_side.lockstep import Lockstep, side_group
from trainer_side.on_disk import FolderSending, Shelf
from trainer_side.request import Terms
from trainer_side.running import Link
from trainer_side.session import LEASE_S, STALL_S, UpdateSession
from trainer_side.snapshot import Snapshot
from trainer_side.sources import as_source
from trainer_side.sources.casts import Dtypes
from trainer_side.stream import Leading, Sending, StreamSending, publish, walk
from trainer_side.weights import WeightSource
from transports.buckets import BUCKET_BYTES
from transports.registry import make_sender
from transports.stream import StreamSender
from updater.core.errors import refuse
from updater.core.policy import Policy
from updater.core.version import Version
from updater.schemas import Receipt

#: Folder for pushed checkpoints, where `directory` is not given. The coordinator must have it among its roots.
DIRECTORY_ENV = "LIVEWEIGHTS_DIRECTORY"
Weights = WeightSource | Mapping[str, torch.Tensor] | torch.nn.Module | str | os.PathLike[str]
Progress = Callable[[int], None]


def _silent(_bytes: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """One push, beside its weights."""

    terms: Terms
    hooks: Hooks = field(default_factory=Hooks)
    lease_s: float | None = None
    timeout_s: float = UPDATE_S
    progress: Progress = _silent


class Pusher:
    """Publishes version after version. Holds the client and the sender, whose groups and buffers outlive a push.

    `transport`: how the bytes travel. `auto` takes `disk` for a path or where a `directory` is named (here, or by
    LIVEWEIGHTS_DIRECTORY), else `shared_memory` if every replica is on this machine, else `broadcast`.
    `directory`, `config_from`, `keep`, `shard_bytes`: for disk; see `push`. `dtypes`: as in `sources.as_source`.
    `bucket_bytes`: what travels at once; two of them are in memory. `stall_s`: how long one receiver may keep a stream
    waiting before it is given up. `sender_options`: for the transport's sender class. `link`: speaks to the
    coordinator instead of a client of `url`.

    Every rank of the trainer makes one and calls the same methods in the same order. One push at a time.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        transport: str = "auto",
        directory: str | os.PathLike[str] | None = None,
        config_from: str | os.PathLike[str] | None = None,
        keep: int = 2,
        shard_bytes: int = SHARD_BYTES,
        dtypes: Dtypes | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        stall_s: float = STALL_S,
        sender_options: Mapping[str, Any] | None = None,
        link: Link | None = None,
    ) -> None:
        self._client = Client(url, token) if link is None else None
        self._link: Link = link or self._client or Client(url, token)
        self._transport = transport
        root = directory or os.environ.get(DIRECTORY_ENV)
        source = Path(config_from) if config_from else None
        self._shelf = Shelf(Path(root).resolve(), source, keep, shard_bytes) if root else None
        self._dtypes, self._bucket_bytes, self._stall_s = dtypes, bucket_bytes, stall_s
        self._sender_options = dict(sender_options or {})
        self._senders: dict[str, StreamSender] = {}
        self._one_at_a_time = threading.Lock()
        self._background: ThreadPoolExecutor | None = None

    def push(
        self,
        weights: Weights,
        version: int | str | Version,
        *,
        policy: Policy | Mapping[str, Any] | None = None,
        hooks: Hooks | None = None,
        id: str | None = None,
        base_version: str | Version | None = None,
        lease_s: float | None = None,
        timeout_s: float = UPDATE_S,
        progress: Progress = _silent,
    ) -> Receipt:
        """Publish and wait for the receipt, which every rank returns. See `push` of this module."""
        asked = Asked(Terms.of(version, policy, id, base_version), hooks or Hooks(), lease_s, timeout_s, progress)
        with self._one_at_a_time:
            if isinstance(weights, str | os.PathLike) and self._transport in ("auto", "disk"):
                return self._follow(self._of_folder(self._as_it_is(weights), asked, None), True, Lockstep(None))
            source = as_source(weights, dtypes=self._dtypes)
            return publish(source, lambda known: self._sending(source, known, asked))

    def push_async(
        self,
        weights: Weights,
        version: int | str | Version,
        *,
        policy: Policy | Mapping[str, Any] | None = None,
        hooks: Hooks | None = None,
        id: str | None = None,
        base_version: str | Version | None = None,
        lease_s: float | None = None,
        timeout_s: float = UPDATE_S,
        progress: Progress = _silent,
    ) -> Coroutine[Any, Any, Receipt]:
        """Copy the weights, return, and publish the copy in the background; the coroutine only waits for the receipt.

        Over disk the copy is the folder; else the sending rank holds all tensors in host memory meanwhile (on their
        device for `cuda_ipc`). The copy is collective, like a push. A bare step is taken as one of the run live now.
        """
        asked = Asked(Terms.of(version, policy, id, base_version), hooks or Hooks(), lease_s, timeout_s, progress)
        return _receipt(self._start(weights, asked))

    def close(self) -> None:
        """After the last push. What was begun in the background is waited for."""
        if self._background is not None:
            self._background.shutdown()
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()
        if self._client is not None:
            self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- what the sending rank does

    def _sending(self, source: WeightSource, known: Mapping[str, str], asked: Asked) -> Sending:
        kind = self._kind()
        if kind == "disk":
            return self._writing(source, known, asked)
        sender = self._sender(kind)
        session = UpdateSession(
            self._link,
            sender,
            source.specs,
            asked.terms,
            digests=known,
            ties=source.ties,
            lease_s=LEASE_S if asked.lease_s is None else asked.lease_s,
            stall_s=self._stall_s,
            timeout_s=asked.timeout_s,
            bucket_bytes=self._bucket_bytes,
            hooks=asked.hooks,
            progress=asked.progress,
        )
        return StreamSending(session, asked.timeout_s)

    def _writing(self, source: WeightSource, known: Mapping[str, str], asked: Asked) -> FolderSending:
        if self._shelf is None:
            raise refuse("bad_request", f"say where to write: directory=... or {DIRECTORY_ENV}")
        writer = self._shelf.writer(self._link.run(asked.terms.label()), source, known, asked.progress)
        return FolderSending(
            self._link,
            asked.terms,
            writer,
            hooks=asked.hooks,
            lease_s=asked.lease_s,
            timeout_s=asked.timeout_s,
            shelf=self._shelf,
        )

    def _of_folder(self, folder: Path, asked: Asked, shelf: Shelf | None) -> FolderSending:
        return FolderSending(
            self._link,
            asked.terms,
            folder,
            hooks=asked.hooks,
            lease_s=asked.lease_s,
            timeout_s=asked.timeout_s,
            shelf=shelf,
        )

    def _kind(self) -> str:
        if self._transport != "auto":
            return self._transport
        if self._shelf is not None:
            return "disk"
        members = self._link.run(flows.get("/v1/fleet")).get("members", ())
        here = all(_on_this_machine(str(member.get("url", ""))) for member in members)
        return "shared_memory" if here else "broadcast"

    def _sender(self, kind: str) -> StreamSender:
        if kind not in self._senders:
            self._senders[kind] = make_sender(kind, **self._sender_options)
        return self._senders[kind]

    def _as_it_is(self, path: str | os.PathLike[str]) -> Path:
        """A checkpoint that the fleet reads by itself. Raises Rejected."""
        if self._dtypes:
            raise refuse("bad_request", "dtypes: a checkpoint on disk is read as it lies there; stream it to cast it")
        return _existing(path)

    # -- in the background

    def _start(self, weights: Weights, asked: Asked) -> Future[Receipt]:
        with self._one_at_a_time:
            if isinstance(weights, str | os.PathLike) and self._transport in ("auto", "disk"):
                folder = self._as_it_is(weights)
                return self._later(lambda: self._follow(self._of_folder(folder, asked, None), True, Lockstep(None)))
            source = as_source(weights, dtypes=self._dtypes)
            team, side = Lockstep(source.group), side_group(source.group)
            kind = team.lead((lambda: {"kind": self._kind()}) if source.is_sender else None)["kind"]
            if kind == "disk":
                return self._start_from_disk(source, asked, team, Lockstep(side))
            device = None if kind == "cuda_ipc" else "cpu"
            snapshot = Snapshot(source, lambda tensor: tensor.to(device or tensor.device, copy=True), side)
            return self._later(lambda: publish(snapshot, lambda known: self._sending(snapshot, known, asked)))

    def _start_from_disk(self, source: WeightSource, asked: Asked, team: Lockstep, later: Lockstep) -> Future[Receipt]:
        known = source.digests()
        folder: Path | None = None
        with Leading(team, source.is_sender) as leading:
            leading.make(lambda: self._writing(source, known, asked))
            failed = walk(source, leading.sending, team)
            if failed is not None:
                raise failed
            told = leading.step(lambda sending: {"folder": str(_folder_of(sending).written())})
            folder = Path(told["folder"])
        return self._later(
            lambda: self._follow(self._of_folder(folder, asked, self._shelf), source.is_sender, later),
        )

    def _follow(self, sending: FolderSending, is_sender: bool, team: Lockstep) -> Receipt:
        """Publish a folder that is whole."""
        with Leading(team, is_sender) as leading:
            leading.make(lambda: sending)
            leading.step(lambda sending: sending.seal(None))
            return leading.receipt()

    def _later(self, work: Callable[[], Receipt]) -> Future[Receipt]:
        if self._background is None:
            self._background = ThreadPoolExecutor(1, thread_name_prefix="liveweights-push")
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def run() -> Receipt:
            if device is not None:
                torch.cuda.set_device(device)
            with self._one_at_a_time:
                return work()

        return self._background.submit(run)


def push(
    weights: Weights,
    version: int | str | Version,
    *,
    url: str | None = None,
    token: str | None = None,
    transport: str = "auto",
    directory: str | os.PathLike[str] | None = None,
    config_from: str | os.PathLike[str] | None = None,
    policy: Policy | Mapping[str, Any] | None = None,
    hooks: Hooks | None = None,
    id: str | None = None,
    base_version: str | Version | None = None,
    keep: int = 2,
    shard_bytes: int = SHARD_BYTES,
    dtypes: Dtypes | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    lease_s: float | None = None,
    timeout_s: float = UPDATE_S,
    progress: Progress = _silent,
) -> Receipt:
    """Publish `weights` as `version` and wait for the receipt. `Pusher` is the same for many versions.

    `weights`: a state dict, a module (also wrapped or sharded), any `WeightSource`, or the path of a checkpoint. On a
    trainer of several ranks every rank calls this, and every rank returns the receipt or raises the same error.
    `version`: a step of the current run, `run-step`, or a `Version`.
    `transport`: `disk`, `broadcast`, `shared_memory`, `cuda_ipc`, or `auto`; see `Pusher`.
    `directory`: for disk, where `<run>-<step>` is written with its manifest. `config_from`: model folder whose config
    and tokenizer files go with the weights, so that an engine can start there. `keep`: how many folders of earlier
    pushes to leave in `directory`, besides those that the coordinator still needs.
    `dtypes`: {glob pattern: dtype} of what travels rounded, as in `sources.as_source`: `{"*": "BF16"}`.
    `base_version`: refuse unless this one is live. `id`: names this update; asked again it is the same one.
    `lease_s`: how long a stream lives without a sign of this process (renewed in the background).

    Raises Rejected, Aborted or RolledBack (with `error.receipt`, saying what is live), Unavailable, Unauthorized.
    """
    pusher = Pusher(
        url,
        token,
        transport=transport,
        directory=directory,
        config_from=config_from,
        keep=keep,
        shard_bytes=shard_bytes,
        dtypes=dtypes,
        bucket_bytes=bucket_bytes,
    )
    with pusher:
        return pusher.push(
            weights,
            version,
            policy=policy,
            hooks=hooks,
            id=id,
            base_version=base_version,
            lease_s=lease_s,
            timeout_s=timeout_s,
            progress=progress,
        )


def push_async(
    weights: Weights,
    version: int | str | Version,
    *,
    url: str | None = None,
    token: str | None = None,
    transport: str = "auto",
    directory: str | os.PathLike[str] | None = None,
    config_from: str | os.PathLike[str] | None = None,
    policy: Policy | Mapping[str, Any] | None = None,
    hooks: Hooks | None = None,
    id: str | None = None,
    base_version: str | Version | None = None,
    keep: int = 2,
    shard_bytes: int = SHARD_BYTES,
    dtypes: Dtypes | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    lease_s: float | None = None,
    timeout_s: float = UPDATE_S,
    progress: Progress = _silent,
) -> Coroutine[Any, Any, Receipt]:
    """The async twin of `push`: copies the weights before it returns, so the trainer may step at once.

    The copy is published in the background; the coroutine that this returns waits for its receipt.
    """
    pusher = Pusher(
        url,
        token,
        transport=transport,
        directory=directory,
        config_from=config_from,
        keep=keep,
        shard_bytes=shard_bytes,
        dtypes=dtypes,
        bucket_bytes=bucket_bytes,
    )
    asked = Asked(Terms.of(version, policy, id, base_version), hooks or Hooks(), lease_s, timeout_s, progress)
    try:
        return _receipt(pusher._start(weights, asked), pusher)
    except BaseException:
        pusher.close()
        raise


async def _receipt(publishing: Future[Receipt], owned: Pusher | None = None) -> Receipt:
    try:
        return await asyncio.wrap_future(publishing)
    finally:
        if owned is not None:
            await asyncio.to_thread(owned.close)


def _folder_of(sending: Sending) -> FolderSending:
    if not isinstance(sending, FolderSending):
        raise refuse("wrong_phase", "not a folder")
    return sending


def _on_this_machine(url: str) -> bool:
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme not in ("http", "https"):  # an actor may live on any node, whatever its name
        return False
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _existing(path: str | os.PathLike[str]) -> Path:
    folder = Path(path).resolve()
    if not folder.exists():
        raise refuse("source_missing", "no such file or folder", file=str(folder))
    return folder
