"""What lies in a checkpoint: files, tensors, bytes, dtypes and every fault with its place. Nothing is refused here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from transports.disk.hashes import folder_hashes
from transports.disk.header import FileHeader, read_header
from transports.disk.index import Layout, ambiguities, find_layout, index_faults, size_warnings
from transports.disk.manifest_check import load_manifest, manifest_faults
from transports.disk.paths import open_file
from transports.disk.source import DiskSource
from updater.core.errors import Failure, LiveweightsError, Rejected
from updater.protocol.manifest import Manifest, TensorSpec
from updater.protocol.names import clean_name, clean_names


@dataclass(frozen=True, slots=True)
class FileReport:
    """`tensors` and `nbytes` are 0 where the header could not be read."""

    file: str
    size: int
    tensors: int
    nbytes: int
    readable: bool


@dataclass(frozen=True, slots=True)
class DtypeReport:
    dtype: str
    tensors: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank would read: regions' bytes, and what its read calls would ask for."""

    rank: int
    size: int
    tensors: int
    nbytes: int
    asked: int


@dataclass(frozen=True, slots=True)
class Report:
    """`manifest`: none, structure_only or digests. `faults`: everything that a push would be refused for."""

    path: str
    files: tuple[FileReport, ...]
    tensors: int
    nbytes: int
    dtypes: tuple[DtypeReport, ...]
    manifest: str
    manifest_digest: str
    warnings: tuple[str, ...]
    faults: tuple[Failure, ...]
    ranks: tuple[RankReport, ...] = ()

    @property
    def sound(self) -> bool:
        return not self.faults


#: (opened source, TP size) -> one report per rank. Supplied by a caller that knows engines; may raise LiveweightsError.
RankReader = Callable[[DiskSource, int], Sequence[RankReport]]


def inspect(
    path: str, tp: int | None = None, ranks: RankReader | None = None, *, roots: Sequence[str] = ("/",)
) -> Report:
    """Look at everything that `DiskSource.open` looks at, and go on after a fault.

    `ranks` is asked only where the checkpoint is sound and `tp` is given.
    """
    try:
        layout = find_layout(path, roots)
    except LiveweightsError as error:
        return Report(path, (), 0, 0, (), "none", "", (), error.failures)
    try:
        report = _report(path, layout, roots)
    finally:
        if layout.index is not None:
            os.close(layout.index.fd)
    if tp is None or ranks is None or report.faults:
        return report
    return _with_ranks(report, tp, ranks, roots)


def _report(path: str, layout: Layout, roots: Sequence[str]) -> Report:
    headers, files, faults = _headers(layout, roots)
    faults += index_faults(layout, headers)
    specs = _specs(headers, faults)
    manifest = _manifest(layout, roots, specs, faults)
    if manifest is None or not manifest.has_digests:
        faults += ambiguities(layout, headers.values(), roots)
    proof = "none" if manifest is None else "digests" if manifest.has_digests else "structure_only"
    return Report(
        path=path,
        files=files,
        tensors=sum(file.tensors for file in files),
        nbytes=sum(file.nbytes for file in files),
        dtypes=_dtypes(headers),
        manifest=proof,
        manifest_digest=manifest.digest if manifest is not None else "",
        warnings=(*layout.warnings, *size_warnings(layout, headers.values()), *_renamed(headers)),
        faults=tuple(faults),
    )


def _headers(
    layout: Layout, roots: Sequence[str]
) -> tuple[dict[str, FileHeader], tuple[FileReport, ...], list[Failure]]:
    headers: dict[str, FileHeader] = {}
    files: list[FileReport] = []
    faults: list[Failure] = []
    for name in layout.files:
        size = 0
        try:
            file = open_file(layout.path(name), roots, name)
            size = file.fingerprint.size
            try:
                header = headers[name] = read_header(file.fd, name)
            finally:
                os.close(file.fd)
        except Rejected as error:
            faults += error.failures
            files.append(FileReport(name, size, 0, 0, readable=False))
            continue
        nbytes = sum(tensor.spec.nbytes for tensor in header.tensors)
        files.append(FileReport(name, size, len(header.tensors), nbytes, readable=True))
    return headers, tuple(files), faults


def _specs(headers: Mapping[str, FileHeader], faults: list[Failure]) -> dict[str, TensorSpec]:
    raw = {tensor.spec.name: tensor.spec for header in headers.values() for tensor in header.tensors}
    try:
        clean_names(raw)
    except Rejected as error:
        faults += error.failures
    cleaned = {clean_name(name): spec for name, spec in raw.items()}
    return {name: TensorSpec(name, spec.dtype, spec.shape) for name, spec in cleaned.items()}


def _manifest(
    layout: Layout, roots: Sequence[str], specs: Mapping[str, TensorSpec], faults: list[Failure]
) -> Manifest | None:
    try:
        manifest = load_manifest(layout.folder, roots, "")
        beside = folder_hashes(layout.folder, roots)
    except Rejected as error:
        faults += error.failures
        return None
    if manifest is not None:
        faults += manifest_faults(manifest, specs, beside)
    return manifest


def _dtypes(headers: Mapping[str, FileHeader]) -> tuple[DtypeReport, ...]:
    counts: dict[str, tuple[int, int]] = {}
    for header in headers.values():
        for tensor in header.tensors:
            number, nbytes = counts.get(tensor.spec.dtype, (0, 0))
            counts[tensor.spec.dtype] = (number + 1, nbytes + tensor.spec.nbytes)
    return tuple(DtypeReport(dtype, *counts[dtype]) for dtype in sorted(counts))


def _renamed(headers: Mapping[str, FileHeader]) -> list[str]:
    names = [tensor.spec.name for header in headers.values() for tensor in header.tensors]
    renamed = sum(clean_name(name) != name for name in names)
    return [f"{renamed} of {len(names)} names carry trainer wrappers, which are taken off"] if renamed else []


def _with_ranks(report: Report, tp: int, ranks: RankReader, roots: Sequence[str]) -> Report:
    try:
        with DiskSource.open(report.path, roots) as source:
            return replace(report, ranks=tuple(ranks(source, tp)))
    except LiveweightsError as error:
        return replace(report, faults=error.failures)
