"""Twins of post-processed layers, over layers that pack as badly as an engine's may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from engine_adapter.vllm.twins.equal import StateComparison
from engine_adapter.vllm.twins.layer import ProcessedLayer
from engine_adapter.vllm.twins.layers import may_be_packed, shared
from engine_adapter.vllm.twins.state import LayerTwin
from engine_adapter.vllm.twins.table import Method

X = torch.eye(3)


class Kernel:
    """Holds weights; kept by a quant method."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight


class OnTheMethod:
    """Keeps its kernel on itself and makes it once, as mixtures of experts do."""

    def __init__(self) -> None:
        self.kernel: Kernel | None = None

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.kernel is None:
            self.kernel = Kernel(layer.weight.data * 2)
        layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def apply(self, layer: Any) -> torch.Tensor:
        assert self.kernel is not None
        return self.kernel.weight @ X


class InAClosure:
    """Keeps the very parameter that was loaded, and leaves it on the layer."""

    def process_weights_after_loading(self, layer: Any) -> None:
        weight = layer.weight
        layer.packed = lambda x: weight @ x

    def apply(self, layer: Any) -> torch.Tensor:
        result: torch.Tensor = layer.packed(X)
        return result


class InPlace:
    """Writes over what was loaded."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight.data.mul_(2)

    def apply(self, layer: Any) -> torch.Tensor:
        result: torch.Tensor = layer.weight @ X
        return result


class Nothing:
    def process_weights_after_loading(self, layer: Any) -> None:
        layer.packed = torch.nn.functional.linear

    apply = InPlace.apply


KINDS: list[tuple[Callable[[], Any], Method]] = [
    (OnTheMethod, Method(stateful=("quant_method",))),
    (InAClosure, Method()),
    (InPlace, Method()),
]


class Layer(nn.Module):
    def __init__(self, kind: Callable[[], Any], value: float = 0.0) -> None:
        super().__init__()
        self.quant_method: Any = kind()
        self.weight = nn.Parameter(torch.full((2, 3), value), requires_grad=False)

    def forward(self) -> torch.Tensor:
        result: torch.Tensor = self.quant_method.apply(self).clone()
        return result


def serving(kind: Callable[[], Any], value: float) -> Layer:
    layer = Layer(kind, value)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def processed(live: Layer, kind: Callable[[], Any], method: Method) -> ProcessedLayer:
    def wrapped(layer: Layer) -> nn.Module:
        return nn.ModuleDict({"l": layer})

    twins = (wrapped(Layer(kind)), wrapped(Layer(kind)))
    return ProcessedLayer("l", wrapped(live), twins, method, {"l.weight": "l.weight"})


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"l.weight": torch.full((2, 3), value)}


@pytest.mark.parametrize(("kind", "method"), KINDS)
def test_builds_touch_nothing_that_serves_and_every_version_can_come_back(
    kind: Callable[[], Any], method: Method
) -> None:
    live = serving(kind, 1.0)
    made = processed(live, kind, method)
    assert made.prove(weights(1.0)) == []
    assert made.packed
    derived, states = made.derived(), {1.0: made.derived().bound()}
    held = 1.0
    for value in (2.0, 3.0, 4.0):
        before, source = live(), weights(value)
        states = {held: states[held], value: derived.build(source)}
        source["l.weight"].fill_(float("nan"))
        assert torch.equal(live(), before)
        for now in (value, held, value):
            derived.bind(states[now])
            if not made.raw:  # then it is an ordinary parameter, which the spare rebinds
                live.weight.data = weights(now)["l.weight"]
            assert torch.equal(live(), serving(kind, now)())
        held = value


@pytest.mark.parametrize(("kind", "method"), KINDS)
def test_a_layer_that_serves_other_weights_is_no_start(kind: Callable[[], Any], method: Method) -> None:
    failures = processed(serving(kind, 1.0), kind, method).prove(weights(1.5))
    assert [(failure.code, failure.tensor) for failure in failures] == [("placement_refused", "l")]


def test_a_layer_that_never_was_processed_is_no_start() -> None:
    failures = processed(Layer(InAClosure, 1.0), InAClosure, Method()).prove(weights(1.0))
    assert [failure.code for failure in failures] == ["placement_refused"]


def test_two_builds_that_differ_are_refused() -> None:
    """The live layer equals one of them."""
    salt = iter((1.0, 1.0, 2.0))

    class Salted(InPlace):
        def process_weights_after_loading(self, layer: Any) -> None:
            layer.weight.data.mul_(2)
            layer.salt = torch.tensor(next(salt))

    failures = processed(serving(Salted, 1.0), Salted, Method()).prove(weights(1.0))
    assert [failure.code for failure in failures] == ["placement_refused"]


def test_code_alone_is_no_state() -> None:
    made = processed(serving(Nothing, 1.0), Nothing, Method())
    assert made.prove(weights(1.0)) == []
    assert (made.packed, made.raw) == (False, ())


@pytest.mark.parametrize(("kind", "raw"), [(OnTheMethod, ("l.weight",)), (InAClosure, ()), (InPlace, ("l.weight",))])
def test_what_processing_leaves_alone_stays_an_ordinary_parameter(
    kind: Callable[[], Any], raw: tuple[str, ...]
) -> None:
    made = processed(serving(kind, 1.0), kind, dict(KINDS)[kind])
    assert made.prove(weights(1.0)) == []
    assert made.raw == raw


def test_a_tied_parameter_that_one_layer_packs_away_is_refused() -> None:
    packs, reads = (processed(serving(kind, 1.0), kind, dict(KINDS)[kind]) for kind in (OnTheMethod, InAClosure))
    for layer in (packs, reads):
        assert layer.prove(weights(1.0)) == []
    assert [failure.code for failure in shared([packs, reads])] == ["placement_refused"]
    assert shared([packs]) == shared([reads, reads]) == []


def test_a_build_of_another_form_fails() -> None:
    class Moody(InPlace):
        def process_weights_after_loading(self, layer: Any) -> None:
            super().process_weights_after_loading(layer)
            if layer.weight[0, 0] > 3:
                layer.extra = torch.ones(1)

    made = processed(serving(Moody, 1.0), Moody, Method())
    assert made.prove(weights(1.0)) == []
    with pytest.raises(ValueError):
        made.derived().build(weights(2.0))


def test_a_build_needs_tensors_as_the_layer_loads_them() -> None:
    twin = LayerTwin(0, Layer(InPlace), Method())
    with pytest.raises(ValueError):
        twin.build({"weight": torch.zeros(2, 4)})
    with pytest.raises(ValueError):
        twin.build({"weight": torch.zeros(2, 3, dtype=torch.float64)})


def test_a_twin_holds_no_weights_between_builds() -> None:
    layer = Layer(InAClosure)
    twin = LayerTwin(0, layer, Method())
    assert layer.weight.is_meta
    twin.build({"weight": torch.ones(2, 3)})
    assert layer.weight.is_meta


def _closure(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor


A = torch.tensor([1.0, float("nan")])


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        (A, A.clone(), True),
        (A, A.to(torch.bfloat16), False),
        (torch.zeros(2, 3), torch.zeros(3, 2).t(), False),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (_closure(A), _closure(A.clone()), True),
        (_closure(A), _closure(torch.zeros(2)), False),
        (_closure(A), lambda: A, False),
        ({"a": [1, A]}, {"a": [1, A.clone()]}, True),
        ({"a": 1}, {"b": 1}, False),
        ([1, 2], [1, 2, 3], False),
        (Kernel(A), Kernel(A.clone()), True),
        (Kernel(A), Kernel(A + 1), False),
        (1, 1.0, False),
        ({1, 2}, {1, 3}, False),
    ],
)
def test_states_are_compared_to_the_last_byte(first: object, second: object, equal: bool) -> None:
    found = StateComparison()
    found.compare(first, second, "state")
    assert (found.differing == []) is equal
    assert found.opaque == []


def test_objects_that_point_at_each_other_are_compared_once() -> None:
    first, second = Kernel(A), Kernel(A.clone())
    first.owner, second.owner = [first], [second]  # type: ignore[attr-defined]
    found = StateComparison()
    found.compare(first, second, "state")
    assert found.differing == []


def plain(weight: torch.Tensor, **made: Any) -> nn.Module:
    layer = nn.Module()
    layer.weight = nn.Parameter(weight, requires_grad=False)
    for name, value in made.items():
        setattr(layer, name, value)
    return layer


def _closing_over(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: weight @ x


@pytest.mark.parametrize(
    ("made", "method", "packed"),
    [
        ({}, Method(), False),
        ({"packed": torch.nn.functional.linear, "done": True}, Method(), False),
        ({"packed": lambda x, weight: weight @ x}, Method(), False),
        ({"packed": _closing_over(torch.ones(2, 2))}, Method(), True),
        ({"packed": torch.ones(3)}, Method(), True),
        ({"packed": Kernel(torch.ones(3))}, Method(), True),
        ({}, Method(stateful=("quant_method",)), True),
    ],
)
def test_what_may_be_packed(made: dict[str, Any], method: Method, packed: bool) -> None:
    fresh = plain(torch.empty(2, 3, device="meta"))
    assert may_be_packed(plain(torch.ones(2, 3), **made), fresh, method) == packed


@pytest.mark.parametrize("weight", [torch.empty(0), torch.ones(3, 2), torch.ones(2, 3, dtype=torch.float16)])
def test_parameters_of_another_form_may_be_packed(weight: torch.Tensor) -> None:
    assert may_be_packed(plain(weight), plain(torch.empty(2, 3, device="meta")), Method())
