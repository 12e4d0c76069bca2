"""An update from a folder: one that is written now, or one that exists; and when folders of earlier pushes may go.

A folder goes when newer ones enough exist *and* the coordinator no longer lists it as needed: deletion follows
consumption, never a clock (B022).
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer_side.client import protocol
from trainer_side.client.handle import CoordinatorLink, UpdateHandle
from trainer_side.client.protocol import HttpSteps
from trainer_side.client.request import PushRequest
from trainer_side.client.session import LEASE_S
from trainer_side.publishing.folder import SHARD_BYTES, FolderWriter
from trainer_side.publishing.publish import StepDeadline, late
from trainer_side.ranks.agreement import Message
from trainer_side.sources.source import WeightSource, model_of
from updater.core.errors import LiveweightsError, refuse
from updater.core.version import Version
from updater.protocol.manifest import FILE_NAME

_NAME = re.compile(r"(?P<label>\d+-\d+)(\.(?P<copy>\d+))?")


@dataclass(frozen=True, slots=True)
class CheckpointDirectory:
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
            free_name(self.root, label),
            source.specs,
            digests=known,
            ties=source.ties,
            config_from=self.config_from,
            model=model_of(source),
            shard_bytes=self.shard_bytes,
            progress=progress,
        )


class DiskPush:
    """Begins the update of a folder when it is sealed, and follows it. `writer`: fills the folder first."""

    def __init__(
        self,
        link: CoordinatorLink,
        request: PushRequest,
        folder: Path | FolderWriter,
        directory: CheckpointDirectory | None = None,
    ) -> None:
        self._link, self._request, self._folder, self._directory = link, request, folder, directory
        self._deadline = StepDeadline(request.timeout_s)
        manual = request.policy.get("commit") == "manual"
        self._lease_s = LEASE_S if request.lease_s is None and manual else request.lease_s
        self._running: UpdateHandle | None = None

    def prepare(self) -> Message:
        return {}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        if not isinstance(self._folder, FolderWriter):
            raise refuse("wrong_phase", "this folder is written already", tensor=name)
        self._folder.put(name, tensor)

    def seal(self, failed: LiveweightsError | None) -> Message:
        if failed is not None:
            raise failed
        self.written()
        body = {**self._request.body(), "path": str(self._folder)}
        if self._directory is not None:  # written for this push alone: no other request is the same
            body.setdefault("id", protocol.fresh_id(body["version"]))
        if self._lease_s is not None:
            body["lease_s"] = self._lease_s
        state = self._link.run(protocol.begin(body))
        self._running = UpdateHandle(self._link, state, lease_s=self._lease_s, hooks=self._request.hooks)
        return {}

    def written(self) -> Path:
        """The folder, whole and durable."""
        if isinstance(self._folder, FolderWriter):
            self._folder.finish()
            self._folder = self._folder.target
        return self._folder

    def ended(self) -> Message | None:
        running = self._running
        if running is None:
            raise refuse("wrong_phase", "the update has not begun")
        if running.ended(self._deadline.beat_s):
            receipt = running.receipt()
            if self._directory is not None:
                self._link.run(tidy(self._directory.root, self._directory.keep))
            return receipt.model_dump(mode="json")
        if not self._deadline.beat_s:
            raise late("the update has not ended in time; it goes on")
        return None

    def close(self, cause: BaseException | None = None) -> None:
        """An update that runs needs no client to come back."""
        if isinstance(self._folder, FolderWriter):
            self._folder.discard()
        if self._running is not None:
            self._running.close()


def free_name(root: Path, label: str) -> Path:
    """`root/<label>`, or `<label>.2` and so on: a version that was refused may be pushed again, repaired, and what an
    earlier push left is never written over."""
    candidate, copy = root / label, 2
    while candidate.exists():
        candidate, copy = root / f"{label}.{copy}", copy + 1
    return candidate


def pushed(root: Path) -> list[Path]:
    """Folders that pushes wrote, oldest version first. Anything else in `root` is not ours to touch."""
    found = []
    for path in root.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink() and (path / FILE_NAME).is_file():
            found.append((Version.parse(match["label"]), int(match["copy"] or 1), path))
    return [path for _version, _copy, path in sorted(found)]


def surplus(root: Path, keep: int, needed: frozenset[str]) -> list[Path]:
    """What may go: all but the newest `keep` besides the newest one, less what is needed."""
    return [path for path in pushed(root)[: -(keep + 1)] if os.path.realpath(path) not in needed]


def tidy(root: Path, keep: int) -> HttpSteps[list[Path]]:
    """Remove surplus folders and return them. A coordinator that cannot say what it needs keeps everything.

    The push has succeeded when this runs: nothing here makes it fail.
    """
    try:
        fleet = yield from protocol.get("/v1/fleet")
    except LiveweightsError:
        return []
    needed = fleet.get("sources_needed")
    if not isinstance(needed, list):
        return []
    gone = surplus(root, keep, frozenset(os.path.realpath(str(path)) for path in needed))
    for path in gone:
        _remove(path)
    return gone


def _remove(path: Path) -> None:
    """Out of sight first, so that no reader finds half a folder under a version's name."""
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}.gone")
    try:
        os.rename(path, hidden)
    except OSError:
        return
    shutil.rmtree(hidden, ignore_errors=True)
