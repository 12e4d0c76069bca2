"""`liveweights.manifest.json`: built with digests, written, verified against the files beside it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from transports.base import Box, Read
from transports.digest import add, region_digest, to_hex
from transports.disk.hashes import folder_document, folder_hashes
from transports.disk.index import find_layout
from transports.disk.source import DiskSource
from transports.dtypes import TORCH_DTYPES, byte_shape, is_packed
from updater.core.errors import Failure, Rejected, refuse
from updater.core.policy import SourceLayout
from updater.protocol.manifest import FILE_NAME, Manifest, TensorEntry, TensorSpec
from updater.protocol.model_document import known

Layouts = Sequence[tuple[str, SourceLayout]]
_SLAB = 32 << 20  # bytes of one tensor held at a time while digesting


def build_manifest(
    path: str,
    progress: Callable[[int], None] = lambda _bytes: None,
    *,
    roots: Sequence[str] = ("/",),
    layouts: Layouts = (),
) -> Manifest:
    """Digest every tensor of a checkpoint. `progress` gets increments of bytes. An old manifest is not looked at.

    `layouts`: how tensors lie that hold several of a model's, for the manifest to say.

    Raises as `DiskSource.open`, and Aborted where files change or fail while they are read.
    """
    layout = find_layout(path, roots)
    hashes = folder_hashes(layout.folder, roots)
    with DiskSource.open_layout(layout, roots, ignore_manifest=True) as source:
        entries = tuple(
            TensorEntry(spec.name, spec.dtype, spec.shape, to_hex(_digest(source, spec, progress)))
            for spec in source.specs.values()
        )
        source.recheck()
    return Manifest(
        tensors=entries,
        config_hash=hashes.config,
        tokenizer_hash=hashes.tokenizer,
        quantization_hash=hashes.quantization,
        ties=_ties(entries) if hashes.tied else (),
        layouts=tuple(layouts),
        model=known(folder_document(layout.folder, roots)),
    )


def write_manifest(
    path: str,
    progress: Callable[[int], None] = lambda _bytes: None,
    *,
    roots: Sequence[str] = ("/",),
    layouts: Layouts = (),
) -> Manifest:
    """Build it and put it beside the weights, whole or not at all."""
    manifest = build_manifest(path, progress, roots=roots, layouts=layouts)
    folder = path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path))
    save_manifest(manifest, folder)
    return manifest


def save_manifest(manifest: Manifest, folder: str) -> str:
    """Write the file atomically and durably; returns its path."""
    path = os.path.join(folder, FILE_NAME)
    part = f"{path}.{secrets.token_hex(4)}.part"
    try:
        with open(part, "x", encoding="utf-8") as stream:
            stream.write(manifest.to_json())
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, path)
    except OSError:
        if os.path.lexists(part):
            os.unlink(part)
        raise
    return path


def verify_manifest(
    path: str, progress: Callable[[int], None] = lambda _bytes: None, *, roots: Sequence[str] = ("/",)
) -> Manifest:
    """Digest the files again and compare with the manifest beside them, which is returned.

    Raises Rejected: `manifest_required` without one, `tensor_digest` for every tensor that differs, and as
    `DiskSource.open`.
    """
    faults = []
    with DiskSource.open(path, roots) as source:
        manifest = source.manifest
        if manifest is None:
            raise refuse("manifest_required", f"no {FILE_NAME} beside it", file=path)
        for entry in manifest.tensors:
            if entry.digest:
                found = to_hex(_digest(source, entry.spec, progress))
                if found != entry.digest:
                    file = source.places[entry.name].file
                    text = f"digest {found}, the manifest says {entry.digest}"
                    faults.append(Failure("tensor_digest", text, tensor=entry.name, file=file))
        source.recheck()
    if faults:
        raise Rejected(*faults)
    return manifest


@dataclass(frozen=True, slots=True)
class Slab:
    """A run of rows of one tensor, and memory for it."""

    box: Box
    room: torch.Tensor


def _digest(source: DiskSource, spec: TensorSpec, progress: Callable[[int], None]) -> int:
    """Of one stored tensor, a slab of rows at a time."""
    total = 0
    for slab in slabs(spec):
        source.read([Read(spec.name, slab.box, slab.room)], progress=progress)
        total = add(total, region_digest(slab.room, spec.shape, spec.dtype, slab.box))
    return total


def slabs(spec: TensorSpec) -> Iterator[Slab]:
    """Boxes of at most 32 MiB, or one index of the first dimension. Packed types are read whole."""
    dtype = torch.uint8 if is_packed(spec.dtype) else TORCH_DTYPES[spec.dtype]
    if spec.numel == 0:
        return
    if spec.nbytes <= _SLAB or not spec.shape or is_packed(spec.dtype):
        yield Slab(Box.whole(spec.shape), torch.empty(byte_shape(spec.shape, spec.dtype), dtype=dtype))
        return
    step = max(1, _SLAB * spec.shape[0] // spec.nbytes)
    room = torch.empty((step, *spec.shape[1:]), dtype=dtype)
    for low in range(0, spec.shape[0], step):
        count = min(step, spec.shape[0] - low)
        start, size = (low, *(0 for _ in spec.shape[1:])), (count, *spec.shape[1:])
        yield Slab(Box(start, size), room[:count])


def _ties(entries: Sequence[TensorEntry]) -> tuple[tuple[str, str], ...]:
    """(head, embedding) where both are stored and equal in everything."""
    heads = [entry for entry in entries if entry.name.endswith("lm_head.weight")]
    tables = [entry for entry in entries if entry.name.endswith("embed_tokens.weight")]
    return tuple(
        (head.name, table.name)
        for head in heads
        for table in tables
        if (head.dtype, head.shape, head.digest) == (table.dtype, table.shape, table.digest)
    )
