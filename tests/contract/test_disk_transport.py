"""The transport suite over files."""

from __future__ import annotations

from pathlib import Path

import torch

from transports.disk.io_plan import ReadLimits
from transports.disk.reader import ReaderOptions
from transports.disk.source import DiskSource
from transports.testing import StoredContract, shard_name, write_checkpoint, write_index, write_sharded


class TestDisk(StoredContract):
    def send(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        names = list(tensors)
        middle = (len(names) + 1) // 2
        halves = [names[:middle], names[middle:]] if len(names) > 1 else [names]
        write_sharded(folder, [{name: tensors[name] for name in half} for half in halves])

    def connect(self, folder: Path) -> DiskSource:
        options = ReaderOptions(threads=2, limits=ReadLimits(run=32, request=256, bucket=64), poison=True)
        return DiskSource.open(str(folder), (str(folder),), options=options)

    def damage(self, folder: Path, kind: str, name: str) -> None:
        first, second = (folder / shard_name(at, 2) for at in (1, 2))
        with DiskSource.open(str(folder), (str(folder),)) as source:
            place = source.places[name]
            tensors = {t: torch.zeros(s.shape, dtype=torch.bfloat16) for t, s in source.specs.items()}
        holder = folder / place.file
        if kind == "drop":
            write_checkpoint(holder, {t: v for t, v in tensors.items() if t != name and t < "c"})
        elif kind == "duplicate":
            write_checkpoint(second, {t: tensors[t] for t in (name, "c")})
        elif kind == "truncate":
            first.write_bytes(first.read_bytes()[:-1])
        elif kind == "flip":
            raw = bytearray(holder.read_bytes())
            raw[place.start + 77] ^= 0x10
            holder.write_bytes(raw)
        elif kind == "stale":
            write_checkpoint(holder, {t: v for t, v in tensors.items() if t < "c"})
        elif kind == "oversize":
            holder.write_bytes(holder.read_bytes() + b"\0" * 8)
        else:
            raise ValueError(kind)


def test_a_single_file_without_an_index_is_enough(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "weights.safetensors", {"t": torch.ones(3)})
    for path in (tmp_path, tmp_path / "weights.safetensors"):
        with DiskSource.open(str(path), (str(tmp_path),)) as source:
            assert list(source.specs) == ["t"]


def test_numbered_shards_without_an_index_are_all_read(tmp_path: Path) -> None:
    write_sharded(tmp_path, [{f"t{at}": torch.ones(3)} for at in range(12)])
    (tmp_path / "model.safetensors.index.json").unlink()
    with DiskSource.open(str(tmp_path), (str(tmp_path),)) as source:
        assert list(source.headers) == [shard_name(at, 12) for at in range(1, 13)]
        assert len(source.specs) == 12
    write_index(tmp_path, {"t3": shard_name(4, 12)})
    with DiskSource.open(str(tmp_path), (str(tmp_path),)) as source:
        assert list(source.specs) == ["t3"]
        assert len(source.warnings) == 11
