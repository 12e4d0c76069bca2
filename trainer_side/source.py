"""Weights as a trainer holds them, checked before a byte is written, and the folder that they become.

A state dict becomes a sharded safetensors directory with its index and `liveweights.manifest.json`. The folder is
written under a temporary name and renamed once all of it is durable, so nobody ever sees half of one.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from transports.digest import tensor_digest, to_hex
from transports.dtypes import DTYPE_NAMES, is_packed
from transports.hashes import folder_hashes
from updater.core.errors import Failure, Rejected
from updater.manifest import FILE_NAME, Manifest, TensorEntry, TensorSpec
from updater.names import clean_names

INDEX_NAME = "model.safetensors.index.json"
SHARD_BYTES = 4 << 30
#: Files of a model folder that travel with the weights when `config_from` names the folder.
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "vocab.json",
    "vocab.txt",
)


@dataclass(frozen=True, slots=True)
class Weights:
    """Checked tensors under clean names. `ties`: alias -> canonical name, where two names are one storage."""

    tensors: Mapping[str, torch.Tensor]
    ties: tuple[tuple[str, str], ...]
    versions: Mapping[str, int | None]  # `Tensor._version` when they were taken

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Known up front: nothing is copied for them."""
        return {
            name: TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
            for name, tensor in self.tensors.items()
        }

    def check_untouched(self) -> None:
        """Raise `source_changed` if an optimiser stepped since `take`.

        Sees every in-place operation on the tensors themselves; writes through `.data` leave no trace in torch.
        """
        moved = [name for name, tensor in self.tensors.items() if _version_of(tensor) != self.versions[name]]
        if moved:
            raise Rejected(
                *(Failure("source_changed", "written to while it was being published", tensor=name) for name in moved)
            )


def take(weights: Mapping[str, torch.Tensor]) -> Weights:
    """Check a state dict and clean its names. Copies nothing. Raises Rejected with every fault, not only the first."""
    if not weights:
        raise Rejected(Failure("bad_request", "no tensors to publish"))
    names = clean_names(weights)
    faults = [fault for name, tensor in weights.items() for fault in _faults(names[name], tensor)]
    if faults:
        raise Rejected(*faults)
    tensors = {names[name]: tensor.detach() for name, tensor in weights.items()}
    faults = _overlaps(tensors)
    if faults:
        raise Rejected(*faults)
    # detach() shares the version counter with its source, so later steps on the parameter are still seen.
    return Weights(tensors, _ties(tensors), {name: _version_of(tensor) for name, tensor in tensors.items()})


def write_folder(
    weights: Weights,
    target: Path,
    *,
    config_from: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    source_revision: str = "",
    progress: Callable[[int], None] = lambda _bytes: None,
) -> Manifest:
    """Write `target` and return its manifest. At most one tensor is copied at a time.

    `target` must not exist; its parent must. `progress` is told of bytes as they are written. Raises Rejected
    (`source_changed`) and leaves nothing behind if a tensor was written to meanwhile.
    """
    temporary = target.parent / f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    temporary.mkdir()
    try:
        manifest = _fill(temporary, weights, config_from, shard_bytes, source_revision, progress)
        weights.check_untouched()
        _sync_folder(temporary)
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync_folder(target.parent)
    return manifest


def _fill(
    folder: Path,
    weights: Weights,
    config_from: Path | None,
    shard_bytes: int,
    source_revision: str,
    progress: Callable[[int], None],
) -> Manifest:
    specs = weights.specs
    shards = _split(list(specs.values()), shard_bytes)
    entries: list[TensorEntry] = []
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        weight_map.update((spec.name, file) for spec in shard)
        with _durable(folder / file) as stream:
            entries += _write_shard(stream, shard, weights.tensors, progress)
    if len(shards) > 1:
        total = sum(spec.nbytes for spec in specs.values())
        _write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
    for name in COMPANIONS if config_from else ():
        _copy_if_there(Path(config_from or "") / name, folder / name)
    hashes = folder_hashes(str(folder), (str(folder),))
    manifest = Manifest(
        tensors=tuple(sorted(entries, key=lambda entry: entry.name)),
        config_hash=hashes.config,
        tokenizer_hash=hashes.tokenizer,
        quantization_hash=hashes.quantization,
        source_revision=source_revision,
        ties=weights.ties,
    )
    manifest.check()
    with _durable(folder / FILE_NAME) as stream:
        stream.write(manifest.to_json().encode())
    return manifest


