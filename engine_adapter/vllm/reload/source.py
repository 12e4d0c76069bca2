"""What a front can say of a checkpoint by itself, where no rank of ours could: that it is like the one that vLLM
started on, that vLLM would read the same files, and what its bytes are.

Stricter than a rank: vLLM's own loaders leave out what is missing and take names as they are stored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from engine_adapter.placement.regions import pieces
from engine_adapter.rank.plan import CancelToken
from transports.base import Box, Cancelled, Read
from transports.digest import add, region_digest, to_hex
from transports.disk.hashes import folder_hashes
from transports.disk.index import INDEX_NAME, SUFFIX, Layout, find_layout
from transports.disk.source import DiskSource
from transports.dtypes import TORCH_DTYPES, byte_shape, is_packed
from transports.scans import has_normal, judged, nonfinite
from updater.core.errors import Aborted, Failure, Rejected
from updater.protocol.manifest import TensorEntry, TensorSpec, content_digest

_PIECE_BYTES = 32 << 20  # of one tensor, held at a time
_LIMIT = 100  # failures in one answer
#: Files that vLLM reads instead of all others, unless it was told a load format.
_CONSOLIDATED = "consolidated"
_EXPERT = re.compile(r"\.experts\.")


@dataclass(frozen=True, slots=True)
class ReloadStart:
    """The checkpoint that vLLM started on. `stored`: by name as stored. `tied`: its config says that head and embedding
    are one.
    """

    stored: Mapping[str, TensorSpec]
    tied: bool


@dataclass(frozen=True, slots=True)
class CheckpointContent:
    """`observed`: content digest, as all ranks of a staged replica together would observe it. `digests`: by tensor.

    `blank`: tensors without a normal number, of those that should have one.
    """

    observed: str
    digests: Mapping[str, str]
    blank: frozenset[str] = frozenset()


def open_start(folder: str, roots: tuple[str, ...]) -> tuple[DiskSource, ReloadStart]:
    """Raises Rejected where the checkpoint cannot be read, or vLLM would read another one than we do."""
    source = open_folder(folder, roots, "")
    return source, ReloadStart(stored_specs(source), folder_hashes(folder, roots).tied)


def not_reloaded(start: ReloadStart, device: str) -> tuple[Failure, ...]:
    """Of what vLLM's own reload says that it has reloaded, and has not: seen with 0.32 on CPU, where kernels that were
    packed from the old weights stay in use.
    """
    if device != "cpu":
        return ()
    experts = [name for name in start.stored if _EXPERT.search(name)]
    why = "vLLM's own reload on CPU keeps the kernels that it packed from the old {}, and says nothing: use staged mode"
    failures = [Failure("adapter_unsupported", why.format("experts"), tensor=name) for name in experts[:1]]
    if start.tied:
        failures.append(Failure("adapter_unsupported", why.format("embedding for its tied head")))
    return tuple(failures)


def open_folder(path: str, roots: tuple[str, ...], manifest: str) -> DiskSource:
    """Opened as a rank opens it, and a folder of which vLLM reads exactly these files. Raises Rejected."""
    layout = find_layout(path, roots)
    failures = _read_differently(path, layout)
    if failures:
        if layout.index is not None:
            os.close(layout.index.fd)
        raise Rejected(*failures[:_LIMIT])
    return DiskSource.open_layout(layout, roots, manifest)


def _read_differently(path: str, layout: Layout) -> list[Failure]:
    """vLLM takes every safetensors file of a folder, or those of one index; a file alone it takes for a hub's name."""
    if not os.path.isdir(path):
        return [Failure("mode_unsupported", "vLLM's own reload reads folders, not single files", file=path)]
    there = {name for name in os.listdir(layout.folder) if name.endswith(SUFFIX)}
    indexed = os.path.isfile(layout.path(INDEX_NAME))
    strays = set(layout.files) ^ (there & set(layout.files) if indexed else there)
    strays |= {name for name in there if name.startswith(_CONSOLIDATED)}
    why = "vLLM's own reload and this front would not read the same files"
    return [Failure("index_mismatch", why, file=name) for name in sorted(strays)]


def stored_specs(source: DiskSource) -> dict[str, TensorSpec]:
    """By the names in the files, of which vLLM takes no trainer's wrapper off."""
    return {tensor.spec.name: tensor.spec for header in source.headers.values() for tensor in header.tensors}


