"""How a pusher's pushes travel: which transport, the senders that outlive a push, the folders that stay."""

from __future__ import annotations

import os
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from trainer_side.client import protocol
from trainer_side.client.handle import CoordinatorLink
from trainer_side.client.request import PushRequest
from trainer_side.client.session import UpdateSession
from trainer_side.publishing.disk import CheckpointDirectory, DiskPush
from trainer_side.publishing.options import DIRECTORY_ENV, PusherOptions
from trainer_side.publishing.publish import PushBackend, StreamPush
from trainer_side.sources.source import WeightSource, model_of
from transports.disk.hashes import folder_document
from transports.registry import make_sender
from transports.stream import StreamSender
from updater.core.errors import refuse
from updater.protocol.manifest import real_path
from updater.protocol.model_document import ModelDocument
from updater.protocol.model_document import known as known_model


class PushBackends:
    """Makes what the sending rank needs for one push. Used by one push at a time."""

    def __init__(self, link: CoordinatorLink, options: PusherOptions) -> None:
        self._link, self._options = link, options
        root = options["directory"] or os.environ.get(DIRECTORY_ENV)
        source = Path(options["config_from"]) if options["config_from"] else None
        self._directory: CheckpointDirectory | None = None
        if root:
            self._directory = CheckpointDirectory(Path(root).resolve(), source, options["keep"], options["shard_bytes"])
        self._senders: dict[str, StreamSender] = {}

    def folder(self, weights: object) -> Path | None:
        """The checkpoint that the fleet reads by itself, if `weights` are the path of one. Raises Rejected."""
        if not isinstance(weights, str | os.PathLike) or self._options["transport"] not in ("auto", "disk"):
            return None
        if self._options["dtypes"]:
            raise refuse(
                "bad_request",
                "dtypes: a checkpoint on disk is read as it lies there",
                hint="stream it to cast it (transport=...), or let the engine round it with the policy allow_narrowing",
            )
        path = Path(real_path(os.fspath(weights)))
        if not path.exists():
            raise refuse("source_missing", "no such file or folder", file=str(path))
        return path

    def kind(self) -> str:
        """Of the transport; `auto` looks where the replicas are."""
        if self._options["transport"] != "auto":
            return self._options["transport"]
        if self._directory is not None:
            return "disk"
        members = self._link.run(protocol.get("/v1/fleet")).get("members", ())
        here = all(_on_this_machine(str(member.get("url", ""))) for member in members)
        return "shared_memory" if here else "broadcast"

    def sending(self, source: WeightSource, known: Mapping[str, str], request: PushRequest) -> PushBackend:
        """`known`: digests of the source that are known ahead."""
        kind = self.kind()
        if kind == "disk":
            return self.writing(source, known, request)
        session = UpdateSession(
            self._link,
            self._sender(kind),
            source.specs,
            request,
            digests=known,
            ties=source.ties,
            manifest={"model": self._model(source)},
            stall_s=self._options["stall_s"],
            bucket_bytes=self._options["bucket_bytes"],
        )
        return StreamPush(session, request.timeout_s)

    def _model(self, source: WeightSource) -> ModelDocument | None:
        """Config, tokenizer and quantisation: of the folder that `config_from` names, else what the source says."""
        if self._options["config_from"] is None:
            return model_of(source)
        folder = os.path.abspath(self._options["config_from"])
        return known_model(folder_document(folder, ("/",)))

    def writing(self, source: WeightSource, known: Mapping[str, str], request: PushRequest) -> DiskPush:
        """Of a folder that does not exist yet. Raises Rejected where it is not said where to write."""
        if self._directory is None:
            raise refuse("bad_request", f"say where to write: directory=... or {DIRECTORY_ENV}")
        writer = self._directory.writer(self._link.run(request.label()), source, known, request.progress)
        return DiskPush(self._link, request, writer, self._directory)

    def written(self, folder: Path, request: PushRequest) -> DiskPush:
        """Of one that `writing` has filled."""
        return DiskPush(self._link, request, folder, self._directory)

    def as_it_lies(self, folder: Path, request: PushRequest) -> DiskPush:
        """Of one that is the caller's, and stays."""
        return DiskPush(self._link, request, folder)

    def close(self) -> None:
        """After the last push."""
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()

    def _sender(self, kind: str) -> StreamSender:
        if kind not in self._senders:
            self._senders[kind] = make_sender(kind, **(self._options["sender_options"] or {}))
        return self._senders[kind]


def _on_this_machine(url: str) -> bool:
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme not in ("http", "https"):  # an actor may live on any node, whatever its name
        return False
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
