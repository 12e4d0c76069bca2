"""The examples that push over a stream, against a real fleet of two replicas."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine_adapter.models import make_model
from trainer_side import Client
from updater.demo.processes import Children, free_port

ROOT = Path(__file__).resolve().parents[2]
HANG_S = 600.0  # only a hang reaches it
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(3 * HANG_S)]


@dataclass(frozen=True)
class Fleet:
    url: str
    replicas: tuple[str, ...]
    model: Path


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    model = make_model(folder / "model")
    children = Children(folder)
    try:
        port, root = free_port(), ["--root", str(folder)]
        coordinator = children.start(
            "c", ["serve", "--new-fleet", "--port", str(port), "--state", str(folder / "s"), *root], port
        )
        children.wait_ready(coordinator, "/healthz")
        replicas = []
        for name in ("r1", "r2"):
            port = free_port()
            engine = ["engine", "--model", str(model), "--port", str(port), "--coordinator", coordinator.url, *root]
            replicas.append(children.start(name, engine, port))
        for replica in replicas:
            children.wait_ready(replica)
        yield Fleet(coordinator.url, tuple(replica.url for replica in replicas), model)
    finally:
        assert children.stop() == []


def run(*command: str | Path) -> str:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("LIVEWEIGHTS_")}
    kept |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ran = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.case("B194")
def test_fsdp2_trainers_broadcast_to_two_replicas(fleet: Fleet) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    where = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    out = run(*torchrun, *where, "examples/03_broadcast_fsdp2.py", fleet.model, fleet.url, "3")
    assert [line.partition(":")[0] for line in out.splitlines()] == ["0-1", "0-2", "0-3"]
    with Client(fleet.url) as client:
        receipts = client.history()
    assert [(each.version, each.outcome, each.proof) for each in receipts[:3]] == [
        (f"0-{step}", "committed", "digests") for step in (3, 2, 1)
    ]
    for receipt in receipts[:3]:
        assert len(set(receipt.observed.values())) == 1
        assert len(receipt.observed) == 2  # both replicas hold the same content
        assert receipt.tensors_changed > 0
    assert len({next(iter(receipt.observed.values())) for receipt in receipts[:3]}) == 3


def test_a_colocated_trainer_shares_memory(fleet: Fleet) -> None:
    with Client(fleet.url) as client:
        before = client.version()
        script = "examples/06_colocated_shared_memory.py"
        out = run(sys.executable, script, fleet.model, "10", fleet.url, fleet.replicas[0]).splitlines()
        after, (back, update, *_) = client.version(), client.history()
    assert [line.split(":")[0] for line in out[1::2]] == ["answered by 0-10", f"answered by {before.version}"]
    assert (update.version, update.outcome, update.proof) == ("0-10", "committed", "digests")
    assert (back.kind, back.outcome, back.bytes_read) == ("rollback", "committed", 0)
    assert (after.version, after.digest) == (before.version, before.digest)
