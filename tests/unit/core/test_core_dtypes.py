"""The dtypes of an engine in few words."""

from __future__ import annotations

import pytest

from updater.core.dtypes import compact, differing, fingerprint, merged, wanted

pytestmark = pytest.mark.case("F26")
TABLE = {
    **{f"layers.{layer}.q": "BF16" for layer in range(30)},
    **{f"layers.{layer}.router": "F32" for layer in range(30)},
    **{f"layers.{layer}.norm": "F32" if layer == 7 else "BF16" for layer in range(30)},
    "head": "BF16",
    "packed": "",
}


def test_few_rules_say_the_dtype_of_every_tensor() -> None:
    rules = compact(TABLE)
    assert len(rules) == 4 + 30
    assert {name: wanted(dict(rules), name) for name in TABLE} == TABLE
    assert wanted(dict(rules), "layers.99.q") == "BF16"
    assert wanted(dict(rules), "other") is None


def test_what_differs_is_named_and_has_another_fingerprint() -> None:
    one, other = compact(TABLE), compact(TABLE | {"head": "F32"})
    assert differing(one, one) == []
    assert differing(one, other) == ["head"]
    assert fingerprint(one) == fingerprint(reversed(one)) != fingerprint(other)


def test_ranks_that_hold_a_tensor_in_one_dtype_say_so_together_and_else_nothing() -> None:
    one, other = (("embed", "BF16"), ("head", "BF16")), (("head", "F32"), ("norm", "F32"))
    assert merged([one, one]) == one
    assert merged([one, other]) == (("embed", "BF16"), ("head", ""), ("norm", "F32"))
    assert merged([]) == ()
