"""Rounds of the bad-day driver with fixed seeds on two stock vLLM servers, one of them over two ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.bad_day.catalogue import QUICK
from tests.faults.bad_day.engines import make_stand
from tests.faults.bad_day.fleet import RANKS
from tests.faults.bad_day.rounds import Driver, running_driver
from tests.vllm_server.server import STARTS

SEEDS = (1, 3, 10)  # ranks that stand still, beside a coordinator and a trainer that do; ranks that are cut off


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    for _ in RANKS:
        STARTS.take()
    home = tmp_path_factory.mktemp("bad-day")
    with running_driver(home, make_stand("vllm", home / "models"), QUICK) as made:
        yield made


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bad_day_of_a_vllm_leaves_one_version_and_no_doubt(driver: Driver, seed: int) -> None:
    """One fleet goes through all rounds: what a round leaves behind, the next ones meet."""
    report = driver.play(seed)
    assert not report.verdict.faults, "\n".join((str(report), *report.log))
