"""Cutting, packing and scattering, without a wire between them."""

from __future__ import annotations

from collections import defaultdict
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transports.base import Box, Cancelled, Read
from transports.buckets import ALIGN, SMALLEST_BUCKET, Bucket, Chunk, StreamPlan
from transports.digest import tensor_digest
from transports.dtypes import DTYPE_NAMES, TORCH_DTYPES, byte_shape, is_packed, itemsize
from transports.stream import StreamSource, pack
from transports.stream.source import Scatter
from transports.testing import refused
from transports.testing.source_contract import digests, noise
from transports.testing.transfer import manifest_of, specs_of, targets_of
from updater.protocol import wire
from updater.protocol.manifest import DTYPE_BITS, TensorSpec

PLAIN = sorted(name for name in TORCH_DTYPES if not is_packed(name))
PACKED = sorted(name for name, bits in DTYPE_BITS.items() if bits < 8)

shapes = st.lists(st.integers(0, 24), max_size=4).map(tuple).filter(lambda shape: prod(shape) <= 30_000)


@st.composite
def plans(draw: st.DrawFn) -> StreamPlan:
    """Any dtypes and shapes, buckets from the smallest allowed on, so that most tensors are split."""
    dtypes = st.sampled_from(PLAIN + PACKED)
    count = draw(st.integers(0, 6))
    specs = tuple(TensorSpec(f"t{at}", draw(dtypes), draw(shapes)) for at in range(count))
    return StreamPlan(specs, draw(st.integers(SMALLEST_BUCKET, 9000)))


def tensors_of(plan: StreamPlan, seed: int) -> dict[str, torch.Tensor]:
    """As a trainer holds them: packed types as bytes."""
    found = {}
    for at, spec in enumerate(plan.tensors):
        shape = byte_shape(spec.shape, spec.dtype)
        found[spec.name] = noise("U8" if is_packed(spec.dtype) else spec.dtype, shape, seed + at)
    return found


def deliver(plan: StreamPlan, tensors: dict[str, torch.Tensor], scatter: Scatter) -> None:
    """Through one buffer that is spoilt after every bucket."""
    specs = {spec.name: spec for spec in plan.tensors}
    buffer = torch.empty(plan.room, dtype=torch.uint8)
    for bucket in plan.buckets:
        buffer.fill_(0xAB)
        pack(bucket, buffer, tensors, specs)
        for chunk in bucket.chunks:
            scatter.take(chunk, buffer[chunk.offset : chunk.offset + chunk.nbytes])


@settings(max_examples=150)
@given(plans())
def test_every_byte_is_in_exactly_one_chunk(plan: StreamPlan) -> None:
    plan.check()
    covered = {spec.name: torch.zeros(byte_shape(spec.shape, spec.dtype), dtype=torch.int32) for spec in plan.tensors}
    for chunk in (chunk for bucket in plan.buckets for chunk in bucket.chunks):
        covered[chunk.name][chunk.box.slices()] += 1
    assert all(bool((seen == 1).all()) for seen in covered.values())


@settings(max_examples=150)
@given(plans())
def test_buckets_keep_their_limit_and_chunks_keep_apart(plan: StreamPlan) -> None:
    specs = {spec.name: spec for spec in plan.tensors}
    assert [bucket.index for bucket in plan.buckets] == list(range(len(plan.buckets)))
    for bucket in plan.buckets:
        end = 0
        for chunk in bucket.chunks:
            assert chunk.offset % ALIGN == 0
            assert end <= chunk.offset < end + ALIGN
            assert chunk.nbytes == chunk.box.numel * itemsize(specs[chunk.name].dtype) > 0
            end = chunk.offset + chunk.nbytes
        assert bucket.nbytes == end <= plan.bucket_bytes


@settings(max_examples=150)
@given(plans())
def test_chunks_are_contiguous_and_in_order(plan: StreamPlan) -> None:
    """A chunk is one run of its tensor's row-major elements, right behind the one before."""
    specs, next_element = {spec.name: spec for spec in plan.tensors}, defaultdict(int)
    for chunk in (chunk for bucket in plan.buckets for chunk in bucket.chunks):
        shape = byte_shape(specs[chunk.name].shape, specs[chunk.name].dtype)
        numbers = torch.arange(prod(shape)).reshape(shape)[chunk.box.slices()].reshape(-1)
        first = next_element[chunk.name]
        assert torch.equal(numbers, torch.arange(first, first + numel(chunk)))
        next_element[chunk.name] += numel(chunk)


def numel(chunk: Chunk) -> int:
    return chunk.box.numel


