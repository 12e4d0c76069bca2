"""On a CUDA device: digests and scans as on the CPU, spares that flip and trade, files read into device memory, and a
whole update of two ranks that share the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine_adapter.base import Parameter
from engine_adapter.rank.exchange import raw_bytes
from engine_adapter.rank.messages import RankAudit, RankDigests, RankStatus
from engine_adapter.rank.spare import RankSpare
from engine_adapter.testing.bare import BareEngine, BareReplica
from engine_adapter.testing.small_models import Tensors, checkpoint, rules, sliced
from transports.base import Box, Read
from transports.digest import add, region_digest, tensor_digest, to_hex
from transports.disk.manifests import write_manifest
from transports.disk.source import DiskSource
from transports.dtypes import DTYPE_NAMES, TORCH_DTYPES, carrier
from transports.scans import is_zero, nonfinite
from transports.testing import refused, write_sharded
from transports.testing.source_contract import noise
from updater.core.policy import InstallMode

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda")
MODES = (InstallMode.FLIP, InstallMode.EXCHANGE)


def random_bytes(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """On the CPU; any bit pattern, also those of NaN. The last dimension counts elements of `dtype`."""
    size = torch.empty(0, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes on the device, by way of an integer type: not every dtype can be copied as itself."""
    return tensor.view(carrier(tensor.element_size())).to(DEVICE).view(tensor.dtype)


def same(here: torch.Tensor, there: torch.Tensor) -> bool:
    """Bytewise, wherever each lies."""
    kind = carrier(here.element_size())
    return torch.equal(here.contiguous().view(kind).cpu(), there.contiguous().view(kind).cpu())


# digests and scans


@pytest.mark.parametrize("name", sorted(TORCH_DTYPES))
@pytest.mark.parametrize("shape", [(1,), (9,), (5, 7), (3, 6, 70), (300, 1030), (4, 3, 2, 2)])
def test_a_digest_is_that_of_the_cpu(name: str, shape: tuple[int, ...]) -> None:
    tensor = random_bytes(TORCH_DTYPES[name], shape)
    there = moved(tensor)
    assert there.device.type == DEVICE.type
    items = tensor.view(carrier(tensor.element_size()))
    assert tensor_digest(moved(items)) == tensor_digest(items)
    if name != "F4":  # its shape counts halves of a byte
        assert tensor_digest(there) == tensor_digest(tensor)


@pytest.mark.parametrize("name", ["BF16", "F8_E4M3", "F32", "I64"])
def test_digests_of_device_regions_add_up_to_that_of_the_whole_on_the_cpu(name: str) -> None:
    tensor = random_bytes(TORCH_DTYPES[name], (37, 29))
    there, total = moved(tensor), 0
    for top, rows in ((0, 11), (11, 26)):
        for left, columns in ((0, 3), (3, 26)):
            box = Box((top, left), (rows, columns))
            total = add(total, region_digest(there[box.slices()], (37, 29), name, box))
    assert total == tensor_digest(tensor)
    assert region_digest(there.t().contiguous().t(), (37, 29), name, Box.whole((37, 29))) == tensor_digest(tensor)


@pytest.mark.parametrize("shape", [(1_300_001,), (300_000, 3), (3, 700_000)])
def test_a_digest_over_many_tiles_is_that_of_the_cpu(shape: tuple[int, ...]) -> None:
    tensor = random_bytes(torch.bfloat16, shape)
    assert tensor_digest(moved(tensor)) == tensor_digest(tensor)


def test_one_flipped_bit_on_the_device_changes_the_digest() -> None:
    there = moved(random_bytes(torch.bfloat16, (64, 64)))
    before = tensor_digest(there)
    there.view(torch.int16)[40, 3] ^= 1
    assert tensor_digest(there) != before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_scans_see_one_bad_element(dtype: torch.dtype) -> None:
    there = torch.zeros(3, 1 << 19, dtype=dtype, device=DEVICE)
    assert (nonfinite(there), is_zero(there)) == (False, True)
    there[2, 77] = 1
    assert (nonfinite(there), is_zero(there)) == (False, False)
    for value in (float("nan"), float("inf"), float("-inf")):
        there[1, 12345] = value
        assert nonfinite(there)


# the spare


class Model:
    """Parameters on the device, and what a forward pass would read."""

    def __init__(self) -> None:
        made = {
            "a": moved(random_bytes(torch.bfloat16, (300, 70), 1)),
            "b": moved(random_bytes(torch.float32, (5,), 2)),
            "c": moved(random_bytes(torch.float8_e4m3fn, (33, 9), 3)),
            "t": moved(random_bytes(torch.bfloat16, (40, 30), 4)).t(),
            "gaps": moved(random_bytes(torch.int16, (8, 12), 5))[:, :7],
            "empty": torch.empty(0, 3, device=DEVICE),
        }
        self.bound = dict(made)
        self.parameters = {name: Parameter(name, t, partial(self.bound.__setitem__, name)) for name, t in made.items()}

    def bytes(self) -> dict[str, torch.Tensor]:
        """Copies of the live bytes, on the CPU."""
        return {name: t.contiguous().view(carrier(t.element_size())).cpu().clone() for name, t in self.bound.items()}

    def addresses(self) -> dict[str, int]:
        return {name: t.data_ptr() for name, t in self.bound.items()}


