"""One rank of a trainer of several whose source goes wrong where it is told to. Run by test_push_causes.

python -m tests.integration.push_causes_program RANK WORLD STORE URL CHECKPOINT DIRECTORY

Reads one JSON request per line, `{"transport", "version", "id", "story", "rank", "at"}`: the `story` happens on one
`rank` at the tensor of index `at`. Answers with one line: the outcome, or the error as this rank raised it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from trainer_side import Pusher
from trainer_side.sources import Part, PartsSource, as_source
from trainer_side.sources.source import WeightSource
from updater.core.errors import Aborted, Failure, LiveweightsError
from updater.protocol.manifest import TensorSpec

#: Of the group in which a rank waits for one that never comes. Far longer than any collective here takes.
LATE_S = 15


@dataclass
class Spoiled:
    """A source as it is, but for what happens at one tensor on one rank. `late`: for a collective of its own."""

    inner: WeightSource
    asked: Mapping[str, Any]
    state: Mapping[str, torch.Tensor]
    late: Any = None
    walked: int = 0

    @property
    def is_sender(self) -> bool:
        return self.inner.is_sender

    @property
    def group(self) -> Any:
        return self.inner.group

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self.inner.specs

    @property
    def ties(self) -> tuple[tuple[str, str], ...]:
        return self.inner.ties

    def digests(self) -> Mapping[str, str]:
        known = self.inner.digests()
        self._happens("digests", 0)
        return known

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        tensors = self.inner.tensors()
        for at in range(len(self.specs)):
            self._happens("before its collective", at)
            if self.late is not None:
                dist.all_reduce(torch.zeros(1), group=self.late)
            name, tensor = next(tensors)
            self._happens("after its collective", at)
            if self._here("ends early", at):
                return
            self.walked += 1
            yield name, tensor
        self._happens("after its collective", len(self.specs))

    def check_untouched(self) -> None:
        self.inner.check_untouched()
        if self.walked:
            self._happens("after the walk", 0)

    def _here(self, story: str, at: int) -> bool:
        return story == self.asked["story"] and dist.get_rank() == self.asked["rank"] and at == self.asked["at"]

    def _happens(self, moment: str, at: int) -> None:
        if self._here(f"steps {moment}", at):
            self.state[list(self.specs)[at]].add_(1)
        if self._here(f"raises {moment}", at):
            raise ValueError("the source is broken")
        if self._here(f"refuses {moment}", at):
            raise Aborted(Failure("read_failed", "the disk is broken"))
        if self._here(f"dies {moment}", at):
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Unreadable:
    """A part that cannot be digested here."""

    inner: Part

    @property
    def spec(self) -> TensorSpec:
        return self.inner.spec

    @property
    def watched(self) -> Sequence[torch.Tensor]:
        return self.inner.watched

    def share(self, sender: bool) -> int | None:
        raise ValueError("cannot be digested")

    def whole(self, sender: bool) -> torch.Tensor | None:
        return self.inner.whole(sender)


def source_of(full: Mapping[str, torch.Tensor], asked: Mapping[str, Any], mesh: DeviceMesh) -> Spoiled:
    group = dist.group.WORLD
    if asked["story"] in ("ends early", "raises before its collective"):  # the others wait in none, or in this one
        state = {name: tensor.clone() for name, tensor in full.items()}
        late = None if asked["story"] == "ends early" else dist.new_group(timeout=timedelta(seconds=LATE_S))
        return Spoiled(as_source(state, group=group), asked, state, late)
    state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in full.items()}
    source = as_source(state, group=group)
    if asked["story"] == "cannot digest" and dist.get_rank() == asked["rank"]:
        assert isinstance(source, PartsSource)
        parts = list(source._parts)
        parts[asked["at"]] = Unreadable(parts[asked["at"]])
        source = PartsSource(parts, source.ties, group=group)
    return Spoiled(source, asked, state)


def pushed(pusher: Pusher, source: Spoiled, asked: Mapping[str, Any]) -> dict[str, Any]:
    def progress(_bytes: int) -> None:
        if asked["story"] == "raises while it sends":
            raise ValueError("the caller's own code")

    try:
        receipt = pusher.push(source, asked["version"], id=asked["id"], progress=progress)
    except LiveweightsError as error:
        return {
            "error": type(error).__name__,
            "failures": [[each.code, each.rank, each.tensor, each.replica] for each in error.failures],
            "reason": None if error.receipt is None else error.receipt["reason"],
            "cause": type(error.__cause__).__name__,
        }
    return {"outcome": receipt.outcome, "version": receipt.version}


def main(rank: str, world: str, store: str, url: str, checkpoint: str, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    mesh = init_device_mesh("cpu", (int(world),))
    full = load_file(f"{checkpoint}/model.safetensors")
    pushers: dict[str, Pusher] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        kind = asked["transport"]
        if kind not in pushers:
            pushers[kind] = Pusher(url, "", transport=kind, bucket_bytes=4096, directory=directory)
        source = source_of(full, asked, mesh)
        print(json.dumps({**pushed(pushers[kind], source, asked), "walked": source.walked}), flush=True)
    for pusher in pushers.values():
        pusher.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
