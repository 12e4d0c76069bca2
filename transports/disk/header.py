"""The header of a safetensors file, checked in full before any byte behind it is touched.

Layout: eight bytes of little-endian header length N, N bytes of JSON, then the payload that the tensors' `data_offsets`
refer to. Nothing is allocated by a size that the file claims and does not have.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from updater.core.errors import Failure, Rejected, refuse
from updater.protocol.manifest import DTYPE_BITS, TensorSpec

PREFIX = 8
#: Largest header we read: room for well over a million tensors.
HEADER_LIMIT = 160 << 20
#: Faults reported of one file; a header can hold a million.
FAULT_LIMIT = 100
_SIZE_LIMIT = 1 << 63
_FIELDS = ("dtype", "shape", "data_offsets")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`start` to `stop`: its bytes, counted from the beginning of the file."""

    spec: TensorSpec
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class FileHeader:
    """`tensors` in the order of the header, names as stored. `size`: bytes of the whole file."""

    file: str
    size: int
    tensors: tuple[StoredTensor, ...]


_SAVE = "save the model as safetensors"
#: How files begin that are taken for checkpoints: (first bytes, what it is, the way out).
OTHERS: tuple[tuple[bytes, str, str], ...] = (
    (b"{", "JSON text", "name the folder, the .safetensors file or its .safetensors.index.json"),
    (b"PK\x03\x04", "a zip archive, as torch.save writes it", _SAVE),
    (b"\x80", "a pickle", _SAVE),
    (b"GGUF", "a GGUF file", _SAVE),
    (b"version ", "a pointer of Git LFS, without the file itself", "fetch it: git lfs pull"),
)


def read_header(fd: int, file: str) -> FileHeader:
    """Read and check the header of an open file. Raises Rejected with every fault of this file."""
    raw, size = _raw_header(fd, file)
    return check_header(raw, size, file)


def read_names(fd: int, file: str) -> frozenset[str]:
    """The names in the header of an open file, whatever else its entries say. Raises Rejected without a header."""
    return frozenset(_entries(_raw_header(fd, file)[0], file)) - {"__metadata__"}


def _raw_header(fd: int, file: str) -> tuple[bytes, int]:
    """(JSON of the header, bytes of the whole file)."""
    size = os.fstat(fd).st_size
    if size < PREFIX:
        raise refuse("file_truncated", f"{size} bytes, and a safetensors file has at least {PREFIX}", file=file)
    prefix = _pread(fd, PREFIX, 0, file)
    length = int.from_bytes(prefix, "little")
    if length > HEADER_LIMIT:
        for mark, what, hint in OTHERS:
            if prefix.startswith(mark):
                raise refuse("file_header", f"is {what}, and no safetensors file", file=file, hint=hint)
        raise refuse("file_header", f"claims a header of {length} bytes; the limit is {HEADER_LIMIT}", file=file)
    if PREFIX + length > size:
        raise refuse("file_truncated", f"header ends at byte {PREFIX + length} of a file of {size} bytes", file=file)
    return _pread(fd, length, PREFIX, file), size


def check_header(raw: bytes, size: int, file: str) -> FileHeader:
    """`raw`: the header's JSON; `size`: bytes of the whole file. Pure. Raises Rejected with every fault."""
    if PREFIX + len(raw) > size:
        raise refuse("file_truncated", f"a header of {len(raw)} bytes in a file of {size}", file=file)
    entries = _entries(raw, file)
    faults = _metadata_faults(entries.pop("__metadata__", {}), file)
    base = PREFIX + len(raw)
    tensors = []
    for name, entry in entries.items():
        found = _tensor(name, entry, base, file)
        if isinstance(found, Failure):
            faults.append(found)
        else:
            tensors.append(found)
    faults += list(_range_faults(tensors, base, size, file, complete=not faults))[:FAULT_LIMIT]
    if faults:
        raise Rejected(*faults[:FAULT_LIMIT])
    return FileHeader(file, size, tuple(tensors))


def _pread(fd: int, count: int, offset: int, file: str) -> bytes:
    parts = []
    while count:
        try:
            part = os.pread(fd, count, offset)
        except OSError as error:
            raise refuse("read_failed", f"{error.strerror} at byte {offset}", file=file) from None
        if not part:
            raise refuse("file_truncated", f"ends at byte {offset}, {count} bytes early", file=file)
        parts.append(part)
        count, offset = count - len(part), offset + len(part)
    return b"".join(parts)