def differences(found: Mapping[str, TensorSpec], start: ReloadStart) -> tuple[Failure, ...]:
    """Everything in which a checkpoint is not like the one that vLLM started on."""
    failures = []
    for name, spec in start.stored.items():
        other = found.get(name)
        if other is None:
            failures.append(Failure("tensor_missing", "the source lacks it", tensor=name))
        elif other.shape != spec.shape:
            why = f"has shape {list(other.shape)}, the start checkpoint {list(spec.shape)}"
            failures.append(Failure("tensor_shape", why, tensor=name))
        elif other.dtype != spec.dtype:
            failures.append(Failure("tensor_dtype", f"is {other.dtype}, was {spec.dtype} at the start", tensor=name))
    strange = (name for name in found if name not in start.stored)
    failures += [Failure("tensor_unexpected", "the start checkpoint lacks it", tensor=name) for name in strange]
    return tuple(failures[:_LIMIT])


def read_content(
    source: DiskSource, tied: bool, allow_nonfinite: bool, stop: CancelToken, progress: Callable[[int], None]
) -> CheckpointContent:
    """Digest every tensor. `progress` gets increments of bytes.

    Raises Aborted: what reading raises, `tensor_nonfinite`, `tensor_digest` for what differs from the manifest or from
    what it is tied to, and `source_changed`.
    """
    promised = {} if source.manifest is None else {entry.name: entry.digest for entry in source.manifest.tensors}
    digests: dict[str, str] = {}
    failures: list[Failure] = []
    blank = set()
    for name, spec in source.specs.items():
        digest, finite, normal = _digest(source, spec, stop, progress)
        if not normal:
            blank.add(name)
        digests[name] = to_hex(digest)
        if not (finite or allow_nonfinite):
            why = "NaN or an infinity is in it; the policy does not allow it"
            failures.append(Failure("tensor_nonfinite", why, tensor=name))
        if promised.get(name) and promised[name] != digests[name]:
            why = f"holds {digests[name]}, the manifest promises {promised[name]}"
            failures.append(Failure("tensor_digest", why, tensor=name))
    redundant = tuple(_redundant(source.specs)) if tied else ()
    failures += [
        Failure("tensor_digest", f"tied to {canonical}, but its bytes differ", tensor=alias)
        for alias, canonical in redundant
        if digests[alias] != digests[canonical]
    ]
    source.recheck()
    if failures:
        raise Aborted(*failures[:_LIMIT])
    return CheckpointContent(_observed(source, digests, {alias for alias, _ in redundant}), digests, frozenset(blank))


def _digest(
    source: DiskSource, spec: TensorSpec, stop: CancelToken, progress: Callable[[int], None]
) -> tuple[int, bool, bool]:
    """(digest, all is finite, has a normal number or needs none) of one tensor, read a piece at a time."""
    total, finite, normal = 0, True, not judged(spec)
    for box, room in _rooms(spec):
        stop.check()
        try:
            source.read([Read(spec.name, box, room)], progress=progress, should_stop=stop)
        except Cancelled:
            raise stop.error() from None
        total = add(total, region_digest(room, spec.shape, spec.dtype, box))
        finite = finite and not nonfinite(room)
        normal = normal or has_normal(room, spec.dtype)
    return total, finite, normal


def _rooms(spec: TensorSpec) -> Iterator[tuple[Box, torch.Tensor]]:
    """A piece of the tensor, and the memory to read it into. A packed tensor is one piece: none may cut a byte."""
    if is_packed(spec.dtype):
        yield Box.whole(spec.shape), torch.empty(byte_shape(spec.shape, spec.dtype), dtype=torch.uint8)
        return
    dtype = TORCH_DTYPES[spec.dtype]
    for box in pieces(Box.whole(spec.shape), _PIECE_BYTES // dtype.itemsize):
        yield box, torch.empty(box.size, dtype=dtype)


def _redundant(specs: Mapping[str, TensorSpec]) -> Iterator[tuple[str, str]]:
    """(head, embedding) that are both stored though the model has one tensor for them."""
    for name in specs:
        table = name.replace("lm_head.weight", "model.embed_tokens.weight")
        if name.endswith("lm_head.weight") and table in specs:
            yield name, table


def _observed(source: DiskSource, digests: Mapping[str, str], left_out: set[str]) -> str:
    ignored = () if source.manifest is None else source.manifest.ignored
    return content_digest(
        TensorEntry(name, spec.dtype, spec.shape, digests[name])
        for name, spec in source.specs.items()
        if name not in left_out and not any(fnmatchcase(name, pattern) for pattern in ignored)
    )
