"""The folder that a trainer's weights become: a sharded safetensors directory with its index and its manifest.

It is written under a temporary name and renamed once all of it is durable, so no reader ever sees half of one. Tensors
come one at a time, in any order: where each one goes is known from the specs.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Self

import torch

from trainer_side.client.packing import check_tensor
from trainer_side.client.request import Progress, silent
from transports.digest import tensor_digest, to_hex
from transports.disk.hashes import folder_document, folder_hashes
from updater.core.errors import refuse
from updater.protocol.manifest import FILE_NAME, Manifest, TensorEntry, TensorSpec
from updater.protocol.model_document import ModelDocument, known

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


class FolderWriter:
    """`put` every tensor of `specs`, then `finish`; leaving the `with` block before that leaves nothing behind.

    `target` must not exist; its parent must. `digests`: what is known already is not computed again. `model`: what the
    manifest says of the model where no file of `config_from` does. `progress` is told of bytes as they are written.
    """

    def __init__(
        self,
        target: Path,
        specs: Mapping[str, TensorSpec],
        *,
        digests: Mapping[str, str] | None = None,
        ties: tuple[tuple[str, str], ...] = (),
        config_from: Path | None = None,
        model: ModelDocument | None = None,
        source_revision: str = "",
        shard_bytes: int = SHARD_BYTES,
        progress: Progress = silent,
    ) -> None:
        self.target = target
        self._ties, self._source_revision = ties, source_revision
        self._specs, self._config_from, self._model = dict(specs), config_from, model
        self._digests, self._progress = dict(digests or {}), progress
        self._temporary = target.parent / f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
        self._left = set(self._specs)
        self._places: dict[str, tuple[str, int]] = {}  # tensor -> file, offset of its bytes
        self._files: dict[str, IO[bytes]] = {}
        self._temporary.mkdir()
        try:
            self._lay_out(_split(list(self._specs.values()), shard_bytes))
        except BaseException:
            self.discard()
            raise

    def _lay_out(self, shards: Sequence[Sequence[TensorSpec]]) -> None:
        for number, shard in enumerate(shards, start=1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
            header = _header(shard)
            stream = self._files[file] = open(self._temporary / file, "wb")  # noqa: SIM115  (closed by finish, discard)
            stream.write(header)
            offset = len(header)
            for spec in shard:
                self._places[spec.name] = file, offset
                offset += spec.nbytes
        if len(shards) > 1:
            total = sum(spec.nbytes for spec in self._specs.values())
            weight_map = {name: file for name, (file, _offset) in self._places.items()}
            _write_json(self._temporary / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """One copy at a time, contiguous and on the CPU; what is digested is what is written."""
        spec = self._specs[name]
        check_tensor(spec, tensor)
        plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
        file, offset = self._places[name]
        if plain.numel():
            stream = self._files[file]
            stream.seek(offset)
            stream.write(plain.reshape(-1).view(torch.uint8).numpy().data)
        if name not in self._digests:
            self._digests[name] = to_hex(tensor_digest(plain, spec.dtype))
        self._left.discard(name)
        self._progress(spec.nbytes)

    def finish(self) -> Manifest:
        """Make it durable, name it, and return its manifest."""
        if self._left:
            raise refuse("tensor_missing", "it was never put", tensor=min(self._left))
        while self._files:
            _file, stream = self._files.popitem()
            with stream:
                stream.flush()
                os.fsync(stream.fileno())
        manifest = self._manifest()
        _sync_folder(self._temporary)
        os.rename(self._temporary, self.target)
        _sync_folder(self.target.parent)
        return manifest

    def _manifest(self) -> Manifest:
        folder, config_from = self._temporary, self._config_from
        for name in COMPANIONS if config_from else ():
            _copy_if_there((config_from or folder) / name, folder / name)
        hashes = folder_hashes(str(folder), (str(folder),))
        entries = (TensorEntry(s.name, s.dtype, s.shape, self._digests[s.name]) for s in self._specs.values())
        manifest = Manifest(
            tensors=tuple(sorted(entries, key=lambda entry: entry.name)),
            config_hash=hashes.config,
            tokenizer_hash=hashes.tokenizer,
            quantization_hash=hashes.quantization,
            source_revision=self._source_revision,
            ties=self._ties,
            model=known(folder_document(str(folder), (str(folder),))) or self._model,
        )
        manifest.check()
        with _durable(folder / FILE_NAME) as stream:
            stream.write(manifest.to_json().encode())
        return manifest

    def discard(self) -> None:
        """Nothing is left of an unfinished folder; a finished one stays."""
        while self._files:
            self._files.popitem()[1].close()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_caught: object) -> None:
        self.discard()


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
