"""KV connectors beside a vLLM server: which can be served with, in which cells, and what is said of those allowed."""

from __future__ import annotations

from argparse import Namespace

import pytest

from engine_adapter.vllm.connectors import ALLOW, NEITHER, Connectors, Tier
from engine_adapter.vllm.engine import CELLS
from engine_adapter.vllm.settings import read
from updater.core.policy import CachePolicy, InFlight
from updater.server.security import ConfigurationError

pytestmark = pytest.mark.case("F07")

BOTH, RESETS, SALTED = Tier(True, True), Tier(resets=True), Tier(salted=True)


def ended(*caches: CachePolicy) -> set[tuple[InFlight, CachePolicy]]:
    """The cells in which no request goes through the switch."""
    return {cell for cell in CELLS if cell[0] in (InFlight.DRAIN, InFlight.ABORT) and cell[1] in caches}


@pytest.mark.parametrize(
    ("tiers", "cells"),
    [
        ((), set(CELLS)),
        ((BOTH,), ended(CachePolicy.RESET, CachePolicy.NAMESPACE)),
        ((RESETS,), ended(CachePolicy.RESET)),
        ((SALTED,), ended(CachePolicy.RESET, CachePolicy.NAMESPACE)),
        ((BOTH, SALTED), ended(CachePolicy.RESET, CachePolicy.NAMESPACE)),
        ((BOTH, RESETS), ended(CachePolicy.RESET)),
        ((SALTED, RESETS), ended(CachePolicy.RESET)),  # one is emptied, the other is right as it is
        ((NEITHER,), set(CELLS)),  # taken by name: what it does to any cell is the caller's
    ],
)
def test_cells_are_those_in_which_no_tier_answers_with_older_keys(
    tiers: tuple[Tier, ...], cells: set[tuple[InFlight, CachePolicy]]
) -> None:
    found = Connectors({f"m.Kind{number}": tier for number, tier in enumerate(tiers)}, frozenset({"Kind0"}))
    assert set(found.cells(CELLS)) == cells
    assert bool(found.notes(CELLS)) is (cells != set(CELLS))


def test_one_that_is_neither_is_refused_unless_it_was_taken_by_name() -> None:
    tiers = {"a.One": BOTH, "b.Two": NEITHER, "Three": NEITHER}
    assert Connectors(tiers).refused == ("b.Two", "Three")
    for name in ("b.Two", "Two"):
        assert Connectors(tiers, frozenset({name})).refused == ("Three",)
    with pytest.raises(ConfigurationError):
        Connectors(tiers, frozenset({"Two"})).check()
    both = Connectors(tiers, frozenset({"Two", "Three", "One"}))
    both.check()
    assert len(both.warnings) == 2  # not of the one that needs no leave
    assert Connectors(tiers).warnings == ()


def test_the_classes_that_are_allowed_come_from_the_environment() -> None:
    args = Namespace(host="127.0.0.1", port=8000)
    assert read(args, {}).allow_kv_connector == ()
    assert read(args, {ALLOW: "One, a.Two,"}).allow_kv_connector == ("One", "a.Two")
