"""Many updates in a row over every transport: does anything grow?

A trainer (this process), a coordinator, a front and its ranks; after every update the memory, file descriptors,
threads and shared memory of all of them. Once the trainer's pusher is closed counts must be what they were before it;
while it is used they may move by what pools of connections and threads do. Memory may move by half of what a leak of
the smallest matrix at every update would add up to.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file

from benchmarks.common import Report
from benchmarks.watching import Sample, sample
from engine_adapter.models import ModelShape, make_versions
from trainer_side import Client
from trainer_side.publishing.pusher import Pusher
from updater.demo.processes import Children, free_port

KINDS = ("disk", "broadcast", "shared_memory")
#: Matrices of 0.5 to 2 MiB in bfloat16.
SHAPE = ModelShape(hidden=1024, layers=1, heads=4, kv_heads=4, head_dim=64, intermediate=1024)

BUCKET_BYTES = 4 << 20
#: Pools of connections and threads grow to what ever overlapped, which is not many: far fewer than updates.
SLACK = 3
#: Idle connections of the servers are closed after 5 s.
REST_S = 7.0


@dataclass(frozen=True, slots=True)
class Party:
    """All processes that take part. `pids`: by role. `temporary`: where all of them put temporary files."""

    coordinator: str
    replica: str
    versions: tuple[dict[str, torch.Tensor], ...]
    pids: dict[str, int]
    temporary: Path
    pushed: Path

    @property
    def smallest_matrix(self) -> int:
        return min(tensor.nbytes for tensor in self.versions[0].values() if tensor.dim() > 1)


@contextmanager
def party(work: Path, tp: int) -> Iterator[Party]:
    """A fleet of one embedded replica, and this process as the trainer."""
    models = make_versions(work / "models", 2, SHAPE)
    temporary = work / "tmp"
    temporary.mkdir()
    children = Children(work)
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"], tempfile.tempdir = str(temporary), None
    try:
        port = free_port()
        serve = ["serve", "--new-fleet", "--port", str(port), "--state", str(work / "state"), "--root", str(work)]
        coordinator = children.start("coordinator", serve, port)
        children.wait_ready(coordinator, "/healthz")
        port = free_port()
        engine = ["engine", "--model", str(models[0]), "--tp", str(tp), "--port", str(port), "--root", str(work)]
        replica = children.start("replica", [*engine, "--coordinator", coordinator.url], port)
        children.wait_ready(replica)
        with Client(coordinator.url) as client:
            ranks = [rank["pid"] for member in client.fleet().members for rank in member.ranks]
        pids = {"trainer": os.getpid(), "coordinator": coordinator.process.pid, "front": replica.process.pid}
        pids |= {f"rank {number}": pid for number, pid in enumerate(ranks)}
        versions = tuple(load_file(model / "model.safetensors") for model in models)
        yield Party(coordinator.url, replica.url, versions, pids, temporary, work / "pushed")
    finally:
        left = children.stop()
        os.environ.pop("TMPDIR")
        if before is not None:
            os.environ["TMPDIR"] = before
        tempfile.tempdir = None
        if left:
            raise RuntimeError("; ".join(left))


@contextmanager
def pushers(all: Party, kinds: Sequence[str]) -> Iterator[dict[str, Pusher]]:
    """One per kind, kept for all updates as a trainer keeps it."""
    with ExitStack() as stack:
        found = {}
        for kind in kinds:
            options: dict[str, Any] = {"directory": all.pushed} if kind == "disk" else {"bucket_bytes": BUCKET_BYTES}
            found[kind] = stack.enter_context(Pusher(all.coordinator, transport=kind, **options))
        yield found


@dataclass(frozen=True, slots=True)
class Growth:
    """What is more after many updates than before them. Roles that are not named hold no more.

    `memory`: bytes, of every role. `meanwhile`: between the first and the last updates through the same pushers, in
    (descriptors, threads, mapped memfds); `afterwards`: once these are closed, beside a time before them.
    """

    memory: dict[str, int]
    meanwhile: dict[str, tuple[Any, Any]]
    afterwards: dict[str, tuple[Any, Any]]


def soak(all: Party, kinds: Sequence[str], warm: int, more: int) -> Growth:
    """`warm` updates that are not judged, then as many again and `more`, through the kinds in turns."""
    stream = _Updates(all)
    with pushers(all, kinds) as by:
        stream.publish(by, warm)
    before = _at_rest(stream)
    with pushers(all, kinds) as by:
        samples = stream.publish(by, warm + more)
    first, last = (_least(part) for part in (samples[warm : warm + 5], samples[-5:]))
    after = _at_rest(stream, before)
    memory = {role: last.processes[role].resident - first.processes[role].resident for role in all.pids}
    return Growth(memory, more_counts(first, last, SLACK), more_counts(before, after, SLACK))


class _Updates:
    """One after the other, in one run of versions, each through the next pusher; every tenth is asked for."""

    def __init__(self, all: Party) -> None:
        self.all, self.run, self.done = all, "", 0

    def publish(self, by: dict[str, Pusher], count: int) -> list[Sample]:
        """A sample after each."""
        samples, ways = [], list(by.values())
        for _ in range(count):
            version, policy = (f"{self.run}-{self.done}", {}) if self.run else (0, {"new_run": True})
            weights = self.all.versions[(self.done // len(ways)) % 2]
            receipt = ways[self.done % len(ways)].push(weights, version, policy=policy)
            self.run = receipt.version.partition("-")[0]
            if self.done % 10 == 0:
                _answers(self.all.replica, receipt.version)
            self.done += 1
            samples.append(self.sample())
        return samples

    def sample(self) -> Sample:
        return sample(self.done, self.all.pids, self.all.temporary)


def _at_rest(updates: _Updates, wanted: Sample | None = None) -> Sample:
    """The least of everything within some seconds, in which idle connections end; sooner, where it is as `wanted`."""
    until = time.monotonic() + REST_S * (1 if wanted is None else 3)
    least = updates.sample()
    while time.monotonic() < until and (wanted is None or more_counts(wanted, least, 0)):
        time.sleep(0.1)
        least = least.least(updates.sample())
    return least


def _least(samples: Sequence[Sample]) -> Sample:
    found = samples[0]
    for each in samples[1:]:
        found = found.least(each)
    return found


def _answers(replica: str, version: str) -> None:
    body = {"prompt": "once upon a time", "max_tokens": 2, "liveweights": {"exact_version": version}}
    httpx.post(f"{replica}/v1/completions", json=body, timeout=60.0, trust_env=False).raise_for_status()


def more_counts(early: Sample, late: Sample, slack: int) -> dict[str, tuple[Any, Any]]:
    """role -> counts of both samples, where one of them is more than `slack` higher; and files, shm."""
    found: dict[str, tuple[Any, Any]] = {}
    for role, held in late.processes.items():
        before = early.processes[role].counts
        if any(now > then + slack for now, then in zip(held.counts, before, strict=True)):
            found[role] = (before, held.counts)
    found |= {"files": (early.files, late.files)} if late.files > early.files + slack else {}
    found |= {"shm": (early.shm, late.shm)} if late.shm > early.shm + slack else {}
    return found


def allowed_bytes(all: Party, updates: int) -> int:
    """Half of what a leak of the smallest matrix per update would come to."""
    return all.smallest_matrix * updates // 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--kind", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--small", action="store_true", help="a dozen updates on one rank: does it run at all")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # nothing is left running
    updates, tp = (12, 1) if chosen.small else (chosen.updates, chosen.tp)
    warm = min(20, updates // 3)
    torch.set_num_threads(1)
    report = Report("many updates")
    with tempfile.TemporaryDirectory(prefix="liveweights-bench-") as folder, party(Path(folder), tp) as all:
        for kind in chosen.kind:
            growth = soak(all, [kind], warm, updates - warm)
            report.add(
                f"{kind}: memory grown in updates {warm} to {updates} / allowed",
                max(growth.memory.values()) / allowed_bytes(all, updates - warm),
                goal=1.0,
                at_most=True,
                detail=", ".join(f"{role} {size / 2**20:+.2f} MiB" for role, size in growth.memory.items()),
            )
            held = growth.meanwhile | growth.afterwards
            report.add(
                f"{kind}: who holds more descriptors, threads, mappings or files after {updates} updates",
                len(held),
                goal=0.0,
                at_most=True,
                detail="; ".join(f"{role} {early} -> {late}" for role, (early, late) in held.items()),
            )
    report.finish()


if __name__ == "__main__":
    main()
