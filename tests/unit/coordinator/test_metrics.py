"""Every metric that docs/operations.md names is there and counts, and no other."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine_adapter.replica.admission import AdmissionController
from engine_adapter.replica.app import ReplicaApp
from updater.core.fleet.state import Phase
from updater.testing.service import LocalService

PAGE = Path(__file__).parents[3] / "docs" / "operations.md"
DOCUMENTED = frozenset(re.findall(r"^\| `(liveweights_[a-z_]+)` \|", PAGE.read_text(), re.MULTILINE))
REPLICA = frozenset(name for name in DOCUMENTED if name.startswith("liveweights_replica_"))

#: name of a sample -> labels and the least value that it has after the story below
COORDINATOR = {
    "liveweights_phase_seconds_count": ({"phase": Phase.INSTALLING.value}, 1),
    "liveweights_updates_total": ({"kind": "update", "outcome": "committed", "reason": ""}, 1),
    "liveweights_read_bytes_total": ({}, 1),
    "liveweights_closed_seconds_total": ({}, 0),
    "liveweights_pause_seconds_count": ({}, 1),
    "liveweights_live_version": ({"run": "0"}, 7),
    "liveweights_members": ({"state": "open"}, 1),
}
FRONT = {
    "liveweights_replica_in_flight": ({}, 3),
    "liveweights_replica_waiting": ({}, 2),
    "liveweights_replica_open": ({}, 1),
    "liveweights_replica_state": ({"state": "joining"}, 1),
    "liveweights_replica_version": ({"version": ""}, 1),
    "liveweights_replica_mixed_tokens_total": ({}, 4),
}


def families(text: str) -> frozenset[str]:
    """Names as the page spells them."""
    return frozenset(
        family.name + ("_total" if family.type == "counter" else "")
        for family in text_string_to_metric_families(text)
        if not family.name.endswith("_created")
    )


def value(text: str, name: str, labels: dict[str, str]) -> float:
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return max((each.value for each in samples if (each.name, each.labels) == (name, labels)), default=-1.0)


def story(folder: Path) -> str:
    """One replica joins and one version is published; what `/metrics` says then."""

    async def main() -> str:
        async with LocalService(folder, new_fleet=True) as service:
            await service.join("one")
            assert (await service.push(7)).status_code == 200
            return (await service.get("/metrics")).text

    return asyncio.run(main())


class Counting:
    """What a gate says of itself."""

    mixed, in_flight, waiting, is_open, version = 4, 3, 2, True, ""


def of_replica() -> str:
    face = ReplicaApp("r0", cast(AdmissionController, Counting()))
    return bytes(asyncio.run(face.metrics()).body).decode()


@pytest.mark.case("F66")
def test_the_page_names_every_metric_and_no_other(tmp_path: Path) -> None:
    assert families(story(tmp_path)) == DOCUMENTED - REPLICA
    assert families(of_replica()) == REPLICA


@pytest.mark.case("F66")
def test_every_metric_of_the_coordinator_counts(tmp_path: Path) -> None:
    text = story(tmp_path)
    assert {name: value(text, name, labels) >= least for name, (labels, least) in COORDINATOR.items()} == dict.fromkeys(
        COORDINATOR, True
    )


@pytest.mark.case("F66")
def test_every_metric_of_a_replica_counts() -> None:
    text = of_replica()
    assert {name: value(text, name, labels) for name, (labels, _) in FRONT.items()} == {
        name: exact for name, (_, exact) in FRONT.items()
    }
