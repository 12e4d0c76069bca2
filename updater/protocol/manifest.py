"""The manifest: the complete promise of a version, and the content digest that names its bytes.

`liveweights.manifest.json` lies beside a checkpoint, or travels in the request.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from updater.core.policy import SourceLayout
from updater.protocol import wire
from updater.protocol.model_config import ConfigRefused
from updater.protocol.model_document import ModelDocument

FILE_NAME = "liveweights.manifest.json"
#: How the name of a sharded checkpoint's index ends.
INDEX_SUFFIX = ".safetensors.index.json"
FORMAT = 1

#: safetensors dtype name -> bits of one element. The whole list, also of types that no engine here loads.
DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A checkpoint tensor: safetensors dtype name and shape in elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Whole bytes; packed types fill their last byte."""
        return -(-self.numel * DTYPE_BITS[self.dtype] // 8)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a manifest. `digest`: 16 lower-case hex digits (docs/digest.md), or empty where not computed."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str = ""

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class Manifest:
    """`tensors` sorted by name. Hashes are SHA-256 hex of the canonical file, or empty where there is none.

    `ties`: alias name -> canonical name. `ignored`: glob patterns of names that no engine is expected to load.
    `layouts`: (glob pattern of names, `updater.core.policy.SourceLayout`): how tensors lie that hold several of a
    model's; the first pattern counts. `model`: what is compared with an engine's; None in a manifest of before there
    was one, or of a source that knows none.
    """

    tensors: tuple[TensorEntry, ...]
    format: int = FORMAT
    config_hash: str = ""
    tokenizer_hash: str = ""
    quantization_hash: str = ""
    base_version: str = ""
    source_revision: str = ""
    ties: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    layouts: tuple[tuple[str, SourceLayout], ...] = ()
    model: ModelDocument | None = None

    def to_json(self) -> str:
        """Canonical: keys sorted, no spaces; what came after 0.1.0 only where it says something."""
        plain = wire.plain(self)
        if not self.layouts:
            del plain["layouts"]
        if self.model is None:
            del plain["model"]
        return json.dumps(plain, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Raises `wire.WireError`, also for a wrong format, unsorted or repeated names and unknown dtypes."""
        manifest = wire.decode(cls, text)
        manifest.check()
        return manifest

    def check(self) -> None:
        if self.format != FORMAT:
            raise wire.WireError("Manifest", "format", f"{self.format} is not {FORMAT}")
        try:
            if self.model is not None:
                self.model.check()
        except ConfigRefused as error:
            raise wire.WireError("Manifest", "model", str(error)) from None
        names = [entry.name for entry in self.tensors]
        if names != sorted(set(names)):
            raise wire.WireError("Manifest", "tensors", "names must be sorted and unique")
        for entry in self.tensors:
            if entry.dtype not in DTYPE_BITS:
                raise wire.WireError("Manifest", f"tensors.{entry.name}.dtype", f"unknown dtype {entry.dtype!r}")
            if any(size < 0 for size in entry.shape):
                raise wire.WireError("Manifest", f"tensors.{entry.name}.shape", "negative size")
            if entry.digest and (len(entry.digest) != 16 or set(entry.digest) - set("0123456789abcdef")):
                raise wire.WireError("Manifest", f"tensors.{entry.name}.digest", "not 16 lower-case hex digits")

    @property
    def digest(self) -> str:
        """SHA-256 hex of the canonical JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def has_digests(self) -> bool:
        return bool(self.tensors) and all(entry.digest for entry in self.tensors)

    def specs(self) -> dict[str, TensorSpec]:
        return {entry.name: entry.spec for entry in self.tensors}


def real_path(path: str) -> str:
    """Of a checkpoint, links followed. An index keeps its own name in its real folder: its shards lie beside the name,
    not where a link of it ends, as in a hub's cache.
    """
    if path.endswith(INDEX_SUFFIX):
        folder, name = os.path.split(path)
        return os.path.join(os.path.realpath(folder), name)
    return os.path.realpath(path)


def content_digest(entries: Iterable[TensorEntry]) -> str:
    """SHA-256 hex over the sorted lines `name dtype shape digest`: names the bytes of a version, however it came."""
    lines = sorted(f"{e.name} {e.dtype} {list(e.shape)} {e.digest}\n" for e in entries)
    return hashlib.sha256("".join(lines).encode()).hexdigest()
