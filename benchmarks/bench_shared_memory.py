"""Shared memory against memcpy of the same bytes: from a sender's full buffers into the targets of a receiver process.

The receiver copies the same bytes from its own memory into the same targets, in turns with the transfers. What packing
costs the sender, and a push whose packing overlaps with the receiver's copies, are printed beside it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import torch

from benchmarks.common import Report
from transports.base import Box, Read
from transports.buckets import StreamPlan
from transports.dtypes import TORCH_DTYPES
from transports.shared_memory import SharedMemoryHub, SharedMemorySender
from transports.stream import StreamSource, pack
from updater.core.participant import Seats, StreamOffer
from updater.protocol import wire
from updater.protocol.manifest import Manifest, TensorEntry, TensorSpec

DEADLINE_S = 60.0
COLUMNS = 4096
#: Bucket size -> goal. The smallest is printed to show what handing over costs: a turn on a core, twice per bucket.
BUCKETS = {512 << 20: 0.8, 64 << 20: 0.8, 16 << 20: None}


def specs_for(nbytes: int) -> tuple[TensorSpec, ...]:
    """bf16 matrices of at most 32 MiB with a norm each."""
    rows = min(COLUMNS, max(1, nbytes // (4 * 2 * COLUMNS)))
    count = max(1, nbytes // (rows * COLUMNS * 2))
    shapes = ((f"{at}.weight", (rows, COLUMNS)) for at in range(count))
    return tuple(spec for name, shape in shapes for spec in _pair(name, shape))


def _pair(name: str, shape: tuple[int, int]) -> tuple[TensorSpec, TensorSpec]:
    return TensorSpec(name, "BF16", shape), TensorSpec(f"{name}.norm", "BF16", shape[1:])


def filled(specs: tuple[TensorSpec, ...], value: float) -> dict[str, torch.Tensor]:
    return {spec.name: torch.full(spec.shape, value, dtype=TORCH_DTYPES[spec.dtype]) for spec in specs}


class Receiver:
    """The other process, from here."""

    def __init__(self, nbytes: int) -> None:
        command = [sys.executable, "-m", "benchmarks.bench_shared_memory", "--receive", str(nbytes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, line: str) -> None:
        _pipe(self._process.stdin).write(f"{line}\n")
        _pipe(self._process.stdin).flush()

    def seconds(self) -> float:
        return float(_pipe(self._process.stdout).readline() or "nan")

    def copy(self) -> float:
        """Seconds that memcpy took there."""
        self.tell("copy")
        return self.seconds()

    def close(self) -> None:
        _pipe(self._process.stdin).close()
        self._process.wait(DEADLINE_S)
        _pipe(self._process.stdout).close()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    if pipe is None:
        raise RuntimeError("no pipe")
    return pipe


def receive(nbytes: int) -> None:
    """What the other process does: lines in, seconds out."""
    specs = specs_for(nbytes)
    targets, own = filled(specs, 0.0), filled(specs, 1.0)
    manifest = Manifest(tuple(sorted((TensorEntry(s.name, s.dtype, s.shape) for s in specs), key=lambda e: e.name)))
    reads = [Read(name, Box.whole(target.shape), target) for name, target in targets.items()]
    hub = SharedMemoryHub()
    for line in sys.stdin:
        began = time.perf_counter()
        if line.strip() == "copy":
            for name, target in targets.items():
                target.copy_(own[name])
        else:
            source = StreamSource("shared_memory", manifest, hub.receiver(wire.decode(StreamOffer, line), 0))
            source.read(reads)
            source.close()
        print(time.perf_counter() - began, flush=True)
    hub.close()


@contextmanager
def sending(receiver: Receiver, sender: SharedMemorySender, plan: StreamPlan) -> Iterator[None]:
    """An update that has been agreed on."""
    offer = StreamOffer("shared_memory", sender.address, sender.session, (Seats("r", "life", 0, 1),))
    receiver.tell(wire.encode(offer).decode())
    sender.open(offer, plan, DEADLINE_S)
    yield
    receiver.seconds()


def transfer(receiver: Receiver, sender: SharedMemorySender, plan: StreamPlan) -> float:
    """Seconds from buffers that are full until all targets are."""
    with sending(receiver, sender, plan):
        began = time.perf_counter()
        for bucket in plan.buckets:
            sender.buffer(bucket, DEADLINE_S)
            sender.send(bucket, DEADLINE_S)
        sender.finish(DEADLINE_S, normal=True)
        return time.perf_counter() - began


def push(
    receiver: Receiver, sender: SharedMemorySender, plan: StreamPlan, weights: dict[str, torch.Tensor]
) -> tuple[float, float]:
    """Seconds of the whole, and of packing alone."""
    specs, packing = {spec.name: spec for spec in plan.tensors}, 0.0
    with sending(receiver, sender, plan):
        began = time.perf_counter()
        for bucket in plan.buckets:
            buffer = sender.buffer(bucket, DEADLINE_S)
            ready = time.perf_counter()
            pack(bucket, buffer, weights, specs)
            packing += time.perf_counter() - ready
            sender.send(bucket, DEADLINE_S)
        sender.finish(DEADLINE_S, normal=True)
        return time.perf_counter() - began, packing


def measure(
    report: Report,
    receiver: Receiver,
    weights: dict[str, torch.Tensor],
    limit: int,
    rounds: int,
    goal: float | None,
) -> None:
    specs = tuple(TensorSpec(name, "BF16", tuple(tensor.shape)) for name, tensor in weights.items())
    plan, sender = StreamPlan(specs, limit), SharedMemorySender()
    moved = copied = pushed = packed = float("inf")
    for turn in range(rounds + 1):
        results = transfer(receiver, sender, plan), receiver.copy(), *push(receiver, sender, plan, weights)
        if turn:
            moved, copied, pushed, packed = (
                min(a, b) for a, b in zip((moved, copied, pushed, packed), results, strict=True)
            )
    sender.close()
    label = f"{limit >> 20} MiB buckets" if limit >= 1 << 20 else f"{limit >> 10} KiB buckets"
    detail = f"{plan.nbytes / moved / 1e9:.1f} against {plan.nbytes / copied / 1e9:.1f} GB/s"
    report.add(f"memcpy / shared memory, {label}", copied / moved, goal=goal, detail=detail)
    report.add(f"memcpy / packing, {label}", copied / packed, detail=f"{plan.nbytes / packed / 1e9:.1f} GB/s")
    report.add(f"memcpy / push with packing, {label}", copied / pushed, detail=f"{pushed * 1e3:.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a few megabytes: does it run at all")
    parser.add_argument("--receive", type=int, default=0, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.receive:
        receive(chosen.receive)
        return
    nbytes = 8 << 20 if chosen.small else int(chosen.gigabytes * 1e9)
    report, receiver = Report("shared memory"), Receiver(nbytes)
    weights = filled(specs_for(nbytes), 1.0)
    for limit, goal in BUCKETS.items():
        if chosen.small:
            measure(report, receiver, weights, limit // 256, 1, None)
        else:
            measure(report, receiver, weights, limit, chosen.rounds, goal)
    receiver.close()
    report.finish()


if __name__ == "__main__":
    main()
