"""What loaders do to parameters, one habit per test: read off their views, traced, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn

from engine_adapter.placement.recorded.record import place as place_on
from engine_adapter.placement.recorded.record import record
from engine_adapter.placement.recorded.twin import Pairs, Twin
from engine_adapter.placement.rows import CopyRow, FillRow, Placement
from transports.testing import refused
from updater.protocol.manifest import TensorSpec

Load = Callable[["Tiny", Pairs], object]


class Tiny(nn.Module):
    """Parameters of given shapes, all on meta unless a test says otherwise."""

    def __init__(self, device: str = "meta", **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape, device=device), requires_grad=False))


def specs(dtype: str = "F32", **shapes: tuple[int, ...]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, dtype, shape) for name, shape in shapes.items()}


def twin_of(module: nn.Module, load: Load) -> Twin:
    return Twin(module, lambda pairs: load(module, pairs))  # type: ignore[arg-type]


def place(load: Load, given: Mapping[str, TensorSpec], **shapes: tuple[int, ...]) -> Placement:
    return place_on(twin_of(Tiny(**shapes), load), given, 0, 1)


def check(load: Load, given: Mapping[str, TensorSpec], **shapes: tuple[int, ...]) -> Placement:
    """The placement, after replaying it over real bytes and comparing with the loader's own work."""
    placement = place(load, given, **shapes)
    weights = {
        name: torch.arange(spec.numel, dtype=torch.float32).reshape(spec.shape) + 1000 * i
        for i, (name, spec) in enumerate(given.items())
    }
    wanted, found = Tiny("cpu", **shapes), Tiny("cpu", **shapes)
    load(wanted, iter(weights.items()))
    parameters = dict(found.named_parameters())
    for row in placement.rows:
        if isinstance(row, CopyRow):
            region = weights[row.source][row.source_box.slices()]
            region = region if row.permute is None else region.permute(row.permute)
            parameters[row.target].data[row.target_box.slices()] = region.reshape(row.target_box.size)
        elif isinstance(row, FillRow):
            parameters[row.target].data[row.target_box.slices()] = row.value
    for name, parameter in wanted.named_parameters():
        assert torch.equal(parameter, parameters[name]), name
    return placement


# plain copies


def test_a_whole_tensor() -> None:
    found = check(lambda m, pairs: [m.p.data.copy_(w) for _, w in pairs], specs(w=(3, 4)), p=(3, 4))
    assert len(found.rows) == 1
    assert found.loaded == {"w"}


def test_slices_of_both_sides() -> None:
    def load(m: Tiny, pairs: Pairs) -> None:
        for name, w in pairs:
            m.p.data.narrow(0, 0 if name == "gate" else 2, 2).copy_(w.narrow(0, 2, 2))

    assert len(check(load, specs(gate=(4, 3), up=(4, 3)), p=(4, 3)).rows) == 2


def test_a_transposed_view() -> None:
    found = check(lambda m, pairs: [m.p.data.copy_(w.t()) for _, w in pairs], specs(w=(3, 4)), p=(4, 3))
    assert [row.permute for row in found.rows if isinstance(row, CopyRow)] == [(1, 0)]


def test_dimensions_joined_and_split() -> None:
    def load(m: Tiny, pairs: Pairs) -> None:
        for _, w in pairs:
            m.p.data.copy_(w.view(2, 6, 5)[1])

    check(load, specs(w=(2, 2, 3, 5)), p=(6, 5))
    check(lambda m, pairs: [m.p.data.view(-1).copy_(w.view(-1)) for _, w in pairs], specs(w=(6, 4)), p=(3, 8))


def test_a_region_that_begins_within_a_row() -> None:
    def load(m: Tiny, pairs: Pairs) -> None:
        for _, w in pairs:
            m.p.data.copy_(w.view(-1)[3:13].view(2, 5))

    assert len(check(load, specs(w=(4, 4)), p=(2, 5)).rows) > 1


def test_interleaved_rows() -> None:
    def load(m: Tiny, pairs: Pairs) -> None:
        for name, w in pairs:
            m.p.data[0 if name == "gate" else 1 :: 2].copy_(w)

    assert len(check(load, specs(gate=(3, 2), up=(3, 2)), p=(6, 2)).rows) == 6


def test_an_index_of_one_expert_and_a_scalar() -> None:
    def load(m: Tiny, pairs: Pairs) -> None:
        for name, w in pairs:
            if name == "scale":
                m.s.data[1] = w
            else:
                m.p.data[int(name[1:])] = w

    found = check(load, specs(e0=(2, 3), e1=(2, 3), scale=()), p=(2, 2, 3), s=(2,))
    assert found.loaded == {"e0", "e1", "scale"}


def test_a_scalar_spread_over_a_vector() -> None:
    assert len(check(lambda m, pairs: [m.p.data.fill_(1).copy_(w) for _, w in pairs], specs(w=()), p=(3,)).rows) == 4


