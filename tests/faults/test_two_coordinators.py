"""`liveweights serve` twice on one state folder: one coordinator has it, and a taker ends the one before."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from updater.demo.processes import free_port

pytestmark = pytest.mark.slow
GUARD_S = 120.0

Start = Callable[..., "Service"]


class Service:
    """One `liveweights serve` as a process."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "updater.cli.main", "serve", "--port", str(self.port)]
        self.process = subprocess.Popen(
            [*command, "--state", str(folder / "state"), *options], stderr=subprocess.PIPE, text=True
        )

    def ready(self) -> Service:
        end = time.monotonic() + GUARD_S
        while time.monotonic() < end:
            if self.epoch():
                return self
            time.sleep(0.05)
        raise AssertionError("it does not answer")

    def epoch(self) -> int:
        """0: no server answers."""
        try:
            answer = httpx.get(f"http://127.0.0.1:{self.port}/v1/version", timeout=2.0, trust_env=False)
        except httpx.HTTPError:
            return 0
        return int(answer.json()["epoch"])

    def ended(self) -> tuple[int, str]:
        _, log = self.process.communicate(timeout=GUARD_S)
        return self.process.returncode, log


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[Service] = []

    def start(*options: str) -> Service:
        made.append(Service(tmp_path, *options))
        return made[-1]

    yield start
    for service in made:
        service.process.kill()
        service.process.communicate(timeout=GUARD_S)


@pytest.mark.case("F14")
def test_a_folder_in_use_is_refused_a_dead_owners_is_not_and_a_taker_ends_the_owner(start: Start) -> None:
    first = start().ready()
    code, log = start().ended()
    assert code == 1
    assert "state_in_use" in log
    assert "--take-over" in log
    assert first.epoch() == 1

    first.process.kill()
    first.process.wait(GUARD_S)
    second = start().ready()
    assert second.epoch() == 2

    # Idle, so there is nothing that it appends: it ends all the same, and says why.
    third = start("--take-over").ready()
    code, log = second.ended()
    assert code == 1
    assert "took this fleet over" in log

    third.process.send_signal(signal.SIGSTOP)
    assert start().ended()[0] == 1
    fourth = start("--take-over").ready()
    third.process.send_signal(signal.SIGCONT)
    assert third.ended()[0] == 1
    assert fourth.epoch() == 4
