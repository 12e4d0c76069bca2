"""State dicts and modules of one process as sources: names, ties, dtypes, buffers, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import UninitializedParameter

from trainer_side.sources import as_source
from trainer_side.sources.casts import cast
from trainer_side.sources.source import WeightSource
from transports.digest import tensor_digest, to_hex
from updater.core.errors import Rejected

EMBED, HEAD, ROUTER = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight"


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(6, 3, bias=False)
        self.up = torch.nn.Linear(6, 6, dtype=torch.bfloat16)
        self.register_buffer("seen", torch.tensor(7))
        self.register_buffer("table", torch.zeros(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x.to(torch.bfloat16)).to(x.dtype) * self.gate(x).sum()


class Model(torch.nn.Module):
    """A tied head, a float32 router, a bfloat16 layer, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = torch.nn.ModuleDict(
            {
                "embed_tokens": torch.nn.Embedding(9, 6),
                "layers": torch.nn.ModuleList([torch.nn.ModuleDict({"mlp": Block()})]),
            }
        )
        self.lm_head = torch.nn.Linear(6, 9, bias=False)
        self.lm_head.weight = self.model["embed_tokens"].weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        layers: torch.nn.ModuleList = self.model["layers"]  # type: ignore[assignment]
        return self.lm_head(layers[0]["mlp"](self.model["embed_tokens"](ids)))  # type: ignore[index]


def walked(source: WeightSource) -> dict[str, torch.Tensor]:
    """Copies of what is sent."""
    return {name: tensor.clone() for name, tensor in source.tensors() if tensor is not None}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def failures(weights: object, **options: object) -> set[tuple[str, str]]:
    with pytest.raises(Rejected) as caught:
        as_source(weights, **options)  # type: ignore[arg-type]
    return {(failure.code, failure.tensor) for failure in caught.value.failures}


@pytest.mark.case("B190")
def test_a_module_is_its_state_dict() -> None:
    model = Model()
    source = as_source(model)
    sent, state = walked(source), model.state_dict()
    assert set(sent) == set(state)
    assert "model.layers.0.mlp.seen" in sent
    assert "model.layers.0.mlp.table" not in sent
    assert all(same(sent[name], state[name]) for name in state)
    assert source.is_sender
    assert source.group is None
    assert source.ties == ((HEAD, EMBED),)


def test_specs_digests_and_tensors_say_the_same() -> None:
    source = as_source(Model(), dtypes={"*": "BF16", "*.gate.*": torch.float32})
    digests, sent = source.digests(), walked(source)
    assert list(source.specs) == list(sent)
    for name, tensor in sent.items():
        assert source.specs[name].shape == tuple(tensor.shape)
        assert digests[name] == to_hex(tensor_digest(tensor, source.specs[name].dtype))


def test_a_source_can_be_walked_again() -> None:
    model = Model()
    source = as_source(model)
    first = walked(source)
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    second = walked(source)
    assert not same(first[HEAD], second[HEAD])
    assert same(second[HEAD], model.lm_head.weight)


def test_nothing_is_copied_where_nothing_is_cast() -> None:
    model = Model()
    for name, tensor in as_source(model).tensors():
        assert tensor is not None
        assert tensor.data_ptr() == model.state_dict()[name].data_ptr()


# -- wrappers


class Checkpointed(torch.nn.Module):
    """As torch's activation checkpointing wraps a module."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = module


class Wrapped(torch.nn.Module):
    """As DataParallel and its relatives wrap a module."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def compiled(module: torch.nn.Module) -> torch.nn.Module:
    wrapped: torch.nn.Module = torch.compile(module, backend="eager")  # type: ignore[assignment]
    return wrapped


WRAPS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "_orig_mod": compiled,
    "module": Wrapped,
    "module._orig_mod": lambda module: Wrapped(compiled(module)),
    "_orig_mod.module": lambda module: compiled(Wrapped(module)),
    "_checkpoint_wrapped_module": Checkpointed,
}


@pytest.mark.case("B048", "B050")
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_wrapped_module_has_the_names_and_digests_of_a_bare_one(wrap: str) -> None:
    bare, wrapped = as_source(Model()), as_source(WRAPS[wrap](Model()))
    assert wrapped.digests() == bare.digests()
    assert wrapped.ties == bare.ties


@pytest.mark.case("B048")
def test_wrapped_and_bare_names_of_one_parameter_collide() -> None:
    weights = {"module.w": torch.zeros(2), "_orig_mod.w": torch.ones(2)}
    assert failures(weights) == {("tensor_duplicate", "module.w"), ("tensor_duplicate", "_orig_mod.w")}


# -- dtypes


@pytest.mark.case("B070")
def test_a_router_keeps_its_dtype_when_the_rest_is_rounded() -> None:
    model = Model()
    bias = torch.full((3, 6), 1 + 2**-12)
    with torch.no_grad():
        model.get_parameter("model.layers.0.mlp.gate.weight").copy_(bias)
    sent = walked(as_source(model, dtypes={"*": "BF16", "*.gate.weight": "F32"}))
    assert same(sent[ROUTER], bias)
    assert sent[EMBED].dtype == torch.bfloat16
    assert sent["model.layers.0.mlp.seen"].dtype == torch.int64


