"""One end of a broadcast in a process of its own: jobs come as JSON lines on stdin, what happens goes to stdout.

`python broadcast_program.py send` or `... receive`. A job's `hold` says where to stand still until any line comes: a
sender before it "open"s; a receiver when it is shown the "plan", or at the tensor of that name.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from transports.base import Box, Read
from transports.broadcast import BroadcastHub, BroadcastSender
from transports.buckets import Chunk, StreamPlan
from transports.digest import tensor_digest, to_hex
from transports.stream import StreamReceiver, StreamSource
from transports.stream_testing import manifest_of, send_all, specs_of, targets_of
from updater import wire
from updater.core.errors import LiveweightsError
from updater.core.participant import StreamOffer


def model(seed: int, tensors: int, nbytes: int) -> dict[str, torch.Tensor]:
    """`nbytes`: of each. Made quickly: the others are waiting."""
    numbers = torch.arange(nbytes // 2, dtype=torch.int16)
    return {f"t{at}": numbers * (2 * (seed + at) + 1) for at in range(tensors)}


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def hold(where: str) -> None:
    say(at=where)
    sys.stdin.readline()


def outcome(error: LiveweightsError | None, **rest: Any) -> None:
    failures = [] if error is None else [[each.code, each.replica, each.rank] for each in error.failures]
    threads = len(os.listdir("/proc/self/task"))
    say(failures=failures, descriptors=len(os.listdir("/proc/self/fd")), threads=threads, **rest)


def send() -> None:
    sender = BroadcastSender()
    say(address=sender.address, session=sender.session)
    for line in sys.stdin:
        job = json.loads(line)
        tensors = model(*job["model"])
        plan = StreamPlan(specs_of(tensors), job["bucket_bytes"])
        if job["hold"] == "open":
            hold("open")
        failed = None
        try:
            send_all(sender, wire.build(StreamOffer, job["offer"]), plan, tensors, job["deadline_s"])
        except LiveweightsError as error:
            failed = error
        outcome(failed, session=sender.session, address=sender.address)


class Held:
    """A receiver that stands still where it is told."""

    def __init__(self, inner: StreamReceiver, where: str) -> None:
        self.inner, self.where = inner, where

    def receive(self, expected: Any, take: Any, progress: Any, should_stop: Any) -> int:
        def judge(plan: StreamPlan) -> None:
            if self.where == "plan":
                hold("plan")
            expected(plan)

        def held(chunk: Chunk, data: torch.Tensor) -> None:
            if chunk.name == self.where:
                hold(chunk.name)
            take(chunk, data)

        return self.inner.receive(judge, held, progress, should_stop)

    def close(self, *, normal: bool) -> None:
        self.inner.close(normal=normal)


def receive() -> None:
    hub = BroadcastHub()
    say(pid=os.getpid())
    for line in sys.stdin:
        job = json.loads(line)
        tensors = model(*job["model"])
        offer, manifest = wire.build(StreamOffer, job["offer"]), manifest_of(specs_of(tensors))
        hub.patience_s = job["patience_s"]
        held = Held(hub.receiver(offer, job["number"]), job["hold"])
        source = StreamSource("broadcast", manifest, held)
        arrived, failed = targets_of(source.specs), None
        try:
            source.read([Read(name, Box.whole(t.shape), t) for name, t in arrived.items()])
        except LiveweightsError as error:
            failed = error
        finally:
            source.close()
        right = failed is None and all(
            to_hex(tensor_digest(arrived[name])) == to_hex(tensor_digest(tensor)) for name, tensor in tensors.items()
        )
        outcome(failed, right=right)
    hub.close()


if __name__ == "__main__":
    {"send": send, "receive": receive}[sys.argv[1]]()