def _entries(raw: bytes, file: str) -> dict[str, Any]:
    """The top object. Repeated keys are refused at any depth; so are NaN, broken text and endless nesting."""
    if raw[:1] != b"{":
        raise refuse("file_header", "the header is not a JSON object", file=file)
    repeated: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) != len(items):
            counts = Counter(key for key, _ in items)
            repeated.extend(key for key, count in counts.items() if count > 1)
        return made

    try:
        top = json.loads(raw.decode(), object_pairs_hook=pairs, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise refuse("file_header", f"the header is not JSON: {type(error).__name__}", file=file) from None
    if repeated:
        names = sorted(set(repeated))[:FAULT_LIMIT]
        raise Rejected(
            *(Failure("tensor_duplicate", "twice in one header", tensor=_shown(name), file=file) for name in names)
        )
    entries: dict[str, Any] = top
    return entries


def _no_constant(text: str) -> float:
    raise ValueError(text)


def _metadata_faults(value: Any, file: str) -> list[Failure]:
    if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
        return []
    return [Failure("file_header", "__metadata__ is not an object of strings", tensor="__metadata__", file=file)]


def _tensor(name: str, entry: Any, base: int, file: str) -> StoredTensor | Failure:
    """One checked entry, or the first thing that is wrong with it."""
    shown = _shown(name)
    if not name or shown != name or not name.isprintable():
        return Failure("file_header", "tensor name is empty or holds unprintable characters", tensor=shown, file=file)
    if not isinstance(entry, dict) or sorted(entry) != sorted(_FIELDS):
        return Failure(
            "file_header", f"entry must have exactly the fields {', '.join(_FIELDS)}", tensor=name, file=file
        )
    dtype, shape, offsets = (entry[field] for field in _FIELDS)
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        return Failure("file_dtype", f"unknown dtype {dtype!r:.40}", tensor=name, file=file)
    if not _sizes(shape) or prod(size for size in shape if size) >= _SIZE_LIMIT:
        return Failure("tensor_shape", f"shape {shape!r:.80} is not a list of sizes", tensor=name, file=file)
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return Failure("file_range", f"data_offsets {offsets!r:.80} is not a range", tensor=name, file=file)
    spec = TensorSpec(name, dtype, tuple(shape))
    if spec.numel * DTYPE_BITS[dtype] % 8:
        return Failure("tensor_shape", f"{spec.numel} elements of {dtype} do not fill bytes", tensor=name, file=file)
    given = offsets[1] - offsets[0]
    if given != spec.nbytes:
        text = f"{dtype} {list(shape)} takes {spec.nbytes} bytes, the range has {given}"
        return Failure("file_range", text, tensor=name, file=file)
    return StoredTensor(spec, base + offsets[0], base + offsets[1])


def _sizes(value: Any) -> bool:
    """A list of whole numbers that fit a signed 64-bit integer and are not negative; `True` is not a number."""
    return (
        isinstance(value, list)
        and len(value) <= 64
        and all(type(size) is int and 0 <= size < _SIZE_LIMIT for size in value)
    )


def _shown(name: str) -> str:
    """The name as text that any output can carry."""
    return name.encode("utf-8", "backslashreplace").decode()


def _range_faults(tensors: list[StoredTensor], base: int, size: int, file: str, *, complete: bool) -> Iterator[Failure]:
    """The payload must be covered exactly once. Holes are not looked for where entries are missing already."""
    last = max((tensor.stop for tensor in tensors), default=base)
    if last > size:
        ends = next(tensor for tensor in tensors if tensor.stop == last)
        text = f"the last tensor ends at byte {last}, the file has {size} bytes"
        yield Failure("file_truncated", text, tensor=ends.spec.name, file=file)
    end, owner = base, ""
    for tensor in sorted(tensors, key=lambda one: (one.start, one.stop)):
        if tensor.start < end:
            text = f"{owner} and {tensor.spec.name} share bytes {tensor.start} to {min(end, tensor.stop)}"
            for name in (owner, tensor.spec.name):
                yield Failure("file_range", text, tensor=name, file=file)
        elif tensor.start > end and complete:
            text = f"{tensor.start - end} bytes from byte {end} belong to no tensor"
            yield Failure("file_range", text, tensor=tensor.spec.name, file=file)
        if tensor.stop > end:
            end, owner = tensor.stop, tensor.spec.name
    if end < size and complete:
        yield Failure("file_range", f"{size - end} bytes from byte {end} belong to no tensor", file=file)
