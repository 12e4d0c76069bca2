"""The policy-gradient example learns through its publications, and does not without them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from updater.core.version import Version

ROOT = Path(__file__).resolve().parents[2]
SEEDS = (1, 2, 3)
STEPS = 15
HANG_S = 1800.0  # only a hang reaches it
#: In standard errors. Requests meet in batches as they arrive and are sampled together, so no two runs are alike: with
#: publications runs gained 22 to 34, without them -1 to 1.2, where chance comes to more than 5 once in a million.
GAIN = 5
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1.2 * HANG_S)]


def loop(folder: Path, *more: str) -> dict[str, Any]:
    """The report of one start of the example: all seeds on one engine."""
    report = folder / "report.json"
    seeds = [part for seed in SEEDS for part in ("--seed", str(seed))]
    command = [sys.executable, ROOT / "examples/rl_loop/main.py", *seeds, "--steps", str(STEPS), "--report", report]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("LIVEWEIGHTS_")}
    ran = subprocess.run([*command, *more], env=kept, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len(ran.stdout.splitlines()) == len(SEEDS) * (STEPS + 1), ran.stdout
    found: dict[str, Any] = json.loads(report.read_text())
    assert [run["seed"] for run in found["runs"]] == list(SEEDS)
    return found


def gains(report: dict[str, Any]) -> list[float]:
    """Of every run, in standard errors, from the rewards themselves."""
    found = []
    for run in report["runs"]:
        fifth = len(run["steps"]) // 5
        first, last = (
            [reward for step in part for reward in step["rewards"]]
            for part in (run["steps"][:fifth], run["steps"][-fifth:])
        )
        means = [sum(rewards) / len(rewards) for rewards in (first, last)]
        variances = [
            sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1) / len(rewards)
            for rewards, mean in zip((first, last), means, strict=True)
        ]
        gain = (means[1] - means[0]) / sum(variances) ** 0.5
        assert run["verdict"]["improved"] == (gain > GAIN)
        found.append(gain)
    return found


def test_the_policy_learns_through_its_publications(tmp_path: Path) -> None:
    report = loop(tmp_path)
    assert report["pushed"]
    assert all(gain > GAIN for gain in gains(report)), gains(report)
    for run in report["runs"]:
        labels = [step["published"] for step in run["steps"]]
        number = Version.parse(labels[0]).run
        assert labels == [f"{number}-{step}" for step in range(1, STEPS + 1)]
        # Nothing older than what was published last had a part in any completion, and nothing else was live.
        assert [step["made_by"] for step in run["steps"]] == [[label] for label in [f"{number}-0", *labels[:-1]]]
        assert run["refused_unpublished"]


def test_the_same_run_without_publications_does_not(tmp_path: Path) -> None:
    report = loop(tmp_path, "--no-push", "--transport", "broadcast")
    assert not report["pushed"]
    assert not any(gain > GAIN for gain in gains(report)), gains(report)
    for run in report["runs"]:
        assert len({label for step in run["steps"] for label in step["made_by"]}) == 1
        assert run["refused_unpublished"]
