"""One end of a stream as a process: `python shared_memory_program.py send|receive`, told what to do line by line.

Model: `tensors(seed)`, in buckets of 4 KiB. Each line in is a JSON object, each answer one too:

    send     {"do": "begin"} -> {"address", "session"}; {"do": "send", "seats", "seed", "hold"} -> {"error"}
    receive  {"offer", "number", "seed", "hold"} -> {"error", "equal"}

`hold`: number of a bucket at which it says {"held": true} and waits for another line (-1: none). `error`: code, or "".
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from transports.base import Box, Read
from transports.buckets import Chunk, StreamPlan
from transports.contract import digests, noise
from transports.shared_memory import SharedMemoryHub, SharedMemorySender
from transports.stream import StreamSource, pack
from transports.stream_testing import manifest_of, specs_of, targets_of
from updater import wire
from updater.core.errors import LiveweightsError
from updater.core.participant import Seats, StreamOffer

#: No receiver here loses patience first: the one that is to, is in the process of the test.
PATIENCE_S = 60.0


def tensors(seed: int) -> dict[str, torch.Tensor]:
    return {f"t{at}": noise("BF16", (64, 100), 10 * seed + at) for at in range(4)}


def plan_of(held: dict[str, torch.Tensor]) -> StreamPlan:
    return StreamPlan(specs_of(held), 4096)


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def hold() -> None:
    say(held=True)
    sys.stdin.readline()


def send(sender: SharedMemorySender, order: dict[str, Any]) -> str:
    held, seats = tensors(order["seed"]), tuple(wire.build(Seats, each) for each in order["seats"])
    plan = plan_of(held)
    specs = {spec.name: spec for spec in plan.tensors}
    try:
        sender.open(StreamOffer("shared_memory", sender.address, sender.session, seats), plan, PATIENCE_S)
        for bucket in plan.buckets:
            if bucket.index == order["hold"]:
                hold()
            pack(bucket, sender.buffer(bucket, PATIENCE_S), held, specs)
            sender.send(bucket, PATIENCE_S)
        sender.finish(PATIENCE_S, normal=True)
    except LiveweightsError as error:
        return error.code
    return ""


def receive(hub: SharedMemoryHub, order: dict[str, Any]) -> tuple[str, bool]:
    held = tensors(order["seed"])
    manifest = manifest_of(specs_of(held))
    receiver = hub.receiver(wire.build(StreamOffer, order["offer"]), order["number"])
    plan, holding = plan_of(held), order["hold"]
    at = (plan.buckets[holding].chunks[0].name, plan.buckets[holding].chunks[0].box) if holding >= 0 else None
    source = StreamSource("shared_memory", manifest, Holding(receiver, at))
    targets = targets_of(source.specs)
    try:
        source.read([Read(name, Box.whole(target.shape), target) for name, target in targets.items()])
    except LiveweightsError as error:
        return error.code, False
    finally:
        source.close()
    return "", digests(targets) == digests(held)


class Holding:
    """A receiver that stands still before it takes one chunk."""

    def __init__(self, inner: Any, at: tuple[str, Box] | None) -> None:
        self.inner, self.at = inner, at

    def receive(self, expected: Any, take: Any, progress: Any, should_stop: Any) -> int:
        def held(chunk: Chunk, data: torch.Tensor) -> None:
            if (chunk.name, chunk.box) == self.at:
                hold()
            take(chunk, data)

        received: int = self.inner.receive(expected, held, progress, should_stop)
        return received

    def close(self, *, normal: bool) -> None:
        self.inner.close(normal=normal)


def main() -> int:
    torch.set_num_threads(1)
    if sys.argv[1] == "send":
        sender = SharedMemorySender(patience_s=PATIENCE_S)
        for line in sys.stdin:
            order = json.loads(line)
            if order["do"] == "begin":
                say(address=sender.address, session=sender.session)
            else:
                say(error=send(sender, order))
        sender.close()
    else:
        hub = SharedMemoryHub()
        say(ready=True)
        for line in sys.stdin:
            error, equal = receive(hub, json.loads(line))
            say(error=error, equal=equal)
        hub.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