def _write_shard(
    stream: IO[bytes],
    shard: Sequence[TensorSpec],
    tensors: Mapping[str, torch.Tensor],
    progress: Callable[[int], None],
) -> list[TensorEntry]:
    stream.write(_header(shard))
    entries = []
    for spec in shard:
        # One copy at a time, contiguous and on the CPU; what is digested is what is written.
        plain = tensors[spec.name].to("cpu").contiguous()
        if plain.numel():
            stream.write(plain.reshape(-1).view(torch.uint8).numpy().data)
        digest = to_hex(tensor_digest(plain, spec.dtype))
        entries.append(TensorEntry(spec.name, spec.dtype, spec.shape, digest))
        progress(spec.nbytes)
    return entries


def _header(shard: Sequence[TensorSpec]) -> bytes:
    """The safetensors header: little-endian length, then JSON padded with spaces to 8 bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in shard:
        end = offset + spec.nbytes
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _split(specs: Sequence[TensorSpec], shard_bytes: int) -> list[list[TensorSpec]]:
    """In the order given; a tensor larger than a shard gets one of its own."""
    shards: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if shards[-1] and filled + spec.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.nbytes
    # Largest items first within a file keep every tensor aligned to its item size.
    return [sorted(shard, key=lambda spec: -_item_bytes(spec)) for shard in shards]


def _item_bytes(spec: TensorSpec) -> int:
    return spec.nbytes // spec.numel if spec.numel else 1


def _faults(name: str, tensor: object) -> Iterator[Failure]:
    if not isinstance(tensor, torch.Tensor):
        yield Failure("bad_request", f"a {type(tensor).__name__}, not a tensor", tensor=name)
    elif hasattr(tensor, "device_mesh"):
        yield Failure("tensor_shape", "sharded over a device mesh: gather it before publishing", tensor=name)
    elif tensor.is_meta or tensor.layout is not torch.strided:
        yield Failure("bad_request", f"{tensor.device.type} device, {tensor.layout}: holds no plain bytes", tensor=name)
    elif tensor.numel() == 0:
        # What a sharded trainer leaves on ranks that do not own the parameter (B104).
        yield Failure(
            "tensor_shape", f"shape {list(tensor.shape)} holds nothing: an un-gathered parameter?", tensor=name
        )
    elif tensor.dtype not in DTYPE_NAMES or is_packed(DTYPE_NAMES[tensor.dtype]):
        yield Failure("tensor_dtype", f"{tensor.dtype} has no safetensors type", tensor=name)


def _place(tensor: torch.Tensor) -> tuple[str, int, int]:
    """Device and byte range of a contiguous view."""
    start = tensor.data_ptr()
    return (str(tensor.device), start, start + tensor.numel() * tensor.element_size())


def _ties(tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[str, str], ...]:
    """The first name of a storage is canonical: modules list their embedding before the head that reuses it."""
    first: dict[object, str] = {}
    ties = []
    for name, tensor in tensors.items():
        key = (_place(tensor), tensor.dtype, tensor.shape, tensor.stride())
        if first.setdefault(key, name) != name:
            ties.append((name, first[key]))
    return tuple(sorted(ties))


def _overlaps(tensors: Mapping[str, torch.Tensor]) -> list[Failure]:
    """Contiguous views that share some of their bytes and not all: two names that fight over one memory."""
    views = sorted((_place(tensor), name) for name, tensor in tensors.items() if tensor.is_contiguous())
    faults = []
    reach: tuple[tuple[str, int, int], str] | None = None  # the view that ends last so far, on this device
    for place, name in views:
        if reach is None or place[0] != reach[0][0] or place[1] >= reach[0][2]:
            reach = (place, name)
        elif place != reach[0]:
            faults.append(Failure("tensor_duplicate", f"shares part of its memory with {reach[1]}", tensor=name))
            reach = max(reach, (place, name), key=lambda item: item[0][2])
    return faults


def _version_of(tensor: torch.Tensor) -> int | None:
    """None for inference tensors: they carry no counter, and cannot be written to outside inference mode."""
    return None if tensor.is_inference() else tensor._version


@contextlib.contextmanager
def _durable(path: Path) -> Iterator[IO[bytes]]:
    with open(path, "wb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())


def _write_json(path: Path, value: object) -> None:
    with _durable(path) as stream:
        stream.write(json.dumps(value, indent=2, sort_keys=True).encode())


def _copy_if_there(source: Path, target: Path) -> None:
    if source.is_file():
        with _durable(target) as stream:
            stream.write(source.read_bytes())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
