"""A safetensors file or a sharded directory as a source."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from transports.base import Read, ReadReport, Source
from transports.disk.hashes import folder_document, folder_hashes
from transports.disk.header import FileHeader, read_header
from transports.disk.index import Layout, ambiguities, find_layout, index_faults, missing_shard, size_warnings
from transports.disk.io_plan import Place
from transports.disk.manifest_check import load_manifest, manifest_faults
from transports.disk.paths import OpenFile, open_file
from transports.disk.reader import ReaderOptions, bytes_to_ask, read_all
from updater.core.errors import Aborted, Failure, Rejected
from updater.protocol.manifest import Manifest, TensorSpec
from updater.protocol.model_document import ModelDocument
from updater.protocol.names import clean_names

_FAULT_LIMIT = 100


class DiskSource:
    """A `transports.base.Source` over files. Reading headers is all that `open` does.

    Files stay open until `close`, so a version that is deleted meanwhile can still be read; `recheck` says so.
    """

    kind = "disk"

    def __init__(
        self,
        headers: Mapping[str, FileHeader],
        places: Mapping[str, Place],
        manifest: Manifest | None,
        warnings: tuple[str, ...],
        watched: Sequence[OpenFile],
        options: ReaderOptions,
        ambiguous: tuple[Failure, ...] = (),
    ) -> None:
        self.headers = headers
        self.ambiguous = ambiguous
        self._places = places
        self._specs = MappingProxyType({name: place.spec for name, place in places.items()})
        self._manifest = manifest
        self._warnings = warnings
        self._watched = list(watched)
        self._options = options
        self._beside: tuple[str, tuple[str, ...]] | None = None  # folder of the weights, roots
        self._closed = False

    @classmethod
    def open(
        cls,
        path: str,
        roots: Sequence[str],
        manifest_text: str = "",
        options: ReaderOptions | None = None,
        *,
        allow_ambiguous: bool = False,
    ) -> DiskSource:
        """`path`: a safetensors file or a directory; links resolved, it must lie under one of `roots`.

        `manifest_text`: the manifest as JSON, instead of the one beside the source. `allow_ambiguous`: another file of
        the folder may hold the same names, which `ambiguous` then lists; the caller knows what the content has to be.
        Raises Rejected with every fault that was found, at most a hundred.
        """
        layout = find_layout(path, roots)
        return cls.open_layout(layout, roots, manifest_text, options, allow_ambiguous=allow_ambiguous)

    @classmethod
    def open_layout(
        cls,
        layout: Layout,
        roots: Sequence[str],
        manifest_text: str = "",
        options: ReaderOptions | None = None,
        *,
        ignore_manifest: bool = False,
        allow_ambiguous: bool = False,
    ) -> DiskSource:
        """The second half of `open`. Takes over the layout's open index."""
        watched = [layout.index] if layout.index is not None else []
        try:
            headers, files = _open_shards(layout, roots, watched)
            places = _places(headers, files)
            manifest = None if ignore_manifest else load_manifest(layout.folder, roots, manifest_text, watched)
            if manifest is not None:
                specs = {name: place.spec for name, place in places.items()}
                _raise_all(manifest_faults(manifest, specs, folder_hashes(layout.folder, roots)))
            decided = manifest is not None and manifest.has_digests
            ambiguous = () if decided else tuple(ambiguities(layout, headers.values(), roots))
            if not allow_ambiguous:
                _raise_all(ambiguous)
        except BaseException:
            for file in watched:
                os.close(file.fd)
            raise
        warnings = (*layout.warnings, *size_warnings(layout, headers.values()))
        source = cls(headers, places, manifest, warnings, watched, options or ReaderOptions(), ambiguous)
        source._beside = (layout.folder, tuple(roots))
        return source

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self._specs

    @property
    def manifest(self) -> Manifest | None:
        return self._manifest

    def document(self) -> ModelDocument:
        """What the files beside the weights say of the model, else the manifest. Raises Rejected `config_mismatch`."""
        there = folder_document(*self._beside) if self._beside is not None else ModelDocument()
        said = self._manifest.model if self._manifest is not None else None
        if said is None:
            return there
        known = there.config is not None
        return ModelDocument(
            config=there.config if known else said.config,
            quantization=there.quantization if known else said.quantization,
            tokenizer=there.tokenizer or said.tokenizer,
            generation=said.generation if there.generation is None else there.generation,
            chat_template=there.chat_template or said.chat_template,
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        return self._warnings

    @property
    def places(self) -> Mapping[str, Place]:
        """Clean name -> where its bytes lie. The specs in it carry the clean names."""
        return self._places

    def read(
        self,
        reads: Sequence[Read],
        *,
        progress: Callable[[int], None] = lambda _bytes: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> ReadReport:
        """Fill every target. `progress` gets increments of bytes read, one call at a time, from any thread.

        Raises Aborted: `tensor_missing`, `tensor_shape`, `tensor_dtype` before a byte is read; `file_truncated`,
        `read_failed` with the file. Raises Cancelled.
        """
        return read_all(self._pairs(reads), self._options, progress, should_stop)

    def bytes_to_ask(self, reads: Sequence[Read]) -> int:
        """What `read` would ask for by read calls. Targets may be on the meta device."""
        return bytes_to_ask(self._pairs(reads), self._options)

    def recheck(self) -> None:
        """Raises Aborted `source_changed` or `source_missing`, for every file that is not what was opened."""
        faults = [fault for file in self._watched if (fault := file.recheck()) is not None]
        if faults:
            raise Aborted(*faults[:_FAULT_LIMIT])

    def close(self) -> None:
        """Twice is once. A read afterwards is refused: the numbers of closed files may name others by then."""
        self._closed = True
        while self._watched:
            os.close(self._watched.pop().fd)

    def __enter__(self) -> DiskSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pairs(self, reads: Sequence[Read]) -> list[tuple[Place, Read]]:
        if self._closed:
            raise Aborted(Failure("read_failed", "the source is closed"))
        missing = sorted({read.name for read in reads} - set(self._places))
        if missing:
            raise Aborted(*(Failure("tensor_missing", "not in this source", tensor=name) for name in missing[:100]))
        return [(self._places[read.name], read) for read in reads]


def source_document(source: Source) -> ModelDocument:
    """What any source says of the model: files beside it, or its manifest."""
    if isinstance(source, DiskSource):
        return source.document()
    return (source.manifest.model if source.manifest is not None else None) or ModelDocument()


def _open_shards(
    layout: Layout, roots: Sequence[str], watched: list[OpenFile]
) -> tuple[dict[str, FileHeader], dict[str, OpenFile]]:
    """Every header, or all that is wrong with any of them. Opened files are added to `watched`."""
    headers: dict[str, FileHeader] = {}
    files: dict[str, OpenFile] = {}
    faults: list[Failure] = []
    for name in layout.files:
        try:
            file = open_file(layout.path(name), roots, name)
            watched.append(file)
            headers[name], files[name] = read_header(file.fd, name), file
        except Rejected as error:
            faults += _shard_faults(layout, name, error)
    _raise_all(faults + index_faults(layout, headers))
    return headers, files


def _shard_faults(layout: Layout, name: str, error: Rejected) -> Sequence[Failure]:
    """A file that an index names and that is not there has a name of its own, unless everything is gone."""
    if error.code == "source_missing" and layout.promised is not None and os.path.isdir(layout.folder):
        return [missing_shard(layout, name)]
    return error.failures


def _places(headers: Mapping[str, FileHeader], files: Mapping[str, OpenFile]) -> dict[str, Place]:
    """Clean name -> place, sorted by name."""
    clean = clean_names(tensor.spec.name for header in headers.values() for tensor in header.tensors)
    places = {}
    for name, header in headers.items():
        for tensor in header.tensors:
            spec = TensorSpec(clean[tensor.spec.name], tensor.spec.dtype, tensor.spec.shape)
            places[spec.name] = Place(files[name].fd, name, spec, tensor.start)
    return dict(sorted(places.items()))


def _raise_all(faults: Sequence[Failure]) -> None:
    if faults:
        raise Rejected(*faults[:_FAULT_LIMIT])