@settings(max_examples=100)
@given(plans())
def test_both_sides_cut_alike(plan: StreamPlan) -> None:
    other = wire.decode(StreamPlan, wire.encode(plan))
    assert other.buckets == plan.buckets
    assert other.digest == plan.digest


def test_another_order_size_or_limit_is_another_digest() -> None:
    one, two = TensorSpec("a", "BF16", (40, 40)), TensorSpec("b", "F16", (40, 40))
    plan = StreamPlan((one, two), 2048)
    others = [
        StreamPlan((two, one), 2048),
        StreamPlan((one, two), 2049),
        StreamPlan((one, TensorSpec("b", "BF16", (40, 40))), 2048),
        StreamPlan((one, TensorSpec("b", "F16", (1600,))), 2048),
        StreamPlan((one,), 2048),
    ]
    assert len({each.digest for each in (plan, *others)}) == 6


@settings(max_examples=100)
@given(plans(), st.integers(0, 1000))
def test_cut_packed_and_scattered_gives_back_the_bytes(plan: StreamPlan, seed: int) -> None:
    tensors = tensors_of(plan, seed)
    specs = {spec.name: spec for spec in plan.tensors}
    arrived = targets_of({name: TensorSpec(name, DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()})
    reads = [Read(name, Box.whole(specs[name].shape), tensor) for name, tensor in arrived.items()]
    scatter = Scatter(specs, reads, watch=specs)
    deliver(plan, tensors, scatter)
    scatter.check_complete()
    assert digests(arrived) == digests(tensors)
    assert scatter.delivered == sum(spec.nbytes for spec in plan.tensors)
    for spec in plan.tensors:
        assert scatter.digest_of(spec.name) == tensor_digest(tensors[spec.name])


@settings(max_examples=100)
@given(st.data())
def test_regions_permuted_and_cast_into_strided_targets(data: st.DataObject) -> None:
    """Any region, permuted, cast, with size-one dimensions put in or left out, lands where indexing says."""
    shape = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4).map(tuple))
    starts = [data.draw(st.integers(0, size - 1)) for size in shape]
    sizes = [data.draw(st.integers(1, size - start)) for size, start in zip(shape, starts, strict=True)]
    box = Box(tuple(starts), tuple(sizes))
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    tensor = noise("BF16", shape, 5).nan_to_num()
    region = tensor[box.slices()].permute(order)
    want = data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
    room = torch.full([2 * size for size in region.shape], 7.0, dtype=want)
    target = room[tuple(slice(None, None, 2) for _ in region.shape)]
    if data.draw(st.booleans()):
        target = target.unsqueeze(0)
    plan = StreamPlan(specs_of({"t": tensor}), 1024)
    scatter = Scatter({"t": plan.tensors[0]}, [Read("t", box, target, order)])
    deliver(plan, {"t": tensor}, scatter)
    assert torch.equal(target.reshape(region.shape), region.to(want))
    assert int((room == 7.0).sum()) >= room.numel() - region.numel()


@pytest.mark.case("B102")
def test_a_tensor_and_a_row_larger_than_the_bucket() -> None:
    """Buckets of 4 KiB, an embedding of 8,224 bytes, a matrix with rows of 10,000 bytes."""
    tensors = {"embed": noise("BF16", (257, 16), 1), "wide": noise("BF16", (3, 5000), 2), "scalar": noise("F32", (), 3)}
    plan = StreamPlan(specs_of(tensors), 4096)
    assert len(plan.buckets) > 9
    arrived = targets_of({spec.name: spec for spec in plan.tensors})
    reads = [Read(name, Box.whole(t.shape), t) for name, t in arrived.items()]
    scatter = Scatter({spec.name: spec for spec in plan.tensors}, reads)
    deliver(plan, tensors, scatter)
    assert digests(arrived) == digests(tensors)


def test_small_tensors_share_a_bucket_and_a_large_one_fills_what_is_left() -> None:
    specs = tuple(TensorSpec(f"n{at}", "BF16", (8,)) for at in range(3))
    plan = StreamPlan((*specs, TensorSpec("w", "BF16", (100, 32))), 4096)
    first, *rest = plan.buckets
    assert [chunk.name for chunk in first.chunks] == ["n0", "n1", "n2", "w"]
    assert first.nbytes > 4096 - 64
    assert [[chunk.name for chunk in bucket.chunks] for bucket in rest] == [["w"]]


