"""Which files make up a checkpoint: a single file, a directory with an index, or a directory of shards without one."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transports.disk.header import FileHeader, read_names
from transports.disk.paths import OpenFile, open_file, read_text, resolve
from updater.core.errors import Failure, Rejected, refuse
from updater.protocol.manifest import INDEX_SUFFIX
from updater.protocol.names import clean_name

SUFFIX = ".safetensors"
INDEX_NAME = "model" + INDEX_SUFFIX
CONSOLIDATED = "model" + SUFFIX
INDEX_LIMIT = 256 << 20
_NUMBERED = re.compile(r"(?P<stem>.*?)-?(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")


@dataclass(frozen=True, slots=True)
class Layout:
    """`folder`: where `files` lie; `files`: relative names in natural order; `promised`: tensor -> file of an index.

    `strays`: safetensors files of the folder that the index does not name; empty where the path names the index itself,
    and so says what is meant.
    """

    folder: str
    files: tuple[str, ...]
    promised: Mapping[str, str] | None = None
    total_size: int | None = None
    index: OpenFile | None = None
    warnings: tuple[str, ...] = field(default=())
    strays: tuple[str, ...] = ()

    def path(self, file: str) -> str:
        return os.path.join(self.folder, file)


def find_layout(path: str, roots: Sequence[str]) -> Layout:
    """Look, and open nothing but the index. Raises Rejected.

    The paths of the layout go through the links as they were named, so that a later look sees a link that moved.
    """
    real = resolve(path, roots)
    if not os.path.isdir(real):
        folder, file = os.path.split(os.path.abspath(path))
        if file.endswith(INDEX_SUFFIX):
            return replace(_indexed(folder, file, _present(folder), (), roots), strays=())
        return Layout(folder, (file,))
    folder = os.path.abspath(path)
    if os.path.realpath(folder) != real:  # `..` behind a link
        folder = real
    present = _present(folder)
    indexes = sorted(name for name in present if name.endswith(INDEX_SUFFIX))
    if len(indexes) > 1 and INDEX_NAME not in indexes:
        raise Rejected(*(Failure("index_mismatch", "more than one index", file=name) for name in indexes))
    if indexes:
        return _indexed(folder, INDEX_NAME if INDEX_NAME in indexes else indexes[0], present, indexes, roots)
    files = natural(name for name in present if name.endswith(SUFFIX))
    if not files:
        hint = f"save the model as safetensors: files that end in {SUFFIX} are read, no others"
        raise refuse("source_missing", f"no {SUFFIX} file and no index in this directory", file=path, hint=hint)
    _check_numbering(files)
    return Layout(folder, tuple(files))


def natural(names: Iterable[str]) -> list[str]:
    """Sorted with numbers by value: shard 2 comes before shard 10."""
    return sorted(names, key=lambda name: [(int(p), p) if p.isdecimal() else (0, p) for p in re.split(r"(\d+)", name)])


def parse_index(text: str, file: str) -> tuple[dict[str, str], int | None]:
    """(tensor -> shard, total size if it says one). Raises Rejected with every bad entry."""
    repeated: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(key for key, _ in items)
        repeated.extend(key for key, count in counts.items() if count > 1)
        return dict(items)

    try:
        top = json.loads(text, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise refuse("index_mismatch", f"the index is not JSON: {type(error).__name__}", file=file) from None
    weight_map = top.get("weight_map") if isinstance(top, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise refuse("index_mismatch", "the index has no weight_map", file=file)
    faults = [Failure("tensor_duplicate", "twice in the index", tensor=name, file=file) for name in repeated]
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            faults.append(Failure("index_mismatch", "its shard is not a string", tensor=name, file=file))
        elif not _safe(shard):
            text = f"shard name {shard!r:.80} leaves the directory or is no file name"
            hint = "the shards of an index lie beside it, and it names them without a folder"
            faults.append(Failure("source_outside_roots", text, tensor=name, file=file, hint=hint))
    if faults:
        raise Rejected(*faults[:100])
    metadata = top.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, int(total) if isinstance(total, int | float) and total == total // 1 else None


def index_faults(layout: Layout, headers: Mapping[str, FileHeader]) -> list[Failure]:
    """Index against headers, both ways, and names that occur in more than one file. `headers`: by file."""
    owners: dict[str, list[str]] = {}
    for file, header in headers.items():
        for tensor in header.tensors:
            owners.setdefault(tensor.spec.name, []).append(file)
    faults = []
    for name, files in owners.items():
        if len(files) > 1:
            text = f"also in {', '.join(files)}"
            faults += [Failure("file_duplicate", text, tensor=name, file=file) for file in files]
    if layout.promised is None:
        return faults
    for name, file in layout.promised.items():
        found = owners.get(name, [])
        if file in headers and file not in found:
            text = f"the index promises it in {file}; it is in {', '.join(found) or 'no shard'}"
            faults.append(Failure("index_mismatch", text, tensor=name, file=file))
            faults += [Failure("index_mismatch", text, tensor=name, file=other) for other in found]
    for name, files in owners.items():
        if name not in layout.promised:
            faults.append(Failure("index_mismatch", "not in the index", tensor=name, file=files[0]))
    return faults


def ambiguities(layout: Layout, headers: Iterable[FileHeader], roots: Sequence[str]) -> list[Failure]:
    """Files beside the index that hold tensors of the same names: nothing here says which of the two is meant.

    By names alone, as a loader knows them: no tensor byte is read. A stray file without a readable header has none.
    """
    read = {clean_name(tensor.spec.name) for header in headers for tensor in header.tensors}
    faults = []
    for stray in layout.strays:
        try:
            file = open_file(layout.path(stray), roots, stray)
            try:
                names = read_names(file.fd, stray)
            finally:
                os.close(file.fd)
        except Rejected:
            continue
        both = sorted(name for name in names if clean_name(name) in read)
        if both:
            text = f"holds {len(both)} tensors that the shards of the index hold too; no digests say which are meant"
            faults.append(Failure("source_ambiguous", text, tensor=both[0], file=stray, hint=_way_out(layout, stray)))
    return faults


def _way_out(layout: Layout, stray: str) -> str:
    index = layout.index.name if layout.index is not None else INDEX_NAME
    return f"give the path of {index} or of {stray} instead of the folder's, or take away the one that is not meant"


def size_warnings(layout: Layout, headers: Iterable[FileHeader]) -> list[str]:
    """What an index says of the total size is often wrong in honest checkpoints: a warning."""
    total = sum(tensor.spec.nbytes for header in headers for tensor in header.tensors)
    if layout.total_size is None or layout.total_size == total:
        return []
    return [f"the index says {layout.total_size} bytes of tensors, the shards hold {total}"]


def missing_shard(layout: Layout, file: str) -> Failure:
    """`file` is named by the index and is not there."""
    carried = sum(shard == file for shard in (layout.promised or {}).values())
    return Failure("shard_missing", f"named by the index, with {carried} tensors, and no file lies there", file=file)


def _present(folder: str) -> set[str]:
    try:
        return set(os.listdir(folder))
    except OSError as error:
        raise refuse("source_missing", f"cannot be listed: {error.strerror}", file=folder) from None


def _indexed(folder: str, name: str, present: set[str], indexes: Sequence[str], roots: Sequence[str]) -> Layout:
    text, opened = read_text(os.path.join(folder, name), roots, INDEX_LIMIT, name)
    try:
        promised, total = parse_index(text, name)
    except Rejected:
        os.close(opened.fd)
        raise
    files = natural(set(promised.values()))
    strays = tuple(stray for stray in natural(present - set(files)) if stray.endswith(SUFFIX))
    warnings = [f"{stray} is not in the index and is not read" for stray in strays]
    warnings += [f"{other} is not read: {name} is the index" for other in indexes if other != name]
    return Layout(folder, tuple(files), promised, total, opened, tuple(warnings), strays)


def _check_numbering(files: Sequence[str]) -> None:
    """Without an index, `-00001-of-00003` says which files there should be."""
    sets: dict[tuple[str, str], set[int]] = {}
    for file in files:
        match = _NUMBERED.fullmatch(file)
        if match:
            sets.setdefault((match["stem"], match["count"]), set()).add(int(match["number"]))
    faults = []
    for (stem, count), numbers in sets.items():
        first = 0 if 0 in numbers else 1
        for number in sorted(set(range(first, first + min(int(count), 100_000))) - numbers)[:100]:
            name = f"{stem}-{number:0{len(count)}d}-of-{count}{SUFFIX}"
            faults.append(Failure("shard_missing", f"one of {int(count)} shards, and not there", file=name))
    if faults:
        raise Rejected(*faults)


def _safe(shard: str) -> bool:
    """A relative name that stays inside, with characters that every file system takes the same way."""
    parts = shard.split("/")
    return shard.isprintable() and "\\" not in shard and all(part not in ("", ".", "..") for part in parts)
