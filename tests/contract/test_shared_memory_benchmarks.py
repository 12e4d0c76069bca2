"""The benchmarks of memory within a machine run through, and leave their rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def run(module: str, option: str, report: Path, **environment: str) -> str:
    known = os.environ | {"LIVEWEIGHTS_BENCH_REPORT": str(report), "PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, "-m", module, option]
    return subprocess.run(command, env=known, cwd=ROOT, check=True, timeout=240, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("module", "option", "wanted"),
    [
        ("benchmarks.bench_shared_memory", "--small", "memcpy / shared memory, 2 MiB buckets"),
        ("benchmarks.bench_gpu", "--stand-in", "gpu copy inside the device / CUDA IPC to another process"),
    ],
)
def test_a_small_run(tmp_path: Path, module: str, option: str, wanted: str) -> None:
    report = tmp_path / "report.json"
    run(module, option, report)
    assert wanted in {row["name"] for row in json.loads(report.read_text())}


def test_without_a_device_nothing_is_measured(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    run("benchmarks.bench_gpu", "--small", report, CUDA_VISIBLE_DEVICES="")
    assert not report.exists()
    assert "--stand-in" in run("benchmarks.bench_gpu", "--help", report)
