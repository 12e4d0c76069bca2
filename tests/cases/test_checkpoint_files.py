"""Checkpoint files that broke somebody's server, at the level of the disk source.

REFUSED here: a typed error that names file or tensor, raised before any byte of a tensor is read. That the fleet then
serves as before is asserted where there is a fleet.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from transports.base import Box, Read, Source
from transports.digest import tensor_digest, to_hex
from transports.disk.header import HEADER_LIMIT
from transports.disk.index import find_layout
from transports.disk.io_plan import ReadLimits
from transports.disk.manifests import build_manifest, save_manifest, verify_manifest, write_manifest
from transports.disk.reader import ReaderOptions
from transports.disk.report import inspect
from transports.disk.source import DiskSource
from transports.testing import (
    HandMadeFile,
    LyingSource,
    PoisonSource,
    refused,
    shard_name,
    tensor_bytes,
    write_checkpoint,
    write_index,
    write_sharded,
)
from transports.testing.source_contract import digests, fetch, noise
from updater.coordinator.requests import resolved
from updater.core.errors import LiveweightsError
from updater.protocol.manifest import DTYPE_BITS

LAYER = "model.layers.0"
K, V = f"{LAYER}.self_attn.k_proj.weight", f"{LAYER}.self_attn.v_proj.weight"


def opened(path: Path, *more_roots: Path, manifest: str = "", options: ReaderOptions | None = None) -> DiskSource:
    folder = path if path.is_dir() else path.parent
    return DiskSource.open(str(path), (str(folder), *map(str, more_roots)), manifest, options)


def shards(seed: int = 8) -> list[dict[str, torch.Tensor]]:
    """Two shards of a small decoder in bfloat16."""
    names = ("model.embed_tokens.weight", K, V), (f"{LAYER}.mlp.up_proj.weight", "model.norm.weight")
    sizes = ((257, 16), (8, 16), (8, 16)), ((24, 16), (16,))
    return [
        {name: noise("BF16", size, seed + at) for at, (name, size) in enumerate(zip(*pair, strict=True))}
        for pair in zip(names, sizes, strict=True)
    ]


def everything(parts: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: tensor for part in parts for name, tensor in part.items()}


@pytest.fixture
def v8(tmp_path: Path) -> Path:
    write_sharded(tmp_path / "v8", shards())
    return tmp_path / "v8"


# Headers


@pytest.mark.case("B001")
@pytest.mark.parametrize(
    ("claim", "code"),
    [(2**63 - 1, "file_header"), (200_000_000, "file_header"), (HEADER_LIMIT + 1, "file_header"),
     (HEADER_LIMIT, "file_truncated")],
)  # fmt: skip
def test_a_claimed_header_length_is_not_believed(tmp_path: Path, claim: int, code: str) -> None:
    path = HandMadeFile(header=b"{}", payload=b"\0" * 54, claim=claim).write(tmp_path / "model.safetensors")
    assert path.stat().st_size == 64
    tracemalloc.start()
    with refused(code, files=["model.safetensors"]):
        opened(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.case("B001")
def test_a_header_longer_than_the_file(tmp_path: Path) -> None:
    HandMadeFile(header=b"{}", claim=1000).write(tmp_path / "model.safetensors")
    with refused("file_truncated", files=["model.safetensors"]):
        opened(tmp_path)


@pytest.mark.case("B002")
@pytest.mark.parametrize("size", [0, 7])
def test_a_file_without_room_for_its_length(tmp_path: Path, size: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\0" * size)
    with refused("file_truncated", files=["model.safetensors"]):
        opened(tmp_path)


@pytest.mark.case("B002")
def test_a_shard_short_of_one_byte(v8: Path) -> None:
    short = v8 / shard_name(2, 2)
    short.write_bytes(short.read_bytes()[:-1])
    with refused("file_truncated", files=[short.name], tensors=["model.norm.weight"]) as caught:
        opened(v8)
    assert str(short.stat().st_size) in caught[0].failures[0].message
    assert str(short.stat().st_size + 1) in caught[0].failures[0].message


@pytest.mark.case("B004")
def test_one_name_twice_in_a_header(tmp_path: Path) -> None:
    made = HandMadeFile().tensor("model.norm.weight", torch.ones(4)).tensor("model.norm.weight", torch.zeros(4))
    made.write(tmp_path / "model.safetensors")
    with refused("tensor_duplicate", tensors=["model.norm.weight"], files=["model.safetensors"]):
        opened(tmp_path)


@pytest.mark.case("B004")
def test_one_field_twice_in_an_entry(tmp_path: Path) -> None:
    header = b'{"t":{"dtype":"F32","shape":[1],"shape":[2],"data_offsets":[0,4]}}'
    HandMadeFile(header=header, payload=b"\0" * 4).write(tmp_path / "model.safetensors")
    with refused("tensor_duplicate", files=["model.safetensors"]):
        opened(tmp_path)


@pytest.mark.case("B006")
def test_two_tensors_on_the_same_bytes(tmp_path: Path) -> None:
    def entry(low: int, high: int) -> dict[str, object]:
        return {"dtype": "BF16", "shape": [8, 16], "data_offsets": [low, high]}

    made = HandMadeFile(payload=b"\0" * 512).entry(K, entry(0, 256)).entry(V, entry(0, 256))
    made.entry("o", entry(256, 512)).write(tmp_path / "model.safetensors")
    with refused("file_range", tensors=[K, V], files=["model.safetensors"]):
        opened(tmp_path)


@pytest.mark.case("B006")
def test_a_tensor_inside_another(tmp_path: Path) -> None:
    def entry(low: int, high: int) -> dict[str, object]:
        return {"dtype": "U8", "shape": [high - low], "data_offsets": [low, high]}

    made = HandMadeFile(payload=b"\0" * 100).entry("outer", entry(0, 80)).entry("inner", entry(10, 20))
    made.entry("later", entry(30, 100)).write(tmp_path / "model.safetensors")
    with refused("file_range", tensors=["outer", "inner", "later"]):
        opened(tmp_path)


@pytest.mark.case("B006")
@pytest.mark.parametrize("at", [0, 4, 16, 17])
def test_an_empty_tensor_lies_between_others_or_nowhere(tmp_path: Path, at: int) -> None:
    made = (
        HandMadeFile().tensor("t", torch.ones(4)).entry("e", {"dtype": "F32", "shape": [0], "data_offsets": [at, at]})
    )
    made.write(tmp_path / "model.safetensors")
    if at in (0, 16):
        with opened(tmp_path) as source:
            assert sorted(source.specs) == ["e", "t"]
    else:
        with refused("file_range" if at < 16 else "file_truncated", "file_range", tensors=["e"]):
            opened(tmp_path)


@pytest.mark.case("B007")
def test_a_hole_between_tensors(tmp_path: Path) -> None:
    parts = everything(shards())
    made = HandMadeFile()
    for at, (name, tensor) in enumerate(parts.items()):
        made.tensor(name, tensor)
        if at == 2:
            made.hole(8)
    made.write(tmp_path / "model.safetensors")
    with refused("file_range", files=["model.safetensors"]) as caught:
        opened(tmp_path)
    assert len(caught[0].failures) == 1


@pytest.mark.case("B007")
@pytest.mark.parametrize("first", [True, False])
def test_bytes_before_or_behind_all_tensors(tmp_path: Path, first: bool) -> None:
    made = HandMadeFile()
    (made.hole(8).tensor("t", torch.ones(4)) if first else made.tensor("t", torch.ones(4)).hole(8)).write(
        tmp_path / "model.safetensors"
    )
    with refused("file_range", files=["model.safetensors"]):
        opened(tmp_path)


@pytest.mark.case("B009")
def test_a_range_that_is_not_shape_times_item_size(tmp_path: Path) -> None:
    made = HandMadeFile().data("model.embed_tokens.weight", "F32", (257, 16), b"\0" * (257 * 16))
    made.tensor("t", torch.ones(4)).write(tmp_path / "model.safetensors")
    with refused("file_range", tensors=["model.embed_tokens.weight"], files=["model.safetensors"]) as caught:
        opened(tmp_path)
    assert str(257 * 16 * 4) in caught[0].failures[0].message
    assert str(257 * 16) in caught[0].failures[0].message


@pytest.mark.case("B010")
@pytest.mark.parametrize(
    "header", [b"{}", b'{"__metadata__":{"format":"pt"}}', b'{"__metadata__":{"format":"pt"}}     ']
)
def test_a_shard_without_tensors_is_tolerated(v8: Path, header: bytes) -> None:
    write_index(v8, {name: shard_name(1, 2) for name in shards()[0]} | dict.fromkeys(shards()[1], "x.safetensors"))
    (v8 / shard_name(2, 2)).rename(v8 / "x.safetensors")
    HandMadeFile(header=header).write(v8 / "model-00003-of-00003.safetensors")
    (v8 / "model.safetensors.index.json").unlink()
    (v8 / shard_name(1, 2)).rename(v8 / "model-00001-of-00003.safetensors")
    (v8 / "x.safetensors").rename(v8 / "model-00002-of-00003.safetensors")
    with opened(v8) as source:
        assert digests(fetch(source)) == digests(everything(shards()))


@pytest.mark.case("B010")
@pytest.mark.parametrize(
    "header", [b"", b"{", b"{}}", b"[]", b"null", b' {"a":1}', b'{"__metadata__":{"format":"pt"},}']
)
def test_a_malformed_header(v8: Path, header: bytes) -> None:
    HandMadeFile(header=header).write(v8 / shard_name(2, 2))
    with refused("file_header", files=[shard_name(2, 2)]):
        opened(v8)


@pytest.mark.case("B011")
def test_an_empty_tensor_is_a_tensor(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model.safetensors", {"e": torch.empty(0, 16), "t": torch.ones(2)})
    with opened(tmp_path) as source:
        assert source.specs["e"].shape == (0, 16)
        assert tensor_digest(fetch(source)["e"]) == 0
        with refused("tensor_shape", tensors=["e"]):
            source.read([Read("e", Box.whole((1, 16)), torch.empty(1, 16))])
    assert {entry.name: entry.digest for entry in build_manifest(str(tmp_path)).tensors}["e"] == "0" * 16


# Index against shards


@pytest.mark.case("B013")
def test_an_indexed_shard_is_missing(v8: Path) -> None:
    (v8 / shard_name(2, 2)).unlink()
    with refused("shard_missing", files=[shard_name(2, 2)]) as caught:
        opened(v8)
    assert str(len(shards()[1])) in caught[0].failures[0].message


@pytest.mark.case("B013")
def test_a_numbered_shard_is_missing_without_an_index(v8: Path) -> None:
    (v8 / "model.safetensors.index.json").unlink()
    (v8 / shard_name(1, 2)).unlink()
    with refused("shard_missing", files=[shard_name(1, 2)]):
        opened(v8)


@pytest.mark.case("B014")
def test_an_indexed_tensor_is_in_no_shard(v8: Path) -> None:
    absent = "model.layers.1.mlp.up_proj.weight"
    where = {name: shard_name(at, 2) for at, part in enumerate(shards(), 1) for name in part}
    write_index(v8, where | {absent: shard_name(2, 2)})
    with refused("index_mismatch", tensors=[absent], files=[shard_name(2, 2)]):
        opened(v8)


@pytest.mark.case("B014")
def test_an_indexed_tensor_is_in_another_shard(v8: Path) -> None:
    where = {name: shard_name(at, 2) for at, part in enumerate(shards(), 1) for name in part}
    write_index(v8, where | {K: shard_name(2, 2)})
    with refused("index_mismatch", tensors=[K], files=[shard_name(1, 2), shard_name(2, 2)]):
        opened(v8)


@pytest.mark.case("B014")
def test_a_tensor_that_the_index_does_not_know(v8: Path) -> None:
    where = {name: shard_name(at, 2) for at, part in enumerate(shards(), 1) for name in part if name != V}
    write_index(v8, where)
    with refused("index_mismatch", tensors=[V], files=[shard_name(1, 2)]):
        opened(v8)


@pytest.mark.case("B014")
def test_a_tensor_in_two_shards(v8: Path) -> None:
    write_checkpoint(v8 / shard_name(2, 2), shards()[1] | {K: noise("BF16", (8, 16), 1)})
    with refused("file_duplicate", tensors=[K], files=[shard_name(1, 2), shard_name(2, 2)]):
        opened(v8)


@pytest.mark.case("B014")
def test_every_fault_is_listed(v8: Path) -> None:
    (v8 / shard_name(1, 2)).write_bytes(b"\0" * 9)
    HandMadeFile().data("t", "F7", (1,), b"\0").write(v8 / shard_name(2, 2))
    with refused("file_header", "file_dtype", files=[shard_name(1, 2), shard_name(2, 2)]):
        opened(v8)


# A whole second checkpoint beside the indexed one. Which of the two is newer, no header says.


@pytest.mark.case("B015", "F03")
@pytest.mark.parametrize("stray", ["model.safetensors", "model-00001-of-00001.safetensors"])
@pytest.mark.parametrize("wrapper", ["", "module."])
def test_the_same_names_beside_the_index_are_ambiguous(v8: Path, stray: str, wrapper: str) -> None:
    write_checkpoint(v8 / stray, {wrapper + name: tensor for name, tensor in everything(shards(seed=7)).items()})
    with refused("source_ambiguous", files=[stray]) as caught:
        opened(v8)
    assert caught[0].failures[0].hint
    assert [(fault.code, fault.file) for fault in inspect(str(v8)).faults] == [("source_ambiguous", stray)]
    with refused("source_ambiguous", files=[stray]):
        build_manifest(str(v8))


@pytest.mark.case("B015", "F03")
def test_one_name_is_enough_and_a_file_that_is_cut_short_has_names_too(v8: Path) -> None:
    stray = write_checkpoint(v8 / "model.safetensors", {K: noise("BF16", (8, 16), 7)})
    os.truncate(stray, stray.stat().st_size - 1)
    with refused("source_ambiguous", tensors=[K], files=["model.safetensors"]):
        opened(v8)


@pytest.mark.case("B015", "F03")
@pytest.mark.parametrize("beside", ["other names", "no header"])
def test_a_file_of_other_names_is_left_alone(v8: Path, beside: str) -> None:
    stray = write_checkpoint(v8 / "consolidated.safetensors", {"layers.0.wq.weight": noise("BF16", (8, 16), 7)})
    if beside == "no header":
        stray.write_bytes(b"\0" * 4)
    with opened(v8) as source:
        assert digests(fetch(source)) == digests(everything(shards()))
        assert len(source.warnings) == 1
        assert stray.name in source.warnings[0].split()


@pytest.mark.case("B015", "F03")
def test_digests_beside_it_say_that_the_indexed_files_are_meant(v8: Path) -> None:
    manifest = build_manifest(str(v8))
    write_checkpoint(v8 / "model.safetensors", everything(shards(seed=7)))
    bare = replace(manifest, tensors=tuple(replace(entry, digest="") for entry in manifest.tensors))
    with refused("source_ambiguous"):
        opened(v8, manifest=bare.to_json())
    with opened(v8, manifest=manifest.to_json()) as source:
        assert digests(fetch(source)) == digests(everything(shards()))
    save_manifest(manifest, str(v8))
    assert verify_manifest(str(v8)) == manifest
    assert inspect(str(v8)).sound


@pytest.mark.case("B015", "F03")
def test_a_path_that_names_the_file_or_the_index_is_plain(v8: Path, tmp_path: Path) -> None:
    alone = write_checkpoint(v8 / "model.safetensors", everything(shards(seed=7)))
    index = v8 / "model.safetensors.index.json"
    with opened(alone) as source:
        assert digests(fetch(source)) == digests(everything(shards(seed=7)))
    with opened(index) as source:
        assert digests(fetch(source)) == digests(everything(shards()))
    write_manifest(str(index))
    with opened(v8) as source:
        assert digests(fetch(source)) == digests(everything(shards()))
    # a hub's snapshot: the index is a link, and its shards lie beside the link
    moved = index.rename(tmp_path / "blob")
    index.symlink_to(moved)
    named = resolved(str(index), (tmp_path,))
    with DiskSource.open(named, (str(tmp_path),)) as source:
        assert digests(fetch(source)) == digests(everything(shards()))


@pytest.mark.case("B017")
@pytest.mark.parametrize(
    "name",
    ["../outside/evil.safetensors", "{root}/outside/evil.safetensors", "a/../../outside/evil.safetensors",
     "evil\0.safetensors", "..\\outside\\evil.safetensors", "", ".", "a//b.safetensors"],
)  # fmt: skip
def test_an_index_that_leads_out(v8: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    evil = write_checkpoint(outside / "evil.safetensors", shards()[1])
    os.utime(evil, ns=(1, 1))
    where = {name: shard_name(1, 2) for name in shards()[0]}
    write_index(v8, where | {tensor: name.format(root=tmp_path) for tensor in shards()[1]})
    with refused("source_outside_roots", tensors=list(shards()[1])):
        DiskSource.open(str(v8), (str(tmp_path),))
    assert evil.stat().st_atime_ns == 1


@pytest.mark.case("B017")
@pytest.mark.parametrize("link", ["shard", "index", "folder", "manifest"])
def test_a_link_that_leads_out(v8: Path, tmp_path: Path, link: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    path = (
        v8 / {"shard": shard_name(1, 2), "index": "model.safetensors.index.json", "folder": "", "manifest": "m"}[link]
    )
    if link == "manifest":
        path = Path(save_manifest(build_manifest(str(v8)), str(v8)))
    moved = path.rename(outside / "moved")
    path.symlink_to(moved)
    with refused("source_outside_roots"):
        DiskSource.open(str(v8), (str(v8 if link != "folder" else tmp_path / "roots"),))
    with DiskSource.open(str(v8), (str(tmp_path),)) as source:
        assert digests(fetch(source)) == digests(everything(shards()))


@pytest.mark.case("B017")
def test_a_hub_snapshot_links_into_its_blobs(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    write_checkpoint(blobs / "1f", {"t": torch.ones(3)})
    (snapshot / "model.safetensors").symlink_to("../../blobs/1f")
    with refused("source_outside_roots", files=["model.safetensors"]):
        opened(snapshot)
    with opened(snapshot, blobs) as source:
        assert list(source.specs) == ["t"]


@pytest.mark.case("B017")
@pytest.mark.parametrize("path", ["", "\0", "/nowhere/at/all"])
def test_a_path_that_is_none(tmp_path: Path, path: str) -> None:
    with refused("source_outside_roots"):
        DiskSource.open(path, (str(tmp_path),))


@pytest.mark.case("B017")
def test_a_sibling_whose_name_begins_like_a_root(v8: Path) -> None:
    with refused("source_outside_roots"):
        DiskSource.open(str(v8), (str(v8.parent / "v"), str(v8.parent / "v8x")))


@pytest.mark.case("B017")
def test_no_roots_allow_nothing(v8: Path) -> None:
    with refused("source_outside_roots"):
        DiskSource.open(str(v8), ())


@pytest.mark.case("B017")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with refused("source_missing", files=["model.safetensors"]):
        opened(tmp_path)


# Files that change


def rewrite(path: Path, part: dict[str, torch.Tensor]) -> None:
    """In place: same inode, same size, other values."""
    size = path.stat().st_size
    with path.open("r+b") as stream:
        stream.seek(size - sum(tensor.nbytes for tensor in part.values()))
        stream.write(b"".join(tensor_bytes(tensor) for tensor in part.values()))
    assert path.stat().st_size == size


@pytest.mark.case("B019")
def test_a_shard_rewritten_in_place_after_it_was_read(v8: Path) -> None:
    os.utime(v8 / shard_name(1, 2), ns=(1, 1))  # long ago: file systems count in ticks of several milliseconds
    with opened(v8) as source:
        staged = fetch(source)
        source.recheck()
        rewrite(v8 / shard_name(1, 2), shards(seed=9)[0])
        with refused("source_changed", files=[shard_name(1, 2)]):
            source.recheck()
        assert digests(staged) == digests(everything(shards()))


@pytest.mark.case("B019")
def test_a_shard_replaced_while_it_is_read(v8: Path) -> None:
    with opened(v8) as source:
        write_checkpoint(v8 / "new", shards(seed=9)[0])
        os.replace(v8 / "new", v8 / shard_name(1, 2))
        assert digests(fetch(source)) == digests(everything(shards()))  # what was opened
        with refused("source_changed", files=[shard_name(1, 2)]):
            source.recheck()


@pytest.mark.case("B019")
def test_the_index_or_the_manifest_is_rewritten(v8: Path) -> None:
    write_manifest(str(v8))
    for name in ("model.safetensors.index.json", "liveweights.manifest.json"):
        with opened(v8) as source:
            (v8 / name).write_text((v8 / name).read_text() + " ")
            with refused("source_changed", files=[name]):
                source.recheck()


@pytest.mark.case("B020")
def test_a_shard_truncated_while_it_is_read(v8: Path) -> None:
    path = v8 / shard_name(1, 2)
    half = path.stat().st_size // 2

    def cut(_bytes: int) -> None:
        os.truncate(path, half)

    with opened(v8, options=ReaderOptions(threads=1, limits=ReadLimits(request=256))) as source:
        targets = {name: torch.empty(spec.shape, dtype=torch.bfloat16) for name, spec in source.specs.items()}
        reads = [Read(name, Box.whole(target.shape), target) for name, target in targets.items()]
        with refused("file_truncated", files=[path.name]) as caught:
            source.read(reads, progress=cut)
        assert str(half) in caught[0].failures[0].message.split()
        with refused("source_changed", files=[path.name]):
            source.recheck()


@pytest.mark.case("B022")
def test_the_source_vanishes_after_its_index_was_read(v8: Path) -> None:
    layout = find_layout(str(v8), (str(v8),))
    shutil.rmtree(v8)
    with refused("source_missing", files=[shard_name(1, 2), shard_name(2, 2)]):
        DiskSource.open_layout(layout, (str(v8),))
    write_sharded(v8, shards(seed=9))
    with opened(v8) as source:
        assert digests(fetch(source)) == digests(everything(shards(seed=9)))


@pytest.mark.case("B022")
def test_the_source_vanishes_after_it_was_opened(v8: Path) -> None:
    with opened(v8) as source:
        shutil.rmtree(v8)
        assert digests(fetch(source)) == digests(everything(shards()))
        with refused("source_missing", files=[shard_name(1, 2), shard_name(2, 2)]):
            source.recheck()


@pytest.mark.case("B023")
def test_a_shard_that_is_still_growing(v8: Path) -> None:
    write_manifest(str(v8))
    path = v8 / shard_name(2, 2)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with refused("file_truncated", files=[path.name]):
        opened(v8)
    path.write_bytes(whole[:-32] + b"\0" * 32)  # full size, not yet written: the manifest knows
    with refused("tensor_digest", tensors=["model.norm.weight"], files=[path.name]):
        verify_manifest(str(v8))


@pytest.mark.case("B024")
def test_one_flipped_byte(v8: Path) -> None:
    write_manifest(str(v8))
    with opened(v8) as source:
        place = source.places[V]
    path = v8 / place.file
    raw = bytearray(path.read_bytes())
    raw[place.start + place.spec.nbytes // 2] ^= 0xFF
    path.write_bytes(raw)
    with refused("tensor_digest", tensors=[V], files=[place.file]) as caught:
        verify_manifest(str(v8))
    assert len(caught[0].failures) == 1
    (v8 / "liveweights.manifest.json").unlink()
    with opened(v8) as source:
        assert source.manifest is None


# Dtypes and shapes


@pytest.mark.case("B027")
@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_every_known_dtype_has_its_size(tmp_path: Path, dtype: str) -> None:
    size = 16 * DTYPE_BITS[dtype] // 8
    path = HandMadeFile().data("t", dtype, (4, 4), bytes(range(size))).write(tmp_path / "model.safetensors")
    with opened(path) as source:
        assert source.specs["t"].nbytes == size
        assert source.specs["t"].dtype == dtype
    assert build_manifest(str(path)).tensors[0].digest
    HandMadeFile().data("t", dtype, (4, 4), bytes(size + 1)).write(path)
    with refused("file_range", tensors=["t"]):
        opened(path)


@pytest.mark.case("B027")
@pytest.mark.parametrize("dtype", ["F7", "", "bf16", "BF16 "])
def test_an_invented_dtype(tmp_path: Path, dtype: str) -> None:
    HandMadeFile().data("t", dtype, (4,), b"\0" * 8).write(tmp_path / "model.safetensors")
    with refused("file_dtype", tensors=["t"], files=["model.safetensors"]):
        opened(tmp_path)


@pytest.mark.case("B027")
def test_packed_elements_that_end_inside_a_byte(tmp_path: Path) -> None:
    HandMadeFile().data("t", "F4", (3,), b"\0" * 2).write(tmp_path / "model.safetensors")
    with refused("tensor_shape", tensors=["t"]):
        opened(tmp_path)


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.case("B029")
@pytest.mark.parametrize(
    ("entry", "code"),
    [
        ({"dtype": "F32", "shape": [2]}, "file_header"),
        (GOOD | {"more": 1}, "file_header"),
        (None, "file_header"),
        ([], "file_header"),
        (7, "file_header"),
        (GOOD | {"dtype": 7}, "file_dtype"),
        (GOOD | {"dtype": ["F32"]}, "file_dtype"),
        (GOOD | {"data_offsets": [0, 4, 8]}, "file_range"),
        (GOOD | {"data_offsets": ["0", "8"]}, "file_range"),
        (GOOD | {"data_offsets": [8, 0]}, "file_range"),
        (GOOD | {"data_offsets": [-8, 0]}, "file_range"),
        (GOOD | {"data_offsets": [0, 8.0]}, "file_range"),
        (GOOD | {"data_offsets": [False, 8]}, "file_range"),
        (GOOD | {"data_offsets": {}}, "file_range"),
        (GOOD | {"data_offsets": [0, 2**63]}, "file_range"),
        (GOOD | {"data_offsets": [0, 12]}, "file_range"),
        (GOOD | {"shape": [-2]}, "tensor_shape"),
        (GOOD | {"shape": [2**40]}, "file_range"),
        (GOOD | {"shape": [2**40, 2**40]}, "tensor_shape"),
        (GOOD | {"shape": [2**63, 0]}, "tensor_shape"),
        (GOOD | {"shape": 2}, "tensor_shape"),
        (GOOD | {"shape": [True, 2]}, "tensor_shape"),
        (GOOD | {"shape": [1] * 70}, "tensor_shape"),
        (GOOD | {"shape": [2.0]}, "tensor_shape"),
    ],
)
def test_an_entry_that_is_not_one(tmp_path: Path, entry: object, code: str) -> None:
    HandMadeFile(payload=b"\0" * 8).entry("t", entry).write(tmp_path / "model.safetensors")
    with refused(code, tensors=["t"], files=["model.safetensors"]):
        opened(tmp_path)


@pytest.mark.case("B029")
@pytest.mark.parametrize("metadata", [{"a": {"b": "c"}}, {"a": 1}, [], "x", None])
def test_metadata_of_another_shape(tmp_path: Path, metadata: object) -> None:
    HandMadeFile(payload=b"\0" * 8).entry("__metadata__", metadata).entry("t", GOOD).write(
        tmp_path / "model.safetensors"
    )
    with refused("file_header", tensors=["__metadata__"]):
        opened(tmp_path)


@pytest.mark.case("B029")
@pytest.mark.parametrize(
    "header",
    [
        b'{"t":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"t":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}',
        b'{"t":"\xff"}',
        b'{"t":' + b"9" * 5000 + b"}",
    ],
)
def test_text_that_breaks_parsers(tmp_path: Path, header: bytes) -> None:
    HandMadeFile(header=header).write(tmp_path / "model.safetensors")
    with refused("file_header", files=["model.safetensors"]):
        opened(tmp_path)


@pytest.mark.case("F29")
@pytest.mark.parametrize(
    ("start", "what"),
    [
        (b'{"weight_map": {}}', "JSON"),
        (b"PK\x03\x04 and more bytes", "zip"),
        (b"\x80\x02 and more bytes", "pickle"),
        (b"GGUF and more bytes", "GGUF"),
        (b"version of a pointer file", "LFS"),
    ],
)
def test_what_is_another_kind_of_file_is_named_as_such(tmp_path: Path, start: bytes, what: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(start)
    with refused("file_header", files=["model.safetensors"]) as caught:
        opened(path)
    assert what in caught[0].failures[0].message
    assert caught[0].hint


@pytest.mark.case("B029")
@pytest.mark.parametrize("name", ["", "a\0b", "a\nb", "\ud800"])
def test_a_name_that_cannot_be_shown(tmp_path: Path, name: str) -> None:
    HandMadeFile(payload=b"\0" * 8).entry(name, GOOD).write(tmp_path / "model.safetensors")
    with refused("file_header") as caught:
        opened(tmp_path)
    json.dumps([failure.tensor for failure in caught[0].failures]).encode()


@pytest.mark.case("B029")
@pytest.mark.slow
def test_a_thousand_mutated_headers(tmp_path: Path) -> None:
    """Each is opened and read, or refused with a typed error; nothing else comes out, and no file stays open."""
    made = HandMadeFile().entry("__metadata__", {"format": "pt"})
    for name, tensor in everything(shards()).items():
        made.tensor(name, tensor)
    good = made.to_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    dice = random.Random(29)
    path = tmp_path / "model.safetensors"
    gc.collect()  # what earlier tests left behind must not be closed in between
    handles = len(os.listdir("/proc/self/fd"))
    outcomes = {"read": 0, "refused": 0}
    for _ in range(1000):
        path.write_bytes(mutated(good, header, dice))
        caught: list[LiveweightsError] = []
        try:
            with opened(path) as source:
                build_manifest(str(path))
                assert source.specs
        except LiveweightsError as error:
            caught.append(error)
        assert all(failure.file or failure.tensor for error in caught for failure in error.failures)
        outcomes["refused" if caught else "read"] += 1
    assert outcomes["refused"] > 500
    assert outcomes["read"] > 10
    assert len(os.listdir("/proc/self/fd")) <= handles


def mutated(good: bytes, header: int, dice: random.Random) -> bytes:
    raw = bytearray(good)
    for _ in range(dice.randint(1, 3)):
        at = dice.randrange(header)
        what = dice.randrange(5)
        if what == 0:
            raw[at] = dice.randrange(256)
        elif what == 1:
            raw[at] ^= 1 << dice.randrange(8)
        elif what == 2:
            del raw[at : at + dice.randint(1, 9)]
        elif what == 3:
            raw[at:at] = bytes(dice.choices(b'0123456789"{}[],:-.eE \\u', k=dice.randint(1, 5)))
        else:
            other = dice.randrange(header)
            raw[at : at + 4], raw[other : other + 4] = raw[other : other + 4], raw[at : at + 4]
    return bytes(raw)


@pytest.mark.case("B030")
def test_scalars_with_and_without_a_dimension(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model.safetensors", {"s": torch.tensor(2.5), "v": torch.tensor([3.5])})
    with opened(tmp_path) as source:
        one, none = torch.zeros(1), torch.zeros(())
        source.read([Read("s", Box.whole(()), one), Read("v", Box.whole((1,)), none)])
        assert (one.item(), none.item()) == (2.5, 3.5)
        with refused("tensor_shape", tensors=["s"]):
            source.read([Read("s", Box.whole(()), torch.zeros(2))])


@pytest.mark.case("B031")
def test_views_of_one_flat_buffer_are_stored_one_by_one(tmp_path: Path) -> None:
    flat = torch.arange(24.0)
    views = {"a": flat[:8].view(2, 4), "b": flat[8:].view(4, 4).t()}
    write_checkpoint(tmp_path / "model.safetensors", views)
    with opened(tmp_path) as source:
        assert digests(fetch(source)) == digests(views)


@pytest.mark.case("B033")
@pytest.mark.parametrize("poisoned", ["double", "disk"])
def test_a_fused_tensor_from_one_reused_buffer(tmp_path: Path, poisoned: str) -> None:
    parts = {name: noise("BF16", (8, 16), at) for at, name in enumerate("qkv")}
    write_checkpoint(tmp_path / "model.safetensors", parts)
    options = ReaderOptions(limits=ReadLimits(run=1 << 20, bucket=64), poison=True)
    source: Source = PoisonSource(parts) if poisoned == "double" else opened(tmp_path, options=options)
    fused = torch.empty(24, 20, dtype=torch.bfloat16)
    reads = [Read(name, Box.whole((8, 16)), fused[at * 8 : at * 8 + 8, 2:18]) for at, name in enumerate(parts)]
    source.read(reads)
    assert tensor_digest(fused[:, 2:18]) == tensor_digest(torch.cat(list(parts.values())))
    source.close()


@pytest.mark.case("B035")
def test_bytes_of_another_step_do_not_match_the_manifest(tmp_path: Path) -> None:
    before = {"w": torch.arange(64.0).view(8, 8)}
    write_checkpoint(tmp_path / "model.safetensors", before)
    manifest = build_manifest(str(tmp_path))
    mixed = before["w"].clone()
    mixed[4:] += 1
    write_checkpoint(tmp_path / "model.safetensors", {"w": mixed})
    save_manifest(manifest, str(tmp_path))
    with refused("tensor_digest", tensors=["w"]):
        verify_manifest(str(tmp_path))


@pytest.mark.case("B105")
def test_a_source_that_only_says_so_shows_in_the_digest() -> None:
    """The double behaves as the case describes; what refuses it is the vote."""
    sent = {"a": noise("BF16", (4, 4), 1), "b": noise("BF16", (4, 4), 2)}
    arrived = fetch(LyingSource(sent, silent=frozenset({"b"})))
    wrong = [name for name in sent if to_hex(tensor_digest(arrived[name])) != to_hex(tensor_digest(sent[name]))]
    assert wrong == ["b"]


@pytest.mark.case("B177")
def test_the_same_folder_with_new_bytes_gives_the_new_bytes(v8: Path) -> None:
    with opened(v8) as source:
        fetch(source)
    write_sharded(v8, shards(seed=9))
    with opened(v8) as source:
        assert digests(fetch(source)) == digests(everything(shards(seed=9)))


def test_the_manifest_must_name_what_is_there(v8: Path) -> None:
    good = json.loads(build_manifest(str(v8)).to_json())
    tensors = good["tensors"]
    cases: list[tuple[list[dict[str, object]], str]] = [
        (tensors[1:], tensors[0]["name"]),
        (sorted([*tensors, tensors[0] | {"name": "zzz"}], key=lambda entry: entry["name"]), "zzz"),
        ([tensors[0] | {"dtype": "F16"}, *tensors[1:]], tensors[0]["name"]),
        ([tensors[0] | {"shape": [16, 8]}, *tensors[1:]], tensors[0]["name"]),
    ]
    for changed, name in cases:
        with refused("manifest_mismatch", tensors=[name]):
            opened(v8, manifest=json.dumps(good | {"tensors": changed}))


@pytest.mark.parametrize("text", ["{", "[]", '{"tensors":7}', '{"tensors":[],"format":2}'])
def test_a_manifest_that_is_none(v8: Path, text: str) -> None:
    with refused("manifest_invalid"):
        opened(v8, manifest=text)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("config.json", {"hidden_size": 16}, {"hidden_size": 32}),
        ("tokenizer.json", {"a": 1}, {"a": 2}),
        ("quantize_config.json", {"bits": 4}, {"bits": 8}),
    ],
)
def test_files_beside_the_weights_must_fit_the_manifest(v8: Path, name: str, old: object, new: object) -> None:
    (v8 / name).write_text(json.dumps(old))
    write_manifest(str(v8))
    with opened(v8) as source:
        assert source.manifest is not None
    (v8 / name).write_text(json.dumps(new))
    with refused("config_mismatch"):
        opened(v8)


@pytest.mark.case("F29")
def test_what_is_no_file_is_said_to_be_none_and_its_way_out_fits(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with refused("source_missing", files=["model.safetensors"]) as caught:
        opened(tmp_path)
    assert "coordinator" not in caught[0].hint
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "../other/model.safetensors"}}))
    with refused("source_outside_roots") as caught:
        opened(tmp_path)
    assert "--root" not in caught[0].hint


@pytest.mark.case("F29")
def test_a_folder_may_be_named_like_an_index(tmp_path: Path) -> None:
    folder = tmp_path / "weights.safetensors.index.json"
    folder.mkdir()
    HandMadeFile(payload=b"\0" * 8).entry("w", GOOD).write(folder / "model.safetensors")
    assert list(opened(folder).specs) == ["w"]
    (folder / "model.safetensors").write_bytes(b"")
    for path in (folder, folder / "model.safetensors"):
        with refused("file_truncated", files=["model.safetensors"]):
            opened(path)