def filled(spare: RankSpare, seed: int) -> dict[str, torch.Tensor]:
    """Write noise into the spare; what was written, on the CPU."""
    wrote = {}
    for name, tensor in spare.spare.items():
        values = random_bytes(tensor.dtype, tuple(tensor.shape), seed)
        kind = carrier(tensor.element_size())
        tensor.view(kind).copy_(values.view(kind))
        wrote[name] = values.view(kind)
    return wrote


def equal(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_spare_lies_on_the_device_and_looks_like_what_is_live() -> None:
    model = Model()
    before = torch.cuda.memory_allocated(DEVICE)
    spare = RankSpare(model.parameters)
    assert spare.nbytes <= torch.cuda.memory_allocated(DEVICE) - before <= spare.nbytes + (2 << 20)
    for name, live in spare.live.items():
        other = spare.spare[name]
        assert (other.shape, other.stride(), other.dtype, other.device) == (
            live.shape,
            live.stride(),
            live.dtype,
            live.device,
        )
    assert not spare.asleep


@pytest.mark.parametrize("mode", MODES)
def test_install_undo_install_and_back(mode: InstallMode) -> None:
    model = Model()
    spare = RankSpare(model.parameters, chunk_bytes=1 << 10)
    old, addresses, new = model.bytes(), model.addresses(), filled(spare, 9)
    spare.install(mode)
    assert equal(model.bytes(), new)
    assert (model.addresses() == addresses) is (mode is InstallMode.EXCHANGE)
    spare.undo()
    assert equal(model.bytes(), old)
    assert model.addresses() == addresses
    for wanted in (new, old, new):
        spare.install(mode)
        spare.settle()
        assert equal(model.bytes(), wanted)


class Interrupted(Exception):
    pass


class FailAt(TorchDispatchMode):
    """The n-th copy raises before it did anything."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.left = n

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            if self.left == 0:
                raise Interrupted
            self.left -= 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("at", [0, 1, 2, 10, 11, 30])
def test_an_exchange_that_was_interrupted_is_taken_back(at: int) -> None:
    model = Model()
    spare = RankSpare(model.parameters, chunk_bytes=1 << 10)
    old, new = model.bytes(), filled(spare, 9)
    with pytest.raises(Interrupted), FailAt(at):
        spare.install(InstallMode.EXCHANGE)
    assert not equal(model.bytes(), new)
    spare.undo()
    assert equal(model.bytes(), old)
    spare.install(InstallMode.EXCHANGE)
    assert equal(model.bytes(), new)


@pytest.mark.case("B081")
def test_a_captured_graph_computes_with_the_weights_that_were_exchanged_in() -> None:
    """Why `exchange` exists: a graph keeps the addresses that it was captured with, derived matrices' too."""
    weight = torch.full((1 << 8, 1 << 8), 2.0, device=DEVICE)
    bound = {"w": weight, "derived": (weight * 4).t().contiguous()}
    out, graph = torch.empty_like(weight), torch.cuda.CUDAGraph()

    def forward() -> None:
        torch.add(bound["w"], bound["derived"], out=out)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        forward()
    addresses = {name: tensor.data_ptr() for name, tensor in bound.items()}
    spare = RankSpare(
        {name: Parameter(name, tensor, partial(bound.__setitem__, name)) for name, tensor in bound.items()}
    )
    spare.spare["w"].fill_(3.0)
    spare.spare["derived"].fill_(12.0)

    def replays(wanted: float) -> None:
        graph.replay()
        torch.cuda.synchronize()
        assert bool((out == wanted).all())
        assert {name: tensor.data_ptr() for name, tensor in bound.items()} == addresses

    replays(10.0)
    spare.install(InstallMode.EXCHANGE)
    replays(15.0)
    spare.undo()
    replays(10.0)


# files into device memory


def test_files_are_read_into_device_tensors_whole_in_slices_and_permuted(tmp_path: Path) -> None:
    names = [name for name in sorted(TORCH_DTYPES) if name != "F4"]
    tensors = {name.lower(): noise(name, (96, 80), at) for at, name in enumerate(names)}
    write_sharded(tmp_path, [dict(list(tensors.items())[:7]), dict(list(tensors.items())[7:])])
    with DiskSource.open(str(tmp_path), (str(tmp_path),)) as source:
        for box, permute in (
            (Box.whole((96, 80)), None),
            (Box((5, 0), (40, 80)), None),
            (Box((0, 3), (96, 17)), None),
            (Box((7, 9), (32, 64)), (1, 0)),
        ):
            shape = box.size if permute is None else tuple(box.size[dim] for dim in permute)
            here = {name: torch.empty(shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
            there = {name: torch.empty(shape, dtype=t.dtype, device=DEVICE) for name, t in tensors.items()}
            for targets in (here, there):
                source.read([Read(name, box, target, permute) for name, target in targets.items()])
            for name, tensor in tensors.items():
                cut = tensor.view(carrier(tensor.element_size()))[box.slices()]
                wanted = (cut if permute is None else cut.permute(permute)).contiguous()
                assert same(here[name], wanted.view(tensor.dtype))
                assert same(there[name], wanted.view(tensor.dtype))


def test_a_read_widens_on_its_way_to_the_device(tmp_path: Path) -> None:
    tensor = torch.randn(64, 48).to(torch.bfloat16)
    write_sharded(tmp_path, [{"t": tensor}])
    target = torch.empty(64, 48, device=DEVICE)
    with DiskSource.open(str(tmp_path), (str(tmp_path),)) as source:
        source.read([Read("t", Box.whole((64, 48)), target)])
    assert torch.equal(target.cpu(), tensor.float())


# one update, end to end


class Ranks:
    """Two ranks of the small model on one device, reading a folder."""

    size = 2

    def __init__(self, home: Path, start: Tensors) -> None:
        self.home, self.folder = home, home
        engines = []
        for rank in range(self.size):
            local = sliced(start, rank, self.size)
            with DEVICE:
                engine = BareEngine({name: tuple(t.shape) for name, t in local.items()}, rules(), rank, self.size)
            for name, tensor in local.items():
                engine.bound[name].copy_(tensor)
            engines.append(engine)
        self.replica = BareReplica(engines, self._open)

    def _open(self, _rank: int) -> DiskSource:
        return DiskSource.open(str(self.folder), (str(self.home),))

    def offer(self, name: str, tensors: Tensors) -> Path:
        """What the ranks read from now on, with the manifest of these tensors."""
        self.folder = self.home / name
        names = list(tensors)
        write_sharded(self.folder, [{n: tensors[n] for n in names[::2]}, {n: tensors[n] for n in names[1::2]}])
        write_manifest(str(self.folder))
        return self.folder

    def holds(self, tensors: Tensors) -> bool:
        for rank, engine in enumerate(self.replica.engines):
            local = sliced(tensors, rank, self.size)
            if not all(t.device.type == DEVICE.type and same(t, local[name]) for name, t in engine.bound.items()):
                return False
            told = self.replica.agents[rank].digests(RankDigests()).digests
            if {each.name: each.digest for each in told} != {n: to_hex(tensor_digest(t)) for n, t in local.items()}:
                return False
        return True


@pytest.mark.parametrize("mode", MODES)
def test_an_update_a_refusal_and_a_rollback_on_the_device(tmp_path: Path, mode: InstallMode) -> None:
    start, new = checkpoint(1), checkpoint(2)
    ranks = Ranks(tmp_path, start)
    assert ranks.holds(start)
    ranks.offer("new", new)
    voted = ranks.replica.update(1, "0-1", mode)
    assert (voted.proof, ranks.holds(new)) == ("digests", True)
    assert all(not agent.audit(RankAudit("live")).mismatched for agent in ranks.replica.agents)

    ranks.replica.check_previous(2, "start", "")
    ranks.replica.switch(2, "start", "", mode)
    assert ranks.holds(start)

    spoilt = {name: tensor.clone() for name, tensor in checkpoint(3).items()}
    folder = ranks.offer("spoilt", spoilt)
    name = "l.attn.o_proj.weight"
    spoilt[name].view(torch.int16)[2, 3] ^= 1
    names = list(spoilt)
    write_sharded(folder, [{n: spoilt[n] for n in names[::2]}, {n: spoilt[n] for n in names[1::2]}])
    with refused("tensor_digest", tensors=[name]):
        ranks.replica.update(3, "0-3", mode)
    assert ranks.holds(start)
    assert {agent.status(RankStatus()).spare_state for agent in ranks.replica.agents} == {"empty"}

    ranks.offer("again", new)
    ranks.replica.update(4, "0-4", mode)
    assert ranks.holds(new)


def test_later_updates_take_no_more_device_memory(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, checkpoint(1))
    after = []
    for serial in range(1, 5):
        ranks.offer(f"v{serial}", checkpoint(serial + 1))
        ranks.replica.update(serial, f"0-{serial}", MODES[serial % 2])
        torch.cuda.synchronize()
        after.append(torch.cuda.memory_allocated(DEVICE))
    assert after[1:] == after[:1] * 3


def test_bytes_of_a_dense_device_tensor_are_a_view_of_its_memory() -> None:
    tensor = torch.zeros(6, 4, dtype=torch.bfloat16, device=DEVICE).t()
    raw_bytes(tensor).fill_(0xFF)
    assert DTYPE_NAMES[tensor.dtype] == "BF16"
    assert bool(tensor.isnan().all())
