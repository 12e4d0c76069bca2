"""One end of a stream in a process of its own: jobs come as JSON lines on stdin, what happens goes to stdout.

`python stream_program.py send KIND` or `... receive KIND`. A job's `hold` says where to stand still until any line
comes: a sender before it "open"s; a receiver when it is shown the "plan", or at the tensor of that name. The job
{"look": true} is answered with what a receiver holds.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from transports.base import Box, Read
from transports.buckets import Chunk, StreamPlan
from transports.digest import tensor_digest, to_hex
from transports.media.memfd import NAME
from transports.registry import make_hub, make_sender
from transports.stream import StreamReceiver, StreamSource
from transports.testing.transfer import manifest_of, send_all, specs_of, targets_of
from updater.core.errors import LiveweightsError
from updater.core.participant import StreamOffer
from updater.protocol import wire


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
    say(failures=failures, **held(), **rest)


def held() -> dict[str, int]:
    gc.collect()
    mapped = sum(NAME in line for line in Path("/proc/self/maps").read_text().splitlines())
    threads, descriptors = (len(os.listdir(f"/proc/self/{each}")) for each in ("task", "fd"))
    return {"threads": threads, "descriptors": descriptors, "mapped": mapped}


def send(kind: str) -> None:
    sender = make_sender(kind)
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
            failed = error.with_traceback(None)
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

        def stand(chunk: Chunk, data: torch.Tensor) -> None:
            if chunk.name == self.where:
                hold(chunk.name)
            take(chunk, data)

        return self.inner.receive(judge, stand, progress, should_stop)

    def close(self, *, normal: bool) -> None:
        self.inner.close(normal=normal)


def receive(kind: str) -> None:
    hub: Any = make_hub(kind)
    say(pid=os.getpid())
    for line in sys.stdin:
        job = json.loads(line)
        if "look" in job:
            say(**held())
            continue
        tensors = model(*job["model"])
        offer, manifest = wire.build(StreamOffer, job["offer"]), manifest_of(specs_of(tensors))
        hub.patience_s = job["patience_s"]
        source = StreamSource(kind, manifest, Held(hub.receiver(offer, job["number"]), job["hold"]))
        arrived, failed = targets_of(source.specs), None
        try:
            source.read([Read(name, Box.whole(t.shape), t) for name, t in arrived.items()])
        except LiveweightsError as error:
            failed = error.with_traceback(None)
        finally:
            source.close()
        right = failed is None and all(
            to_hex(tensor_digest(arrived[name])) == to_hex(tensor_digest(tensor)) for name, tensor in tensors.items()
        )
        del source, arrived
        outcome(failed, right=right)
    hub.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"send": send, "receive": receive}[sys.argv[1]](sys.argv[2])
