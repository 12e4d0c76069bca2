"""Rounds of the bad-day driver over two stock vLLM servers, at TP=2 and at TP=1."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.bad_day.catalogue import QUICK
from tests.faults.bad_day.engines import make_stand
from tests.faults.bad_day.rounds import Driver, running_driver
from tests.vllm_server.server import STARTS

SEEDS = (1, 2, 3)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    home = tmp_path_factory.mktemp("bad-day")
    for _ in range(2):
        STARTS.take()
    with running_driver(home, make_stand("vllm", home / "models"), QUICK) as made:
        yield made


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bad_day_leaves_one_version_and_no_doubt(driver: Driver, seed: int) -> None:
    report = driver.play(seed)
    assert not report.verdict.faults, "\n".join((str(report), *report.log))
