"""A checkpoint on disk as a source."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.unit.trainer_side.written import write_folder
from trainer_side.sources import as_source
from trainer_side.sources.casts import Casts
from trainer_side.sources.folder import FolderSource
from transports.digest import tensor_digest, to_hex
from updater.core.errors import Rejected
from updater.protocol.manifest import Manifest

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def weights() -> dict[str, torch.Tensor]:
    table = torch.arange(24, dtype=torch.bfloat16).reshape(6, 4)
    return {EMBED: table, HEAD: table, "norm": torch.ones(4), "scale": torch.tensor(2.5)}


def written(folder: Path) -> Manifest:
    return write_folder(as_source(weights()), folder, shard_bytes=60)


def test_a_folder_gives_what_was_written_with_its_digests_and_ties(tmp_path: Path) -> None:
    manifest = written(tmp_path / "v")
    source = as_source(tmp_path / "v")
    assert source.digests() == {entry.name: entry.digest for entry in manifest.tensors}
    assert source.ties == ((HEAD, EMBED),)
    sent = {name: tensor for name, tensor in source.tensors() if tensor is not None}
    assert all(
        torch.equal(sent[name], tensor) and sent[name].dtype == tensor.dtype for name, tensor in weights().items()
    )
    assert source.specs == manifest.specs()
    source.check_untouched()


def test_a_bare_file_has_no_digests(tmp_path: Path) -> None:
    save_file({"module.w": torch.ones(3)}, tmp_path / "model.safetensors")
    source = as_source(str(tmp_path / "model.safetensors"))
    assert source.digests() == {}
    assert [name for name, _tensor in source.tensors()] == ["w"]


def test_a_cast_tensor_has_no_digest_of_its_manifest(tmp_path: Path) -> None:
    written(tmp_path / "v")
    source = as_source(tmp_path / "v", dtypes={"norm": "BF16"})
    assert set(source.digests()) == {EMBED, HEAD, "scale"}
    sent = dict(source.tensors())["norm"]
    assert sent is not None
    assert sent.dtype == torch.bfloat16


def test_packed_bytes_pass_unchanged(tmp_path: Path) -> None:
    raw = torch.arange(6, dtype=torch.uint8)
    header = b'{"w":{"dtype":"F4","shape":[3,4],"data_offsets":[0,6]}}'
    header += b" " * (-len(header) % 8)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(raw.tolist()))
    source = as_source(tmp_path / "model.safetensors", dtypes={"*": "BF16"})
    sent = dict(source.tensors())["w"]
    assert sent is not None
    assert sent.reshape(-1).tolist() == raw.tolist()
    assert tensor_digest(sent, "F4", (3, 4))
    assert source.specs["w"].dtype == "F4"


def test_files_that_change_are_noticed(tmp_path: Path) -> None:
    written(tmp_path / "v")
    source = as_source(tmp_path / "v")
    (shard, *_rest) = sorted((tmp_path / "v").glob("*.safetensors"))
    os.utime(shard, ns=(1, 1))
    with pytest.raises(Rejected) as caught:
        source.check_untouched()
    assert caught.value.code == "source_changed"


def test_files_are_closed_with_the_source(tmp_path: Path) -> None:
    written(tmp_path / "v")

    def open_here() -> set[str]:
        links = (os.path.join("/proc/self/fd", number) for number in os.listdir("/proc/self/fd"))
        return {os.readlink(link) for link in links if os.path.exists(link)}

    source: FolderSource | None = FolderSource(tmp_path / "v", Casts())
    shard = str(sorted((tmp_path / "v").glob("*.safetensors"))[0])
    assert shard in open_here()
    del source
    gc.collect()
    assert shard not in open_here()


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Rejected) as caught:
        as_source(tmp_path / "none")
    assert caught.value.code == "source_missing"


def test_the_digest_of_a_folder_is_that_of_its_bytes(tmp_path: Path) -> None:
    written(tmp_path / "v")
    source = as_source(tmp_path / "v")
    digests = source.digests()
    assert all(digests[name] == to_hex(tensor_digest(t)) for name, t in source.tensors() if t is not None)
