"""A push from FSDP2 trainers, end to end over every transport, against the bare work of the same bytes.

Two trainer processes, a coordinator, and one embedded replica of one rank, all real. The bare work is what no push can
do without: gather every tensor, broadcast the bytes to one process, digest them once. A push also plans, votes on the
digest of what arrived, and publishes. Memory is measured in a second run, in which freed memory is given back at once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.big_models import make_big
from benchmarks.common import Report
from engine_adapter.models import make_model
from updater.demo.processes import Children, free_port

KINDS = ("disk", "broadcast", "shared_memory")
BUCKET_BYTES = 128 << 20
TRAINER_S = 1800.0
STOP_S = 60.0


#: Freed memory goes back to the system at once, so that what is resident is what is held.
GIVING_BACK = {
    "MALLOC_MMAP_THRESHOLD_": str(64 << 10),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 10),
    "MALLOC_ARENA_MAX": "1",
}


@contextmanager
def fleet(work: Path, model: Path) -> Iterator[str]:
    """The coordinator's address; it has one embedded replica of one rank."""
    children = Children(work)
    try:
        port = free_port()
        serve = ["serve", "--new-fleet", "--port", str(port), "--state", str(work / "state"), "--root", str(work)]
        coordinator = children.start("coordinator", serve, port)
        children.wait_ready(coordinator, "/healthz")
        port = free_port()
        engine = ["engine", "--model", str(model), "--port", str(port), "--coordinator", coordinator.url]
        small_cache = ["--option", "num_blocks=64", "--root", str(work)]
        children.wait_ready(children.start("replica", [*engine, *small_cache], port), deadline_s=300.0)
        yield coordinator.url
    finally:
        children.stop()


def train(work: Path, model: Path, url: str, bucket_bytes: int, **more: Any) -> dict[str, Any]:
    """What two processes of `push_trainer` found. `more`: its options, and `environment`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "-m", "benchmarks.push_trainer"]
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"} | more.pop("environment", {})
    switches = ["--bare"] if more.pop("bare", False) else []
    options = {"model": model, "coordinator": url, "pushed": work / "pushed", "bucket-bytes": bucket_bytes}
    options |= {"first-step": more.pop("first_step", 0), "out": work / "found.json"} | more
    command = [*launcher, *switches, *(part for name, value in options.items() for part in (f"--{name}", str(value)))]
    trainer = subprocess.Popen(command, env=os.environ | quiet)
    try:
        if trainer.wait(TRAINER_S):
            raise RuntimeError(f"the trainer ended with {trainer.returncode}")
    finally:
        if trainer.poll() is None:
            trainer.terminate()  # the launcher ends what it has launched
            trainer.wait(STOP_S)
    found: dict[str, Any] = json.loads((work / "found.json").read_text())
    return found


def speed(report: Report, found: dict[str, Any]) -> None:
    gigabytes = found["bytes"] / 1e9
    for kind in KINDS:
        runs = found[kind]
        bare = {part: min(run["bare"][part] for run in runs) for part in runs[0]["bare"]}
        seconds = min(run["seconds"] for run in runs)
        parts = " + ".join(f"{part} {value:.2f}" for part, value in bare.items())
        phases = min(runs, key=lambda run: run["seconds"])["phases_ms"]
        spent = ", ".join(f"{phase} {phases[phase] / 1e3:.2f}" for phase in ("planning", "staging", "verifying"))
        report.add(
            f"FSDP2: bare walk, broadcast and digest / push by {kind}",
            sum(bare.values()) / seconds,
            goal=0.6 if kind == "broadcast" else None,
            detail=f"({parts}) s / {seconds:.2f} s ({spent}), {gigabytes:.2f} GB",
        )
    pauses = {kind: median(run["pause_ms"] for run in found[kind]) for kind in KINDS}
    for kind in ("broadcast", "shared_memory"):
        report.add(
            f"pause of a push by {kind} / by disk",
            pauses[kind] / pauses["disk"],
            goal=1.5,
            at_most=True,
            detail=f"{pauses[kind]:.1f} ms / {pauses['disk']:.1f} ms (medians of {len(found['disk'])})",
        )


def memory(report: Report, found: dict[str, Any], bucket_bytes: int) -> None:
    room = found["shard"] + 2 * min(bucket_bytes, found["bytes"]) + 2 * found["largest"]
    for kind in KINDS:
        for rank in (0, 1):
            peak = max(run["peaks"][rank] for run in found[kind])
            kept = found[kind][-1]["kept"][rank] - found["shard"]
            report.add(
                f"peak memory of trainer {rank}, push by {kind} / (shard + 2 buckets + 2 largest tensors)",
                peak / room,
                goal=1.0,
                at_most=True,
                detail=f"{peak / 1e6:.0f} MB / {room / 1e6:.0f} MB; {kept / 1e6:.0f} MB beside the shard afterwards",
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket-bytes", type=int, default=BUCKET_BYTES)
    parser.add_argument("--small", action="store_true", help="half a megabyte: does it run at all")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # nothing is left running
    rounds, bucket_bytes = (1, 64 << 10) if chosen.small else (chosen.rounds, chosen.bucket_bytes)
    report = Report("push from FSDP2")
    with tempfile.TemporaryDirectory(prefix="liveweights-bench-") as folder:
        work = Path(folder)
        model = make_model(work / "model") if chosen.small else make_big(work / "model", chosen.gigabytes)
        with fleet(work, model) as url:
            found = train(work, model, url, bucket_bytes, rounds=rounds, bare=True)
            speed(report, found)
            if not chosen.small:  # figures of so little memory say nothing
                found = train(work, model, url, bucket_bytes, rounds=1, first_step=1_000_000, environment=GIVING_BACK)
            memory(report, found, bucket_bytes)
    report.finish()


if __name__ == "__main__":
    main()
