"""The demo, whole: its own judgement, and its report read by somebody else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HANG_S = 900.0  # only a hang reaches it
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(2 * HANG_S)]


def test_demo_ends_without_a_mixed_reply(tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-m", "updater.cli.main", "demo", "--report", str(tmp_path / "report.json")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["mixed"] == 0
    assert report["replies"] > 50
    assert report["tokens_compared"] > 10 * report["tokens_left_out"]
    ends = [(update["version"], update["outcome"], update["code"]) for update in report["updates"]]
    assert ends == [
        *((f"0-{step}", "committed", "") for step in range(1, 6)),
        ("0-6", "rejected", "file_truncated"),
        ("0-6", "rejected", "tensor_missing"),
        ("0-6", "aborted", "tensor_digest"),
        ("0-1", "same receipt", ""),
        ("0-3", "rejected", "stale_version"),
        ("0-6", "committed", ""),
        ("0-5", "committed", ""),
    ]
    for update in report["updates"]:
        paused = update["outcome"] == "committed"
        assert (update["pause_ms"] is not None) == paused
        assert not paused or 0 < update["pause_ms"] < update["update_ms"]
    # Checkpoints, journal and logs are gone, and so is every process.
    assert list(tmp_path.glob("liveweights-demo-*")) == []
    assert _mentioning(str(tmp_path)) == []


def test_a_demo_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    running = subprocess.Popen(
        [sys.executable, "-m", "updater.cli.main", "demo", "--report", str(tmp_path / "report.json")],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stderr is not None
    for line in running.stderr:
        if line.startswith("starting a coordinator"):
            break
    until = time.monotonic() + HANG_S
    while not list(tmp_path.glob("*/pair.log")):
        assert running.poll() is None
        assert time.monotonic() < until
    running.send_signal(signal.SIGTERM)
    running.stderr.read()
    assert running.wait(HANG_S) == 143
    assert _mentioning(str(tmp_path)) == []
    assert list(tmp_path.glob("liveweights-demo-*")) == []


def _mentioning(text: str) -> list[str]:
    """Command lines of processes that name a path."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line:
            found.append(line)
    return found
