"""A source of this process alone, written as a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer_side.publishing.folder import FolderWriter
from trainer_side.sources.source import WeightSource, model_of
from updater.protocol.manifest import Manifest


def write_folder(source: WeightSource, target: Path, **options: Any) -> Manifest:
    """`options`: of `FolderWriter`. Raises what the source raises if it was written to meanwhile."""
    said: dict[str, Any] = {"digests": source.digests(), "ties": source.ties, "model": model_of(source)}
    with FolderWriter(target, source.specs, **said, **options) as writer:
        for name, tensor in source.tensors():
            assert tensor is not None
            writer.put(name, tensor)
        source.check_untouched()
        return writer.finish()
