"""NaN and infinity are found wherever they are; large finite numbers are not taken for them."""

from __future__ import annotations

import pytest
import torch

from transports.dtypes import TORCH_DTYPES
from transports.scans import has_normal, is_zero, judged, nonfinite
from updater.protocol.manifest import TensorSpec

FLOATS = [*sorted(name for name in TORCH_DTYPES if name[0] == "F" and name != "F4"), "BF16"]
HAVE_INFINITY = {"F16", "BF16", "F32", "F64", "F8_E5M2"}
BIG = (1 << 20) + 17  # more than one block


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("at", [0, 1 << 20, BIG - 1])
def test_one_bad_element_anywhere(name: str, at: int) -> None:
    values = torch.ones(BIG, dtype=torch.float32).to(TORCH_DTYPES[name])
    assert not nonfinite(values)
    values[at] = torch.tensor(float("nan")).to(TORCH_DTYPES[name])
    assert nonfinite(values)
    if name in HAVE_INFINITY:
        for sign in (1, -1):
            values[at] = torch.tensor(sign * float("inf")).to(TORCH_DTYPES[name])
            assert nonfinite(values)


def test_infinities_of_both_signs_do_not_cancel() -> None:
    assert nonfinite(torch.tensor([float("inf"), float("-inf")]))


@pytest.mark.parametrize("name", ["F16", "BF16", "F32", "F64"])
def test_a_sum_that_overflows_is_looked_at_again(name: str) -> None:
    dtype = TORCH_DTYPES[name]
    values = torch.full((5000,), torch.finfo(dtype).max, dtype=dtype)
    assert not torch.isfinite(values.sum())
    assert not nonfinite(values)
    values[4321] = float("nan")
    assert nonfinite(values)


def test_views_of_any_strides() -> None:
    room = torch.full((2000, 1200), float("nan"), dtype=torch.bfloat16)
    view = room[:, ::2]
    view.fill_(1)
    assert not nonfinite(view)
    assert not nonfinite(view.t())
    view[1999, 599] = float("inf")
    assert nonfinite(view)
    assert nonfinite(view.t())


@pytest.mark.parametrize("name", ["I8", "U8", "BOOL", "I64", "U16", "U64"])
def test_integers_are_always_finite(name: str) -> None:
    assert not nonfinite(torch.ones(8, dtype=torch.uint8).repeat(8).view(TORCH_DTYPES[name]))


def test_complex_parts_count() -> None:
    assert not nonfinite(torch.ones(4, dtype=torch.complex64))
    assert nonfinite(torch.tensor([complex(1, float("inf"))]))


def test_scalars_and_empty_tensors() -> None:
    assert nonfinite(torch.tensor(float("nan")))
    assert not nonfinite(torch.tensor(1.0))
    assert not nonfinite(torch.empty(0))
    assert not is_zero(torch.empty(0))
    assert is_zero(torch.tensor(0.0))


@pytest.mark.parametrize("name", sorted(set(TORCH_DTYPES) - {"F4", "F8_E8M0"}))
def test_zero_or_not(name: str) -> None:
    values = torch.zeros(BIG * torch.empty((), dtype=TORCH_DTYPES[name]).element_size(), dtype=torch.uint8)
    assert is_zero(values.view(TORCH_DTYPES[name]))
    values[-1] = 1
    assert not is_zero(values.view(TORCH_DTYPES[name]))


def test_minus_zero_is_zero() -> None:
    assert is_zero(torch.tensor([-0.0, 0.0]))
    assert is_zero(torch.zeros(3000, 2000)[:, ::2])


@pytest.mark.case("F05")
@pytest.mark.parametrize("name", ["F16", "BF16", "F32", "F64"])
@pytest.mark.parametrize("at", [0, 4096, BIG - 1])
def test_one_normal_number_anywhere(name: str, at: int) -> None:
    kind = torch.finfo(TORCH_DTYPES[name])
    values = torch.full((BIG,), kind.tiny / 2, dtype=TORCH_DTYPES[name])
    values[::2] = float("nan")
    values[1::4] = 0
    assert not has_normal(values, name)
    values[at] = -kind.tiny
    assert has_normal(values, name)


@pytest.mark.case("F05")
def test_a_normal_number_in_views_of_any_strides() -> None:
    room = torch.ones(2000, 1200, dtype=torch.bfloat16)
    view = room[:, ::2]
    view.zero_()
    assert not has_normal(view, "BF16")
    assert not has_normal(view.t(), "BF16")
    view[1999, 599] = 1
    assert has_normal(view, "BF16")
    assert has_normal(view.t(), "BF16")


@pytest.mark.case("F05")
@pytest.mark.parametrize(
    ("dtype", "shape", "wanted"),
    [("F32", (2, 2), True), ("BF16", (2, 2, 2), True), ("F32", (4,), False), ("F8_E4M3", (2, 2), False),
     ("I32", (2, 2), False)],
)  # fmt: skip
def test_which_tensors_have_to_hold_a_normal_number(dtype: str, shape: tuple[int, ...], wanted: bool) -> None:
    assert judged(TensorSpec("w", dtype, shape)) is wanted


@pytest.mark.case("F05")
def test_what_is_no_floating_number_is_not_judged() -> None:
    assert has_normal(torch.zeros(2, 2, dtype=torch.int8), "F32")