def test_the_last_pattern_that_matches_decides() -> None:
    source = as_source({"a.b": torch.ones(2), "a.c": torch.ones(2)}, dtypes={"a.b": "F16", "a.*": "BF16"})
    assert {name: spec.dtype for name, spec in source.specs.items()} == {"a.b": "BF16", "a.c": "BF16"}


def test_a_pattern_that_meets_no_tensor_is_refused() -> None:
    assert failures({"gate": torch.ones(2)}, dtypes={"*": "BF16", "*.gate": "F32"}) == {("bad_request", "")}


@pytest.mark.parametrize("target", ["F8_E4M3", "I8", torch.complex64])
def test_a_cast_that_would_need_scales_is_refused(target: object) -> None:
    assert failures({"w": torch.ones(2)}, dtypes={"*": target}) == {("tensor_dtype", "")}


def test_eight_bit_weights_are_never_rounded() -> None:
    weights = {"w": torch.ones(4).to(torch.float8_e4m3fn), "s": torch.ones(1)}
    source = as_source(weights, dtypes={"*": "BF16"})
    assert (source.specs["w"].dtype, source.specs["s"].dtype) == ("F8_E4M3", "BF16")


@pytest.mark.case("B075")
@pytest.mark.parametrize("target", ["BF16", "F16"])
def test_a_nan_is_the_same_bits_wherever_it_lies(target: str) -> None:
    """Vector and scalar code make different ones, and shards of a tensor end in other places than the whole."""
    kinds = torch.tensor([0x7FC12345, -0x3EDCBB, 0x7F800001], dtype=torch.int32).view(torch.float32)
    wide = torch.cat((kinds.repeat(22), torch.ones(1)))
    plain = torch.tensor(float("nan"), dtype=cast(wide, target).dtype).view(torch.int16).item()
    assert set(cast(wide, target)[:-1].view(torch.int16).tolist()) == {plain}
    assert cast(wide, target)[-1] == 1
    assert torch.isinf(cast(torch.tensor([float("inf")]), target)).all()


# -- faults


@pytest.mark.case("B104")
def test_an_ungathered_parameter_is_refused_by_name() -> None:
    model = Model()
    model.model["layers"][0]["mlp"].up.weight.data = torch.empty(0, dtype=torch.bfloat16)  # type: ignore[index]
    assert failures(model) == {("tensor_shape", "model.layers.0.mlp.up.weight")}


def test_every_fault_is_named() -> None:
    weights = {
        "module.a": torch.empty(0),
        "b": torch.zeros(2, device="meta"),
        "c": torch.zeros(2, dtype=torch.complex128),
    }
    assert failures(weights) == {("tensor_shape", "a"), ("bad_request", "b"), ("tensor_dtype", "c")}
    assert failures({}) == {("bad_request", "")}


def test_a_source_is_answered_as_it_is_and_cannot_be_cast() -> None:
    source = as_source({"w": torch.ones(2)})
    assert as_source(source) is source
    assert failures(source, dtypes={"*": "BF16"}) == {("bad_request", "")}


def test_what_layers_keep_beside_tensors_is_left_out() -> None:
    class Extra(torch.nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"amax": 3}

    assert set(as_source(Extra(2, 2)).specs) == {"weight", "bias"}


# -- steps in between

OPTIMISERS: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "one by one": lambda p: torch.optim.AdamW(p, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "closure": lambda p: torch.optim.LBFGS(p, lr=0.1),
}


def moved(source: WeightSource) -> set[str]:
    with pytest.raises(Rejected) as caught:
        source.check_untouched()
    assert {failure.code for failure in caught.value.failures} == {"source_changed"}
    return {failure.tensor for failure in caught.value.failures}


@pytest.mark.case("B035")
@pytest.mark.parametrize("kind", OPTIMISERS)
@pytest.mark.parametrize("wrap", ["bare", "_orig_mod"])
def test_a_step_of_any_optimiser_is_seen(kind: str, wrap: str) -> None:
    model = Model()
    module = model if wrap == "bare" else WRAPS[wrap](model)
    optimiser = OPTIMISERS[kind](list(module.parameters()))
    before = as_source(module)

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        value = module(torch.tensor([1, 2])).sum()
        value.backward()
        return value

    loss()
    before.check_untouched()  # forward and backward write to no weight
    after = None
    optimiser.step(loss)  # type: ignore[arg-type]
    after = as_source(module)
    assert moved(before) == {name for name in before.specs if not name.endswith("seen")}
    after.check_untouched()


def test_frozen_weights_are_not_taken_for_changed_ones() -> None:
    weights = {"frozen": torch.nn.Parameter(torch.ones(2)), "trained": torch.nn.Parameter(torch.ones(2))}
    optimiser = torch.optim.AdamW(weights.values(), fused=True)
    source = as_source(weights)
    weights["trained"].grad = torch.ones(2)
    optimiser.step()
    assert moved(source) == {"trained"}