def test_a_cast_by_the_copy() -> None:
    check(lambda m, pairs: [m.p.data.copy_(w) for _, w in pairs], specs("F16", w=(3, 4)), p=(3, 4))


@pytest.mark.parametrize("how", ["fill_", "zero_", "setitem", "zeros", "full"])
def test_padding(how: str) -> None:
    def load(m: Tiny, pairs: Pairs) -> None:
        for _, w in pairs:
            m.p.data[:3].copy_(w)
            tail = m.p.data[3:]
            if how == "fill_":
                tail.fill_(0)
            elif how == "zero_":
                tail.zero_()
            elif how == "setitem":
                m.p.data[3:] = 0.0
            elif how == "zeros":
                tail.copy_(w.new_zeros(2, 2))
            else:
                tail.copy_(torch.full((2, 2), 0.0, device=w.device))

    found = check(load, specs(w=(3, 2)), p=(5, 2))
    assert [row.value for row in found.rows if isinstance(row, FillRow)] == [0.0]


def test_a_fill_under_later_copies_and_repeated_fills() -> None:
    def load(m: Tiny, pairs: Pairs) -> None:
        m.p.data.fill_(7)
        for name, w in pairs:
            m.p.data[:2, int(name[1:])] = w
            m.p.data[2].fill_(7)

    found = check(load, specs(w0=(2,), w1=(2,)), p=(3, 2))
    assert sum(isinstance(row, FillRow) for row in found.rows) == 2


def test_a_fill_again_over_a_copy_is_not_taken_for_the_first() -> None:
    def load(m: Tiny, pairs: Pairs) -> None:
        for _, w in pairs:
            m.p.data.fill_(0)
            m.p.data.copy_(w)
            m.p.data.fill_(0)

    recording = record(twin_of(Tiny(p=(2,)), load), specs(w=(2,)))
    assert [type(row) for row in recording.rows] == [FillRow, CopyRow, FillRow]


# copies through temporaries: traced


def copying(make: Callable[[torch.Tensor], torch.Tensor]) -> Load:
    return lambda m, pairs: [m.p.data.copy_(make(w)) for _, w in pairs]


def test_a_transposed_copy() -> None:
    assert len(check(copying(lambda w: w.t().contiguous()), specs(w=(3, 4)), p=(4, 3)).rows) == 1


def test_permute_and_reshape() -> None:
    found = check(copying(lambda w: w.view(2, 2, 3, 5).transpose(1, 2).reshape(12, 5)), specs(w=(12, 5)), p=(12, 5))
    assert {row.target_box.size for row in found.rows} <= {(1, 5), (2, 5), (3, 5)}


def test_concatenated_sources() -> None:
    def load(m: Tiny, pairs: Pairs) -> None:
        held = dict(pairs)
        m.p.data.copy_(torch.cat([held["q"], held["k"], held["v"]]))

    found = check(load, specs(q=(4, 3), k=(2, 3), v=(2, 3)), p=(8, 3))
    assert [getattr(row, "source", "") for row in found.rows] == ["q", "k", "v"]


def test_one_source_in_two_temporaries() -> None:
    def load(m: Tiny, pairs: Pairs) -> None:
        held = dict(pairs)
        m.p.data.copy_(torch.cat([held["a"], held["b"]]))
        m.r.data.copy_(torch.cat([held["a"], held["c"]]))

    assert len(check(load, specs(a=(1, 2), b=(2, 2), c=(3, 2)), p=(3, 2), r=(4, 2)).rows) == 4


@pytest.mark.parametrize("make", [torch.empty, torch.zeros])
def test_stacked_in_a_buffer_of_the_loader(make: Callable[..., torch.Tensor]) -> None:
    def load(m: Tiny, pairs: Pairs) -> None:
        buffer = make(2, 3, device=m.p.device, dtype=m.p.dtype)
        for name, w in pairs:
            buffer[int(name[1:])] = w
        m.p.data.copy_(buffer)

    assert len(check(load, specs(w0=(3,), w1=(3,)), p=(2, 3)).rows) == 2


def test_an_index_by_tensor() -> None:
    found = check(copying(lambda w: w[torch.tensor([3, 0, 1])]), specs(w=(4, 2, 2)), p=(3, 2, 2))
    assert len(found.rows) <= 3


def test_a_cast_and_flipped_rows() -> None:
    check(copying(lambda w: w.flip(0).to(torch.float32)), specs("BF16", w=(3, 2)), p=(3, 2))


def test_index_put() -> None:
    def load(m: Tiny, pairs: Pairs) -> None:
        for _, w in pairs:
            m.p.data[torch.tensor([2, 0])] = w
            m.p.data[1].fill_(5)

    found = check(load, specs(w=(2, 3)), p=(3, 3))
    assert sum(isinstance(row, FillRow) and row.value == 5.0 for row in found.rows) == 1


