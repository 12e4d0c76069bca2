"""What a source on disk looked like when its update began, seen from outside, and whether it looks otherwise now.

A body names a path and not its content. The same body sent again is the same request (I7) only while what lies there
has not been seen to change.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from updater.core.fleet.state import Fleet
from updater.core.participant import DiskOffer
from updater.protocol.manifest import FILE_NAME, INDEX_SUFFIX

_WEIGHTS = (".safetensors", INDEX_SUFFIX)
#: What else of a folder is part of a version. Everything else there may be written anew at any time.
_BESIDE = frozenset(
    {
        "added_tokens.json",
        "config.json",
        "hf_quant_config.json",
        "merges.txt",
        "quantize_config.json",
        "tokenizer.json",
        "tokenizer.model",
        "vocab.json",
        "vocab.txt",
    }
)
_FILES = 10_000  # a folder with more files than that is no checkpoint
_MANIFEST_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class SourceSeen:
    """`files`: (name, bytes, time of change in ns), sorted; empty where nothing could be seen. `manifest`: SHA-256 hex
    of the manifest beside them, or empty: it may be written again, with the same words.
    """

    files: tuple[tuple[str, int, int], ...] = ()
    manifest: str = ""


UNSEEN = SourceSeen()


def seen(path: str) -> SourceSeen:
    """Of a file or a folder. Reads no tensor. Nothing seen: it is gone, or cannot be looked at."""
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    try:
        names = _names(path)
        return SourceSeen(tuple(sorted(_looks(folder, name) for name in names)), _manifest(folder))
    except (OSError, ValueError):
        return UNSEEN


def changed(was: SourceSeen, now: SourceSeen) -> str:
    """A file in which the two differ, or empty. What is gone, or was never recorded, counts as the same: a retry whose
    folder was pruned meanwhile has to get its receipt."""
    if not was.files or not now.files:
        return ""
    before = {name: rest for name, *rest in was.files}
    for name, *rest in now.files:
        if before.get(name, rest) != rest or (name not in before and name.endswith(_WEIGHTS)):
            return name
    return FILE_NAME if was.manifest and now.manifest and was.manifest != now.manifest else ""


def _names(path: str) -> list[str]:
    """Relative to the folder. Raises ValueError for too many."""
    if not os.path.isdir(path) and not path.endswith(INDEX_SUFFIX):
        return [os.path.basename(path)]
    names = []
    for name in _walk(path if os.path.isdir(path) else os.path.dirname(path)):
        names.append(name)
        if len(names) > _FILES:
            raise ValueError(path)
    return [name for name in names if name.endswith(_WEIGHTS) or name in _BESIDE]


def _walk(top: str) -> Iterator[str]:
    for folder, _, files in os.walk(top):
        for file in files:
            yield os.path.relpath(os.path.join(folder, file), top)


def _looks(folder: str, name: str) -> tuple[str, int, int]:
    status = os.stat(os.path.join(folder, name))
    return name, status.st_size, status.st_mtime_ns


def _manifest(folder: str) -> str:
    path = os.path.join(folder, FILE_NAME)
    try:
        if os.path.getsize(path) > _MANIFEST_BYTES:
            return ""
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except FileNotFoundError:
        return ""


def sources_needed(state: Fleet) -> list[str]:
    """What a late joiner is caught up from, also after a rollback, and what the running and waiting updates read."""
    offers = [version.offer for version in (state.live, state.before) if version is not None]
    offers += [state.update.offer] if state.update is not None else []
    offers += [begin.offer for begin in state.queue]
    return sorted({offer.path for offer in offers if isinstance(offer, DiskOffer)})