@pytest.mark.parametrize(
    "plan",
    [
        StreamPlan((), SMALLEST_BUCKET - 1),
        StreamPlan((TensorSpec("a", "BF16", (1,)), TensorSpec("a", "BF16", (1,)))),
        StreamPlan((TensorSpec("a", "F7", (1,)),)),
        StreamPlan((TensorSpec("a", "BF16", (2, -1)),)),
    ],
)
def test_plans_that_make_no_sense(plan: StreamPlan) -> None:
    with pytest.raises(wire.WireError):
        plan.check()


class TestScatter:
    spec = TensorSpec("t", "F32", (4, 64))

    def chunks(self) -> tuple[Chunk, ...]:
        plan = StreamPlan((TensorSpec("u", "F32", (8, 64)), self.spec), 1024)
        return tuple(chunk for bucket in plan.buckets for chunk in bucket.chunks)

    def scatter(self) -> Scatter:
        return Scatter({"u": TensorSpec("u", "F32", (8, 64)), "t": self.spec}, [])

    def test_what_did_not_come_is_named(self) -> None:
        scatter, chunks = self.scatter(), self.chunks()
        scatter.take(chunks[0], torch.zeros(chunks[0].nbytes, dtype=torch.uint8))
        with refused("tensor_missing", tensors=["u", "t"]):
            scatter.check_complete()

    def test_a_region_twice_is_refused(self) -> None:
        scatter, chunks = self.scatter(), self.chunks()
        data = torch.zeros(chunks[0].nbytes, dtype=torch.uint8)
        scatter.take(chunks[0], data)
        with refused("stream_mismatch", tensors=["u"]):
            scatter.take(chunks[0], data)

    def test_a_region_too_early_is_refused(self) -> None:
        scatter, chunks = self.scatter(), self.chunks()
        with refused("stream_mismatch", tensors=["u"]):
            scatter.take(chunks[1], torch.zeros(chunks[1].nbytes, dtype=torch.uint8))

    @pytest.mark.case("B109")
    def test_each_stage_takes_its_own(self) -> None:
        """Everybody is sent everything; nobody holds more than what it reads."""
        tensors = {name: noise("BF16", (16, 64), at) for at, name in enumerate(("embed", "0", "1", "head"))}
        plan = StreamPlan(specs_of(tensors), 2048)
        specs = {spec.name: spec for spec in plan.tensors}
        for mine in (("embed", "0"), ("1", "head")):
            arrived = targets_of({name: specs[name] for name in mine})
            reads = [Read(name, Box.whole(t.shape), t) for name, t in arrived.items()]
            scatter = Scatter(specs, reads)
            deliver(plan, tensors, scatter)
            scatter.check_complete()
            assert digests(arrived) == digests({name: tensors[name] for name in mine})
            assert scatter.delivered == sum(specs[name].nbytes for name in mine)

    def test_reads_are_checked_before_a_byte_comes(self) -> None:
        target = torch.zeros(4, 64)
        for read, code in (
            (Read("v", Box.whole((4, 64)), target), "tensor_missing"),
            (Read("t", Box((1, 0), (4, 64)), target), "tensor_shape"),
            (Read("t", Box.whole((4, 64)), target, (1, 1)), "tensor_shape"),
        ):
            with refused(code):
                Scatter({"t": self.spec}, [read])

    def test_a_digest_of_what_is_not_whole(self) -> None:
        scatter = Scatter({"t": self.spec}, [], watch=["t", "elsewhere"])
        assert scatter.digest_of("t") is None
        assert scatter.digest_of("elsewhere") is None
        assert scatter.digest_of("unwatched") is None


