"""What the bytes of a checkpoint hold, read once and judged as ranks judge what they stage. Nothing is refused here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from transports.base import Read
from transports.digest import add, region_digest, to_hex
from transports.disk.manifests import slabs
from transports.disk.source import DiskSource
from transports.scans import has_normal, judged, nonfinite
from updater.protocol.manifest import TensorSpec


@dataclass(frozen=True, slots=True)
class Content:
    """Of one tensor. `promised`: the digest that the manifest has for it, or empty. `digest`: of the bytes.

    `nonfinite`: a NaN or an infinity is in it. `blank`: it should hold a normal number, and holds none.
    """

    name: str
    file: str
    promised: str
    digest: str
    nonfinite: bool
    blank: bool


def contents(source: DiskSource, progress: Callable[[int], None] = lambda _bytes: None) -> Iterator[Content]:
    """Every tensor that the manifest does not list as ignored. Digests are computed of those with a promise, and of
    those that are blank. Raises Aborted where files change or fail while they are read.
    """
    manifest = source.manifest
    ignored = manifest.ignored if manifest is not None else ()
    promised = {entry.name: entry.digest for entry in manifest.tensors} if manifest is not None else {}
    for name, spec in source.specs.items():
        if not any(fnmatchcase(name, pattern) for pattern in ignored):
            yield _content(source, spec, promised.get(name, ""), progress)
    source.recheck()


def _content(source: DiskSource, spec: TensorSpec, promised: str, progress: Callable[[int], None]) -> Content:
    odd, blank, total = False, judged(spec), 0
    for slab in slabs(spec):
        source.read([Read(spec.name, slab.box, slab.room)], progress=progress)
        odd = odd or nonfinite(slab.room)
        blank = blank and not has_normal(slab.room, spec.dtype)
        if promised or blank:
            total = add(total, region_digest(slab.room, spec.shape, spec.dtype, slab.box))
    digest = to_hex(total) if promised or blank else ""
    return Content(spec.name, source.places[spec.name].file, promised, digest, odd, blank and spec.numel > 0)