def test_out_argument_and_foreach() -> None:
    def load(m: Tiny, pairs: Pairs) -> None:
        held = dict(pairs)
        torch.cat([held["a"], held["b"]], out=m.p.data)
        torch._foreach_copy_([m.r.data], [held["c"]])

    check(load, specs(a=(1, 2), b=(1, 2), c=(2,)), p=(2, 2), r=(2,))


# computed: refused


COMPUTED: dict[str, Load] = {
    "negative exponential": copying(lambda w: -torch.exp(w)),
    "plus one": copying(lambda w: w + 1),
    "absolute": copying(torch.abs),
    "maximum": copying(lambda w: w.clamp(min=0)),
    "sorted": copying(lambda w: w.flatten().sort().values.view(w.shape)),
    "mean of two rows": copying(lambda w: (w + w.flip(0)) / 2),
    "scaled": copying(lambda w: w * 0.5),
    "narrowed on the way": copying(lambda w: w.to(torch.float8_e4m3fn)),
    "bytes": copying(lambda w: w.view(torch.int32)),
    "an element twice": copying(lambda w: w[:1].repeat(3, 1).contiguous()),
    "added": lambda m, pairs: [m.p.data.add_(w) for _, w in pairs],
    "first copied, then composed": lambda m, pairs: [m.p.data.copy_(m.p.data.copy_(w) * 2) for _, w in pairs],
    "another storage": lambda m, pairs: [setattr(m.p, "data", w) for _, w in pairs],
    "another parameter": lambda m, pairs: [setattr(m, "p", nn.Parameter(w, requires_grad=False)) for _, w in pairs],
    "random": lambda m, pairs: [m.p.data.normal_() for _, w in pairs],
}


@pytest.mark.parametrize("how", sorted(COMPUTED))
def test_computed_parameters_are_refused_by_name(how: str) -> None:
    with refused("placement_refused", tensors=["p"]):
        place(COMPUTED[how], specs(w=(3, 4)), p=(3, 4))


DATA_DEPENDENT: dict[str, Load] = {
    "item": lambda m, pairs: [m.p.data.fill_(w.item()) for _, w in pairs],
    "branch": lambda m, pairs: [m.p.data.copy_(w) for _, w in pairs if w[0] != 1],
    "equal": lambda m, pairs: [m.p.data.copy_(w) for _, w in pairs if not torch.equal(w, m.p)],
}


@pytest.mark.parametrize("how", sorted(DATA_DEPENDENT))
def test_a_loader_that_decides_by_values_is_refused(how: str) -> None:
    with refused("placement_refused", tensors=["w"]):
        place(DATA_DEPENDENT[how], specs(w=(1,)), p=(1,))


def test_a_view_of_another_dtype_of_a_parameter() -> None:
    def load(m: Tiny, pairs: Pairs) -> None:
        for _, w in pairs:
            m.p.data.view(torch.int32).copy_(w)

    with refused("placement_refused", tensors=["p"]):
        place(load, specs("I32", w=(3,)), p=(3,))


def test_a_parameter_that_its_loader_materialises() -> None:
    module = nn.LazyLinear(3, bias=False)
    with refused("placement_refused", tensors=["weight"]):
        place_on(Twin(module, lambda pairs: None), specs(w=(3, 4)), 0, 1)


# what a loader may not touch, and what it leaves behind


def test_real_memory_outside_the_twin_stays_as_it_is() -> None:
    shared = torch.zeros(3)

    def load(m: Tiny, pairs: Pairs) -> None:
        shared.fill_(1)
        for _, w in pairs:
            m.p.data.copy_(w)

    with refused("placement_refused"):
        place(load, specs(w=(3,)), p=(3,))
    assert not shared.any()


def test_real_memory_outside_the_twin_also_while_tracing() -> None:
    shared = torch.zeros(3)

    def load(m: Tiny, pairs: Pairs) -> None:
        for _, w in pairs:
            if not w.is_meta:
                shared.fill_(1)
            m.p.data.copy_(w.flip(0))

    with refused("placement_refused"):
        place(load, specs(w=(3,)), p=(3,))
    assert not shared.any()


def test_the_twin_is_as_before() -> None:
    def load(m: Tiny, pairs: Pairs) -> None:
        m.loads = getattr(m, "loads", 0) + 1  # type: ignore[assignment]
        for _, w in pairs:
            m.p.data = w
            m.q = nn.Parameter(w, requires_grad=False)
            m.r.extra = 3
            m.r.data.copy_(w.flip(0))

    module = Tiny(p=(3,), q=(3,), r=(3,))
    held = dict(module.named_parameters())
    storages = {name: p.untyped_storage()._cdata for name, p in held.items()}
    twin = twin_of(module, load)
    with refused("placement_refused", tensors=["p", "q"]):
        place_on(twin, specs(w=(3,)), 0, 1)
    assert dict(module.named_parameters()) == held
    assert {name: p.untyped_storage()._cdata for name, p in held.items()} == storages
    assert not hasattr(module, "loads")
    assert not hasattr(module.r, "extra")
