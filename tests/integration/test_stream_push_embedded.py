"""The embedded engine at TP=2 takes the same version over every transport: bytes, tokens, and the way back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine_adapter.models import SAFE_MARGIN, ModelShape, encode, make_versions, reference_tokens
from engine_adapter.replica.launch import ENGINES
from tests.cases.live_fleet import LiveFleet, live_fleet
from trainer_side import Client, Pusher

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]

PROMPT = encode("The quick brown fox jumps over the lazy dog.")
COUNT = 16
TRANSPORTS = ("disk", "broadcast", "shared_memory")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    torch.set_num_threads(1)
    return make_versions(tmp_path_factory.mktemp("embedded"), 2, ModelShape(family="qwen3", tied=True), seed=21)


@pytest.fixture(scope="module")
def fleet(models: tuple[Path, ...]) -> Iterator[LiveFleet]:
    with live_fleet(models[0].parent) as fleet:
        fleet.begin("embedded", models[0], 2, factory=ENGINES["transformers"])
        fleet.admitted("embedded")
        yield fleet


def tokens(fleet: LiveFleet) -> list[int]:
    (replica,) = fleet.replicas.values()
    answer = fleet.complete(replica.url, list(PROMPT), COUNT)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def reference(model: Path) -> list[int]:
    found = reference_tokens(model, PROMPT, COUNT)
    assert min(found.margins) >= SAFE_MARGIN
    return list(found.tokens)


def test_every_transport_brings_the_same_bytes_and_tokens_and_a_rollback_the_old_ones(
    fleet: LiveFleet, models: tuple[Path, ...]
) -> None:
    weights = load_file(models[1] / "model.safetensors")
    old, new = reference(models[0]), reference(models[1])
    assert old != new
    before = fleet.digests("embedded")
    observed, held = set(), []
    for step, kind in enumerate(TRANSPORTS, start=1):
        assert tokens(fleet) == old  # the prompt is cached on the old version
        with Pusher(
            fleet.url, "", transport=kind, directory=models[0].parent / "pushed", bucket_bytes=64 << 10
        ) as pusher:
            receipt = pusher.push(weights, step)
        assert (receipt.outcome, receipt.proof) == ("committed", "digests")
        observed |= set(receipt.observed.values())
        held.append(fleet.digests("embedded"))
        assert tokens(fleet) == new
        with Client(fleet.url, "") as client:
            assert client.rollback().outcome == "committed"
        assert fleet.digests("embedded") == before
    assert len(observed) == 1
    assert held == [held[0]] * len(TRANSPORTS)
    assert held[0] != before
