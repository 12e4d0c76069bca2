"""The transport benchmarks run through on a small model and leave their rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HANG_S = 600.0  # only a hang reaches it
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1.2 * HANG_S)]


@pytest.mark.parametrize(
    ("bench", "wanted"), [("bench_digest", "digest / memcpy"), ("bench_staging", "bytes asked / shard, rows, TP=2")]
)
def test_a_small_run(tmp_path: Path, bench: str, wanted: str) -> None:
    report = tmp_path / "report.json"
    environment = os.environ | {"LIVEWEIGHTS_BENCH_REPORT": str(report), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "benchmarks" / f"{bench}.py"), "--small"]
    subprocess.run(command, env=environment, check=True, timeout=HANG_S, stdout=subprocess.DEVNULL)
    assert wanted in {row["name"] for row in json.loads(report.read_text())}
