"""Two real processes of one replica id: neither may leave the other, or itself, serving an old version (I1)."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch

from engine_adapter.testing import make_toy_checkpoint
from tests.cases import replica_program
from tests.cases.live_fleet import HANG_S, LiveFleet, free_port, live_fleet
from tests.standing import stand_still

pytestmark = [pytest.mark.engine, pytest.mark.slow]

torch.set_num_threads(1)


@contextmanager
def process(fleet: LiveFleet, model: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Replica `two` on `port`; killed at the end, also if it stands still."""
    home = fleet.home
    with (home / f"{port}.log").open("ab") as log:
        life = subprocess.Popen(
            [
                sys.executable,
                replica_program.__file__,
                "two",
                model,
                str(port),
                fleet.url,
                home,
                home / f"ranks-{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield life
    finally:
        if life.poll() is None:
            life.send_signal(signal.SIGCONT)
            life.send_signal(signal.SIGTERM)
            life.wait(HANG_S)


def says(fleet: LiveFleet, port: int, status: int) -> Callable[[], bool]:
    def asked() -> bool:
        try:
            return fleet.client.get(f"http://127.0.0.1:{port}/readyz").status_code == status
        except httpx.TransportError:
            return False  # not up yet

    return asked


def served(fleet: LiveFleet, port: int) -> tuple[int, str]:
    answer = fleet.complete(f"http://127.0.0.1:{port}")
    return answer.status_code, answer.json().get("liveweights", {}).get("version", "")


def test_a_refused_namesake_that_stops_leaves_the_member_in_the_fleet(tmp_path: Path) -> None:
    old, new = make_toy_checkpoint(tmp_path / "old", seed=7), make_toy_checkpoint(tmp_path / "new", seed=8)
    first, second = free_port(), free_port()
    with live_fleet(tmp_path) as fleet, process(fleet, old, first):
        fleet.until(says(fleet, first, 200))
        before = fleet.get("/v1/fleet")["members"]
        with process(fleet, old, second) as namesake:
            log = tmp_path / f"{second}.log"
            fleet.until(lambda: "replica_id_taken" in log.read_text() or namesake.poll() is not None)
            namesake.send_signal(signal.SIGTERM)
            assert namesake.wait(HANG_S) == 0, log.read_text()
        members = fleet.get("/v1/fleet")["members"]
        assert [(m["replica"], m["incarnation"]) for m in members] == [("two", before[0]["incarnation"])]
        assert fleet.push(new, 1).status_code == 200
        assert served(fleet, first) == (200, "0-1")


def test_a_process_that_was_replaced_while_it_stood_still_shuts_itself(tmp_path: Path) -> None:
    old, new = make_toy_checkpoint(tmp_path / "old", seed=7), make_toy_checkpoint(tmp_path / "new", seed=8)
    first, second = free_port(), free_port()
    with live_fleet(tmp_path, status_s=6.0) as fleet, process(fleet, old, first) as sleeper:
        fleet.until(says(fleet, first, 200))
        stand_still(sleeper.pid)
        with process(fleet, old, second):
            fleet.until(says(fleet, second, 200))
            assert fleet.push(new, 1).status_code == 200
            sleeper.send_signal(signal.SIGCONT)
            fleet.until(says(fleet, first, 503))
            # Shut as an orphan, and asking to join again: not while another process has its id.
            assert fleet.front(f"http://127.0.0.1:{first}").state.value in ("orphaned", "joining")
            assert served(fleet, first) == (503, "")
            sleeper.send_signal(signal.SIGTERM)
            assert sleeper.wait(HANG_S) == 0
            assert [m["state"] for m in fleet.get("/v1/fleet")["members"]] == ["open"]
            assert served(fleet, second) == (200, "0-1")
