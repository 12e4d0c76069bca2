"""A process that ends while it broadcasts ends as it would without: nothing of it is inside torch any more by then.

CPython kills a process whose threads are, with SIGABRT or SIGSEGV: see `transports.stream.guards`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("broadcast_exit_program.py")
TIMES = 6


def statuses(story: str, times: int, folder: Path) -> list[int]:
    """With which status each of so many processes ended."""
    command = [sys.executable, str(PROGRAM), story, str(times), str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    program = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        told, _ = program.communicate(timeout=240)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)  # those that hang, with their peers
        program.wait()
    found: list[int] = json.loads(told)
    return found


@pytest.mark.parametrize("story", ["posted", "closed", "deserted", "forming"])
def test_a_process_ends_well_in_the_middle_of_a_broadcast(tmp_path: Path, story: str) -> None:
    assert statuses(story, TIMES, tmp_path) == [0] * TIMES


def test_a_peer_that_is_frozen_does_not_keep_a_process_from_ending(tmp_path: Path) -> None:
    """The group's own limit is an hour."""
    assert statuses("frozen", 1, tmp_path) == [0]
