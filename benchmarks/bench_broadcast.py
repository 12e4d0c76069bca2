"""Broadcast to two receivers against bare collectives of the same buckets, in the same processes.

`python -m benchmarks.bench_broadcast [--small] [--bucket-mib N ...]`. Goal: the transport alone, through its seams but
with nothing to pack or scatter, at 0.9 of the bare speed. Packing and scattering are printed beside it, with the
processor time that all processes took: on a machine with fewer cores than processes they compete with the kernel's
copies, and no order of the same work is faster than that time divided by the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore

from benchmarks.common import Report, best_of
from transports.base import Box, Read
from transports.broadcast import BroadcastHub, BroadcastSender
from transports.buckets import BUCKET_BYTES, StreamPlan
from transports.media.gloo import GlooGroup
from transports.stream.source import Scatter
from transports.testing.transfer import seats_for, send_all, targets_of
from updater.core.participant import StreamOffer
from updater.protocol import wire
from updater.protocol.manifest import TensorSpec

GOAL = 0.9
RECEIVERS = 2
_WAIT_S = 120.0
_HIDDEN, _INNER, _WORDS = 1024, 2816, 32000


def specs(layers: int) -> tuple[TensorSpec, ...]:
    """Of a decoder in bfloat16; 36 layers are a gigabyte."""
    found = [TensorSpec("embed", "BF16", (_WORDS, _HIDDEN)), TensorSpec("head", "BF16", (_WORDS, _HIDDEN))]
    for at in range(layers):
        found += [TensorSpec(f"{at}.{name}", "BF16", (_HIDDEN, _HIDDEN)) for name in "qkvo"]
        found += [TensorSpec(f"{at}.{name}", "BF16", (_INNER, _HIDDEN)) for name in ("gate", "up")]
        found += [TensorSpec(f"{at}.down", "BF16", (_HIDDEN, _INNER)), TensorSpec(f"{at}.norm", "BF16", (_HIDDEN,))]
    return tuple(found)


def bare_group(port: int, rank: int) -> GlooGroup:
    """The same kind of group as the transport's, formed through a store of torch's own."""
    patience = timedelta(seconds=_WAIT_S)
    store: Any = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=patience)
    return GlooGroup(store, rank, RECEIVERS + 1, "127.0.0.1", _WAIT_S)


def bare(group: GlooGroup, slots: list[torch.Tensor], plan: StreamPlan) -> None:
    for bucket in plan.buckets:
        group.wait(slots[bucket.index % 2][: bucket.nbytes])


def receive(number: int, port: int) -> None:
    """A receiving process: one word per line on stdin, one line back."""
    group, hub = bare_group(port, number + 1), BroadcastHub(_WAIT_S)
    targets: dict[str, torch.Tensor] = {}
    slots: list[torch.Tensor] = []
    for line in sys.stdin:
        job = json.loads(line)
        plan, offer = wire.build(StreamPlan, job["plan"]), wire.build(StreamOffer, job["offer"])
        wanted = {spec.name: spec for spec in plan.tensors}
        if job["what"] == "bare":
            if not slots or slots[0].numel() < plan.room:
                slots = [torch.zeros(plan.room, dtype=torch.uint8) for _ in range(2)]
            bare(group, slots, plan)
        else:
            scatter = None
            if job["what"] == "full":
                targets = targets or targets_of(wanted)
                scatter = Scatter(wanted, [Read(name, Box.whole(t.shape), t) for name, t in targets.items()])
            receiver = hub.receiver(offer, number)
            take = scatter.take if scatter is not None else lambda _chunk, _data: None
            receiver.receive(lambda _plan: None, take, lambda _bytes: None, lambda: False)
            receiver.close(normal=True)
        print(time.process_time(), flush=True)


class Bench:
    """The sending process."""

    def __init__(self, layers: int) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        command = [sys.executable, "-m", "benchmarks.bench_broadcast", "--port", str(self.store.port), "--receive"]
        self.receivers = [
            subprocess.Popen([*command, str(at)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for at in range(RECEIVERS)
        ]
        self.specs = specs(layers)
        self.tensors = {s.name: torch.full(s.shape, 1.5, dtype=torch.bfloat16) for s in self.specs}
        self.group = bare_group(self.store.port, 0)
        self.sender = BroadcastSender()
        self.nbytes = sum(spec.nbytes for spec in self.specs)
        self.used = 0.0  # processor time of all processes so far, in seconds

    def measure(self, bucket_bytes: int, rounds: int) -> tuple[list[float], list[float]]:
        """Seconds, and seconds of processor time: bare, transport alone, with packing and scattering."""
        plan = StreamPlan(self.specs, bucket_bytes)
        slots = [torch.zeros(plan.room, dtype=torch.uint8) for _ in range(2)]
        seats = seats_for(RECEIVERS)
        processor: dict[str, list[float]] = defaultdict(list)

        def together(what: str) -> None:
            offer = StreamOffer("broadcast", self.sender.address, self.sender.session, seats)
            job = json.dumps({"what": what, "plan": wire.plain(plan), "offer": wire.plain(offer)})
            for receiver in self.receivers:
                assert receiver.stdin is not None
                receiver.stdin.write(job + "\n")
                receiver.stdin.flush()
            if what == "bare":
                bare(self.group, slots, plan)
            elif what == "full":
                send_all(self.sender, offer, plan, self.tensors, _WAIT_S)
            else:
                self.send_unpacked(offer, plan)
            used = time.process_time()
            for receiver in self.receivers:
                assert receiver.stdout is not None
                used += float(receiver.stdout.readline())
            processor[what].append(used - self.used)
            self.used = used

        kinds = ("bare", "alone", "full")
        seconds = best_of(rounds, *(lambda what=what: together(what) for what in kinds))  # type: ignore[misc]
        return seconds, [min(processor[what]) for what in kinds]

    def send_unpacked(self, offer: StreamOffer, plan: StreamPlan) -> None:
        self.sender.open(offer, plan, _WAIT_S)
        for bucket in plan.buckets:
            self.sender.buffer(bucket, _WAIT_S)
            self.sender.send(bucket, _WAIT_S)
        self.sender.finish(_WAIT_S, normal=True)

    def close(self) -> None:
        self.sender.close()
        self.group.close()
        for receiver in self.receivers:
            receiver.kill()
            receiver.communicate()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--bucket-mib", type=int, nargs="*", default=[BUCKET_BYTES >> 20])
    parser.add_argument("--receive", type=int)
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.receive is not None:
        receive(options.receive, options.port)
        return
    bench = Bench(2 if options.small else 36)
    report = Report(f"Broadcast to {RECEIVERS} receivers, {bench.nbytes / 1e9:.2f} GB")
    for mib in options.bucket_mib:
        alone, whole = (f"broadcast / bare, buckets of {mib} MiB{end}" for end in ("", ", with pack and scatter"))
        (bare_s, alone_s, full_s), processor = bench.measure(mib << 20, 2 if options.small else 4)
        speed = f"bare {bench.nbytes / bare_s / 1e9:.2f} GB/s"
        report.add(alone, bare_s / alone_s, goal=GOAL, detail=f"{speed}, here {bench.nbytes / alone_s / 1e9:.2f} GB/s")
        shares = " / ".join(f"{used * 1e9 / bench.nbytes:.2f}" for used in processor)
        least_s = processor[-1] / len(os.sched_getaffinity(0))
        detail = f"{bench.nbytes / full_s / 1e9:.2f} GB/s; processor s/GB: bare / alone / full {shares}"
        report.add(whole, bare_s / full_s, detail=f"{detail}, so at most {bare_s / least_s:.2f}")
    bench.close()
    report.finish()


if __name__ == "__main__":
    main()
