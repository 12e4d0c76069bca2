"""Rounds of the bad-day driver with fixed seeds on toy engines, and the proof that their judge sees a defect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.bad_day.engines import make_stand
from tests.faults.bad_day.rounds import Driver, running_driver

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(240, method="signal")]
SEEDS = range(1, 41)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    home = tmp_path_factory.mktemp("bad-day")
    with running_driver(home, make_stand("toy", home / "models")) as made:
        yield made


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bad_day_leaves_one_version_and_no_doubt(driver: Driver, seed: int) -> None:
    """One fleet goes through all rounds: what a round leaves behind, the next ones meet."""
    report = driver.play(seed)
    assert not report.verdict.faults, "\n".join((str(report), *report.log))


def test_the_judge_sees_an_engine_that_serves_old_keys_under_a_new_name(tmp_path: Path) -> None:
    """A cache that says that it was reset and was not: replies mix versions, and are found out."""
    stand = make_stand("toy", tmp_path / "models")
    lying = replace(stand, options={**stand.options, "cache_lies": "device", "namespaced": False})
    with running_driver(tmp_path, lying, names=("cut_from_front",)) as driver:
        found = {check for seed in range(1, 3) for check, _ in driver.play(seed).verdict.faults}
    assert found == {"replies"}
