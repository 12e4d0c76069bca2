"""The examples and the command line against a real coordinator and a real engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_adapter.models import make_versions
from updater.demo.processes import Children, free_port

ROOT = Path(__file__).resolve().parents[2]
HANG_S = 300.0  # only a hang reaches it
pytestmark = [pytest.mark.engine, pytest.mark.timeout(4 * HANG_S)]


@dataclass(frozen=True)
class Fleet:
    url: str
    replica: str
    folder: Path
    checkpoints: tuple[Path, ...]

    def live(self) -> str:
        return str(httpx.get(f"{self.url}/v1/version", timeout=HANG_S).json()["version"])


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    checkpoints = make_versions(folder / "models", 3)
    children = Children(folder)
    try:
        port, root = free_port(), ["--root", str(folder)]
        serve = ["serve", "--new-fleet", "--port", str(port), "--state", str(folder / "state"), *root]
        coordinator = children.start("coordinator", serve, port)
        children.wait_ready(coordinator, "/healthz")
        port = free_port()
        engine = ["engine", "--model", str(checkpoints[0]), "--port", str(port), "--coordinator", coordinator.url]
        replica = children.start("replica", [*engine, *root], port)
        children.wait_ready(replica)
        yield Fleet(coordinator.url, replica.url, folder, checkpoints)
    finally:
        assert children.stop() == []


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("LIVEWEIGHTS_")}
    return subprocess.run(
        command, cwd=ROOT, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=HANG_S
    )


def cli(*arguments: str | Path) -> tuple[int, Any]:
    ran = run(sys.executable, "-m", "updater.cli.main", *arguments, "--json")
    return ran.returncode, json.loads(ran.stdout)


def test_curl_push_commits_and_refuses(fleet: Fleet) -> None:
    step = int(fleet.live().rpartition("-")[2]) + 1 if fleet.live() != "start" else 1
    done = run(ROOT / "examples" / "01_curl_push.sh", fleet.url, fleet.checkpoints[1], str(step))
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["outcome"] == "committed"
    assert fleet.live() == f"0-{step}"
    stale = run(ROOT / "examples" / "01_curl_push.sh", fleet.url, fleet.checkpoints[2], str(step))
    assert stale.returncode == 22
    assert json.loads(stale.stdout)["code"] in ("stale_version", "id_reused")
    code, back = cli("rollback", "--url", fleet.url)
    assert (code, back["outcome"], back["proof"]) == (0, "committed", "structure_only")  # there never were digests


def test_pushed_state_dict_is_live_with_digests(fleet: Fleet) -> None:
    script = ROOT / "examples" / "02_push_state_dict.py"
    done = run(sys.executable, script, fleet.checkpoints[0], fleet.folder / "pushed", "100", fleet.url, fleet.replica)
    assert done.returncode == 0, done.stdout + done.stderr
    assert fleet.live() == "0-100"
    assert (fleet.folder / "pushed" / "0-100" / "model.safetensors").is_file()
    code, receipts = cli("history", "--url", fleet.url)
    assert (code, receipts[0]["version"], receipts[0]["proof"]) == (0, "0-100", "digests")


def test_a_session_on_the_command_line(fleet: Fleet) -> None:
    code, receipt = cli("push", fleet.checkpoints[2], "200", "--manifest", "--url", fleet.url)
    assert (code, receipt["outcome"], receipt["proof"]) == (0, "committed", "digests")
    code, status = cli("status", "--url", fleet.url)
    assert (code, status["version"]["version"]) == (0, "0-200")
    assert [member["state"] for member in status["fleet"]["members"]] == ["open"]
    target = status["version"]["rollback_to"]
    code, back = cli("rollback", "--url", fleet.url)
    assert (code, back["kind"], back["outcome"], fleet.live()) == (0, "rollback", "committed", target)
    code, again = cli("rollback", "--url", fleet.url)
    assert (code, again["version"], again["proof"]) == (0, "0-200", "digests")
    assert cli("rollback", "--url", fleet.url)[0] == 0
    code, problem = cli("rollback", "--to", "0-1", "--url", fleet.url)
    assert (code, problem["status"]) == (1, 412)
    code, problem = cli("push", fleet.folder / "nothing", "300", "--url", fleet.url)
    assert (code, problem["code"]) == (1, "source_missing")
    assert fleet.live() == target
