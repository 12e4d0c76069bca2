"""The benchmarks of pushes run through on a small model and leave their rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HANG_S = 900.0  # only a hang reaches it
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1.2 * HANG_S)]
ROWS = {
    "bench_push": (
        "FSDP2: bare walk, broadcast and digest / push by broadcast",
        "pause of a push by shared_memory / by disk",
        "peak memory of trainer 0, push by broadcast / (shard + 2 buckets + 2 largest tensors)",
    ),
    "bench_many_updates": (
        "disk: who holds more descriptors, threads, mappings or files after 12 updates",
        "shared_memory: memory grown in updates 4 to 12 / allowed",
    ),
}


@pytest.mark.parametrize("bench", ROWS)
def test_a_small_run(tmp_path: Path, bench: str) -> None:
    report = tmp_path / "report.json"
    kept = {key: value for key, value in os.environ.items() if not key.startswith("LIVEWEIGHTS_")}
    environment = kept | {"LIVEWEIGHTS_BENCH_REPORT": str(report), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"benchmarks.{bench}", "--small"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=HANG_S, stdout=subprocess.DEVNULL)
    rows = {row["name"]: row["ratio"] for row in json.loads(report.read_text())}
    assert set(ROWS[bench]) <= set(rows)
