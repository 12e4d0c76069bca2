"""Caches and requests in flight, on the embedded engine: a real model with a real paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_adapter.models import encode, make_versions, reference_tokens
from engine_adapter.transformers.engine import CAPABILITIES
from tests.integration.embedded_driver import Replica
from updater.core.policy import CachePolicy, InFlight, Policy

pytestmark = pytest.mark.engine

PREFIX = encode("a prefix of more than two pages, shared by all; ")
PROMPTS = [PREFIX + encode(ending) for ending in ("one", "two", "three", "four")]
COUNT = 80


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    return make_versions(tmp_path_factory.mktemp("models"), 2, seed=31)


@pytest.fixture(scope="module")
def shared(models: tuple[Path, ...]) -> Iterator[Replica]:
    made = Replica(models[0], 1)
    yield made
    made.close()


@pytest.fixture
def replica(shared: Replica, models: tuple[Path, ...]) -> Replica:
    """On v7, its cache empty."""
    shared.update(models[0], "0-7")
    return shared


@pytest.mark.case("B130", "B131")
def test_a_prompt_served_on_the_old_version_is_computed_anew(replica: Replica, models: tuple[Path, ...]) -> None:
    replica.generate(PROMPTS[0], 8)
    assert replica.generate(PROMPTS[0], 8).cached == 48
    assert replica.update(models[1], "0-8") == {"kv_blocks": True}
    after = replica.generate(PROMPTS[0], COUNT)
    assert after.cached == 0
    assert tuple(after.tokens) == reference_tokens(models[1], PROMPTS[0], COUNT).tokens


@pytest.mark.case("B134")
def test_frozen_requests_are_refused_and_restarted_ones_leave_no_old_keys(
    replica: Replica, models: tuple[Path, ...]
) -> None:
    for cache in CachePolicy:
        assert CAPABILITIES.refuses(Policy(in_flight=InFlight.KEEP, cache=cache), "disk") is not None
    running = replica.submit(PROMPTS[0], COUNT)
    replica.wait(running, tokens=3)
    serial = replica.next_serial()
    replica.stage(models[1], serial)
    replica.pause(serial)
    later = replica.submit(PROMPTS[1], COUNT)  # shares three pages with the running one
    assert replica.install(serial, "0-8") == {"kv_blocks": True}
    replica.resume(serial)
    reply = replica.wait(later)
    assert set(reply.versions) == {"0-8"}
    assert tuple(reply.tokens) == reference_tokens(models[1], PROMPTS[1], COUNT).tokens
    assert replica.wait(running).reason == "length"


@pytest.mark.case("B133", "B139")
def test_recompute_aborts_none_of_four_and_each_token_has_its_version(
    replica: Replica, models: tuple[Path, ...]
) -> None:
    serial = replica.next_serial()
    replica.stage(models[1], serial)
    ids = replica.paused_in_the_middle(PROMPTS, COUNT, serial)
    assert replica.install(serial, "0-8") == {"kv_blocks": True}
    replica.resume(serial)
    for request, prompt in zip(ids, PROMPTS, strict=True):
        reply = replica.wait(request)
        assert reply.reason == "length"
        switch = reply.versions.index("0-8")
        assert 0 < switch < COUNT
        assert reply.versions == ["0-7"] * switch + ["0-8"] * (COUNT - switch)
        old = reference_tokens(models[0], prompt, switch).tokens
        assert tuple(reply.tokens) == old + reference_tokens(models[1], prompt + old, COUNT - switch).tokens


@pytest.mark.case("B133")
def test_a_cancelled_request_does_not_keep_the_cache_from_being_reset(
    replica: Replica, models: tuple[Path, ...]
) -> None:
    serial = replica.next_serial()
    ids = replica.paused_in_the_middle(PROMPTS, COUNT, serial)
    for request in ids:
        replica.cancel(request)
    replica.resume(serial)
    assert {replica.wait(request).reason for request in ids} == {"abort"}
    assert replica.update(models[1], "0-8") == {"kv_blocks": True}