class TestPack:
    def packed(self, spec: TensorSpec, tensor: torch.Tensor) -> torch.Tensor:
        plan = StreamPlan((spec,), 4096)
        buffer = torch.zeros(plan.room, dtype=torch.uint8)
        pack(plan.buckets[0], buffer, {spec.name: tensor}, {spec.name: spec})
        return buffer

    @pytest.mark.case("B100")
    def test_strided_and_transposed(self) -> None:
        """The elements that a view shows, in their order."""
        base = noise("BF16", (24, 16), 1)
        for view in (base[:, 2:7], base.t(), base[::3], base[:1].expand(5, 16), base.view(6, 4, 16).permute(2, 0, 1)):
            spec = TensorSpec("t", "BF16", tuple(view.shape))
            assert torch.equal(self.packed(spec, view), view.contiguous().view(torch.uint8).reshape(-1))

    def test_conjugate_views(self) -> None:
        tensor = torch.randn(3, 4, dtype=torch.complex64).conj()
        found = self.packed(TensorSpec("t", "C64", (3, 4)), tensor)
        assert torch.equal(found.view(torch.complex64).view(3, 4), tensor.resolve_conj())

    def test_parameters(self) -> None:
        found = self.packed(TensorSpec("t", "F32", (2,)), torch.nn.Parameter(torch.ones(2)))
        assert torch.equal(found.view(torch.float32), torch.ones(2))

    @pytest.mark.parametrize(
        ("spec", "tensor", "code"),
        [
            (TensorSpec("t", "BF16", (4, 4)), torch.empty(0, dtype=torch.bfloat16), "tensor_shape"),
            (TensorSpec("t", "F8_E4M3", (4, 6)), noise("F8_E4M3", (6, 4), 1), "tensor_shape"),
            (TensorSpec("t", "BF16", (4, 4)), torch.ones(4, 4, dtype=torch.float16), "tensor_dtype"),
            (TensorSpec("t", "F32", (4, 4)), torch.ones(4, 4, dtype=torch.int32), "tensor_dtype"),
            (TensorSpec("t", "F4", (4, 4)), torch.ones(9, dtype=torch.uint8), "tensor_shape"),
            (TensorSpec("t", "F4", (4, 4)), torch.ones(8, dtype=torch.int8), "tensor_dtype"),
        ],
    )
    def test_a_tensor_that_is_not_what_was_announced(self, spec: TensorSpec, tensor: torch.Tensor, code: str) -> None:
        with refused(code, tensors=["t"]):
            self.packed(spec, tensor)

    def test_a_tensor_that_is_not_there(self) -> None:
        plan = StreamPlan((TensorSpec("t", "F32", (2,)),))
        with refused("tensor_missing", tensors=["t"]):
            pack(plan.buckets[0], torch.zeros(plan.room, dtype=torch.uint8), {}, {"t": plan.tensors[0]})


class Scripted:
    """A receiver without a sender: shows a plan, and hands out zeros for it."""

    def __init__(self, plan: StreamPlan, leave_out: int = 0) -> None:
        self.plan, self.leave_out = plan, leave_out
        self.closed: list[bool] = []

    def receive(self, expected, take, progress, should_stop) -> int:  # type: ignore[no-untyped-def]
        expected(self.plan)
        buckets: tuple[Bucket, ...] = self.plan.buckets[: len(self.plan.buckets) - self.leave_out]
        for bucket in buckets:
            for chunk in bucket.chunks:
                take(chunk, torch.zeros(chunk.nbytes, dtype=torch.uint8))
            progress(bucket.nbytes)
        return sum(bucket.nbytes for bucket in buckets)

    def close(self, *, normal: bool) -> None:
        self.closed.append(normal)


class TestSource:
    specs = (TensorSpec("a", "F32", (8, 64)), TensorSpec("b", "F32", (8, 64)))

    def test_a_stream_comes_once(self) -> None:
        receiver = Scripted(StreamPlan(self.specs, 1024))
        source = StreamSource("x", manifest_of(self.specs), receiver)
        source.read([])
        with refused("read_failed"):
            source.read([])
        source.close()
        source.close()
        assert receiver.closed == [True]

    @pytest.mark.case("B105")
    def test_a_receiver_that_brings_nothing(self) -> None:
        """It says that all is well, and what it left out is named."""
        receiver = Scripted(StreamPlan(self.specs, 1024), leave_out=2)
        source = StreamSource("x", manifest_of(self.specs), receiver)
        with refused("tensor_missing", tensors=["b"]):
            source.read([])
        source.close()
        assert receiver.closed == [False]

    def test_what_was_not_read_did_not_end_well(self) -> None:
        receiver = Scripted(StreamPlan(self.specs, 1024))
        StreamSource("x", manifest_of(self.specs), receiver).close()
        assert receiver.closed == [False]

    def test_stopped_before_it_began(self) -> None:
        source = StreamSource("x", manifest_of(self.specs), Scripted(StreamPlan(self.specs, 1024)))
        with pytest.raises(Cancelled):
            source.read([], should_stop=lambda: True)

    def test_watched_tensors_are_digested_as_they_pass(self) -> None:
        source = StreamSource("x", manifest_of(self.specs), Scripted(StreamPlan(self.specs, 1024)))
        source.watch(["b"])
        with refused("tensor_missing", tensors=["b"]):
            source.arrived("b")
        source.read([])
        assert source.arrived("b") == tensor_digest(torch.zeros(8, 64))

    def test_every_difference_between_plan_and_manifest_is_named(self) -> None:
        other = (TensorSpec("a", "BF16", (8, 64)), TensorSpec("c", "F32", (1,)))
        source = StreamSource("x", manifest_of(self.specs), Scripted(StreamPlan(other, 1024)))
        with refused("stream_mismatch", tensors=["a", "b", "c"]):
            source.read([])
