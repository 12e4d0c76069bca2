"""A checkpoint on disk as a source: one tensor at a time is read, and never mapped."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainer_side.sources.casts import Casts, cast
from trainer_side.sources.parts import PartsSource
from transports.base import Box, Read
from transports.digest import from_hex
from transports.disk.source import DiskSource
from transports.dtypes import TORCH_DTYPES, byte_shape, is_packed
from updater.core.errors import Aborted, Rejected
from updater.protocol.manifest import TensorSpec
from updater.protocol.model_document import known as known_model

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class FolderSource(PartsSource):
    """A safetensors file or directory. Its files stay open until `close`, or until nothing refers to the source.

    Digests are those of its manifest; a bare folder has none, and its tensors are digested as they pass.
    `model`: what the files beside the weights say of it; None where they say nothing.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        casts: Casts,
        *,
        roots: Sequence[str] = ("/",),
        group: ProcessGroup | None = None,
        sender_rank: int = 0,
    ) -> None:
        """Reads headers and the manifest, no tensor. Raises as `transports.disk.source.DiskSource.open`."""
        disk = DiskSource.open(os.fspath(path), roots)
        self.close = weakref.finalize(self, disk.close)  # before anything below may fail
        manifest = disk.manifest
        known = {entry.name: entry.digest for entry in manifest.tensors} if manifest else {}
        parts = [FilePart.of(disk, spec, casts, known.get(spec.name, "")) for spec in disk.specs.values()]
        casts.check(disk.specs)
        super().__init__(parts, manifest.ties if manifest else (), group=group, sender_rank=sender_rank)
        self._disk = disk
        self.model = known_model(disk.document())

    def check_untouched(self) -> None:
        """Raises Rejected `source_changed`, `source_missing`: the files are not those that were opened."""
        try:
            self._disk.recheck()
        except Aborted as error:
            raise Rejected(*error.failures) from None


@dataclass(frozen=True, slots=True)
class FilePart:
    """`stored`: as the file has it. `digest`: of the stored bytes, or empty."""

    spec: TensorSpec
    stored: TensorSpec
    digest: str
    disk: DiskSource

    @classmethod
    def of(cls, disk: DiskSource, stored: TensorSpec, casts: Casts, digest: str) -> FilePart:
        spec = TensorSpec(stored.name, casts.wire(stored.name, stored.dtype), stored.shape)
        return cls(spec, stored, digest if spec == stored else "", disk)

    @property
    def watched(self) -> Sequence[torch.Tensor]:
        return ()

    def share(self, sender: bool) -> int | None:
        if not self.digest:
            return None
        return from_hex(self.digest) if sender else 0

    def whole(self, sender: bool) -> torch.Tensor | None:
        """Read now. Packed types, and those that this torch has no name for, as their bytes."""
        if not sender:
            return None
        stored = self.stored
        dtype = torch.uint8 if is_packed(stored.dtype) else TORCH_DTYPES[stored.dtype]
        room = torch.empty(byte_shape(stored.shape, stored.dtype), dtype=dtype)
        if room.numel():
            self.disk.read([Read(stored.name, Box.whole(stored.shape), room)])
        return room if self.spec == stored else cast(room, self.spec.dtype)