def test_in_place_writes_are_seen_also_without_gradients() -> None:
    weights = {"a": torch.nn.Parameter(torch.ones(2)), "b": torch.ones(2)}
    source = as_source(weights)
    with torch.no_grad():
        weights["a"].mul_(2)
    weights["b"][0] = 3
    assert moved(source) == {"a", "b"}


def test_writes_through_data_are_seen_by_digests_only() -> None:
    weights = {"a": torch.nn.Parameter(torch.ones(2))}
    source = as_source(weights)
    before = source.digests()
    weights["a"].data.add_(1)
    source.check_untouched()
    assert source.digests() != before


COMPLEX = torch.complex(torch.arange(4.0), -torch.arange(4.0))
LAZY_VIEWS = {"a conjugated view": COMPLEX.conj(), "a negated view": COMPLEX.conj().imag}


@pytest.mark.case("F31")
@pytest.mark.parametrize("tensor", LAZY_VIEWS.values(), ids=LAZY_VIEWS)
def test_a_view_that_is_negated_or_conjugated_only_in_name_is_sent_as_it_reads(tensor: torch.Tensor) -> None:
    wanted = torch.tensor(tensor.tolist(), dtype=tensor.dtype)
    source = as_source({"other": COMPLEX.clone(), "it": tensor})
    assert source.ties == ()
    sent = walked(source)["it"]
    assert not sent.is_conj()
    assert not sent.is_neg()
    assert same(sent, wanted)
    assert source.digests()["it"] == to_hex(tensor_digest(wanted, source.specs["it"].dtype))


@pytest.mark.case("F31")
def test_a_view_and_its_negation_are_no_tie() -> None:
    assert as_source({"a": COMPLEX.conj().imag, "b": COMPLEX.imag}).ties == ()


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(2, 3)


def freed() -> torch.Tensor:
    tensor = torch.ones(2, 3)
    tensor.untyped_storage().resize_(0)
    return tensor


def freed_behind() -> torch.Tensor:
    tensor = torch.ones(4, 3)[2:]
    tensor.untyped_storage().resize_(3 * 3 * 4)
    return tensor


class Quantised(torch.Tensor):
    """As torchao's: a tensor that is computed from others whenever somebody reads it."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Quantised:
        made: Quantised = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:  # what a Parameter asks of it
            return cls(args[0].inner)
        raise NotImplementedError


class Named(torch.Tensor):
    """A plain tensor with a name of its own."""


def of_a_transform(transform: Callable[..., Any]) -> torch.Tensor:
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor.sum()

    transform(keep)(torch.ones(3))
    return kept[0]


WITHOUT_BYTES = {
    "fake": fake,
    "freed": freed,
    "freed in part": freed_behind,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "traced": lambda: torch._to_functional_tensor(torch.ones(2, 3)),
    "not initialised": UninitializedParameter,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.empty(2, 3, device="meta"),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "nested, strided": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "computed": lambda: Quantised(torch.ones(2, 3, dtype=torch.int8)),
    "a parameter that is computed": lambda: torch.nn.Parameter(Quantised(torch.ones(2, 3)), requires_grad=False),
    "of vmap": lambda: of_a_transform(torch.vmap),
    "of grad": lambda: of_a_transform(torch.func.grad),
}


@pytest.mark.case("F31")
@pytest.mark.parametrize("make", WITHOUT_BYTES.values(), ids=WITHOUT_BYTES)
def test_a_tensor_without_memory_is_refused_by_name(make: Callable[[], torch.Tensor]) -> None:
    assert failures({"whole": torch.ones(2, 3), "odd": make()}) == {("bad_request", "odd")}


@pytest.mark.case("F31")
def test_a_dtype_of_quantised_torch_tensors_is_refused_by_name() -> None:
    odd = torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8)
    assert failures({"whole": torch.ones(2, 3), "odd": odd}) == {("tensor_dtype", "odd")}


@pytest.mark.case("F31")
def test_a_subclass_with_memory_of_its_own_is_sent_as_it_reads() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    source = as_source({"it": tensor.as_subclass(Named)})
    assert source.digests()["it"] == to_hex(tensor_digest(tensor, "F32"))


@pytest.mark.case("F26")
@pytest.mark.parametrize("dtypes", [torch.bfloat16, "bfloat16", "torch.bfloat16", "BF16", {"*": "bfloat16"}])
def test_one_dtype_is_that_of_all(dtypes: object) -> None:
    source = as_source({"a": torch.ones(2), "b": torch.ones(3)}, dtypes=dtypes)  # type: ignore[arg-type]
    assert {spec.dtype for spec in source.specs.values()} == {"BF16"}


@pytest.mark.case("F26")
@pytest.mark.parametrize("dtypes", ["int8", "load", "no such dtype", torch.int8, {"*": "F8_E4M3"}])
def test_a_dtype_that_no_weight_is_rounded_to_is_refused(dtypes: object) -> None:
    with pytest.raises(Rejected) as caught:
        as_source({"a": torch.ones(2)}, dtypes=dtypes)  # type: ignore[arg-type]
    assert caught.value.code == "tensor_dtype"
    assert "dtypes" in caught.value.hint
