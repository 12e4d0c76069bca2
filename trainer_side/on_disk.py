"""An update from a folder: one that is written now, or one that exists."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer_side import flows, retention
from trainer_side.folder import SHARD_BYTES, FolderWriter
from trainer_side.lockstep import Told
from trainer_side.request import PushRequest
from trainer_side.running import Link, RunningUpdate
from trainer_side.session import LEASE_S
from trainer_side.stream import Patience, late
from trainer_side.weights import WeightSource, model_of
from updater.core.errors import LiveweightsError, refuse


@dataclass(frozen=True, slots=True)
class Shelf:
    """Where pushed folders go. `keep`: how many of earlier pushes stay, besides those the coordinator needs."""

    root: Path
    config_from: Path | None = None
    keep: int = 2
    shard_bytes: int = SHARD_BYTES

    def writer(
        self, label: str, source: WeightSource, known: Mapping[str, str], progress: Callable[[int], None]
    ) -> FolderWriter:
        """Of a folder that does not exist yet."""
        self.root.mkdir(parents=True, exist_ok=True)
        return FolderWriter(
            retention.free_name(self.root, label),
            source.specs,
            digests=known,
            ties=source.ties,
            config_from=self.config_from,
            model=model_of(source),
            shard_bytes=self.shard_bytes,
            progress=progress,
        )


class FolderSending:
    """Begins the update of a folder when it is sealed, and follows it. `writer`: fills the folder first."""

    def __init__(
        self,
        link: Link,
        request: PushRequest,
        folder: Path | FolderWriter,
        shelf: Shelf | None = None,
    ) -> None:
        self._link, self._request, self._folder, self._shelf = link, request, folder, shelf
        self._patience = Patience(request.timeout_s)
        manual = request.policy.get("commit") == "manual"
        self._lease_s = LEASE_S if request.lease_s is None and manual else request.lease_s
        self._running: RunningUpdate | None = None

    def prepare(self) -> Told:
        return {}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        if not isinstance(self._folder, FolderWriter):
            raise refuse("wrong_phase", "this folder is written already", tensor=name)
        self._folder.put(name, tensor)

    def seal(self, failed: LiveweightsError | None) -> Told:
        if failed is not None:
            raise failed
        self.written()
        body = {**self._request.body(), "path": str(self._folder)}
        if self._shelf is not None:  # written for this push alone: no other request is the same
            body.setdefault("id", flows.fresh_id(body["version"]))
        if self._lease_s is not None:
            body["lease_s"] = self._lease_s
        state = self._link.run(flows.begin(body))
        self._running = RunningUpdate(self._link, state, lease_s=self._lease_s, hooks=self._request.hooks)
        return {}

    def written(self) -> Path:
        """The folder, whole and durable."""
        if isinstance(self._folder, FolderWriter):
            self._folder.finish()
            self._folder = self._folder.target
        return self._folder

    def ended(self) -> Told | None:
        running = self._running
        if running is None:
            raise refuse("wrong_phase", "the update has not begun")
        if running.ended(self._patience.beat_s):
            receipt = running.receipt()
            if self._shelf is not None:
                self._link.run(retention.tidy(self._shelf.root, self._shelf.keep))
            return receipt.model_dump(mode="json")
        if not self._patience.beat_s:
            raise late("the update has not ended in time; it goes on")
        return None

    def close(self, cause: BaseException | None = None) -> None:
        """An update that runs needs no client to come back."""
        if isinstance(self._folder, FolderWriter):
            self._folder.discard()
        if self._running is not None:
            self._running.close()
