"""One rank of a trainer of several: pushes a sharded checkpoint again and again and says what each push came to.

python -m tests.integration.stream_ranks RANK WORLD STORE URL CHECKPOINT DIRECTORY

Reads one JSON request per line, `{"transport", "version", "story"}`, and answers with one: the receipt's outcome or the
error's codes, and what this rank was given.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trainer_side import Pusher
from trainer_side.sources import as_source
from trainer_side.sources.source import WeightSource
from updater.core.errors import LiveweightsError
from updater.protocol.manifest import TensorSpec


class Watched:
    """A source as it is, that counts what it hands out; `story`: what goes wrong on the way."""

    def __init__(self, inner: WeightSource, story: str, state: Mapping[str, torch.Tensor]) -> None:
        self._inner, self._story, self._state = inner, story, state
        self.walked, self.given, self.most = 0, 0, 0

    @property
    def is_sender(self) -> bool:
        return self._inner.is_sender

    @property
    def group(self) -> Any:
        return self._inner.group

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self._inner.specs

    @property
    def ties(self) -> tuple[tuple[str, str], ...]:
        return self._inner.ties

    def digests(self) -> Mapping[str, str]:
        return self._inner.digests()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        for name, tensor in self._inner.tensors():
            self.walked += 1
            self.given += tensor is not None
            if self._story == "other_rank_steps" and dist.get_rank() == 1 and self.walked == 3:
                self._state[name].add_(1)
            if self._story == "wrong_shape" and tensor is not None and self.walked == 3:
                tensor = tensor[:1]
            yield name, tensor

    def check_untouched(self) -> None:
        self._inner.check_untouched()


def main(rank: str, world: str, store: str, url: str, checkpoint: str, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    mesh = init_device_mesh("cpu", (int(world),))
    full = load_file(f"{checkpoint}/model.safetensors")
    for line in sys.stdin:
        asked = json.loads(line)
        state: dict[str, torch.Tensor] = {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in full.items()}
        source = Watched(as_source(state), asked["story"], state)
        with Pusher(url, "", transport=asked["transport"], bucket_bytes=4096, directory=directory) as pusher:
            told = _push(pusher, source, asked, state)
        print(json.dumps({**told, "walked": source.walked, "given": source.given, "names": len(full)}), flush=True)
    dist.destroy_process_group()


def _push(pusher: Pusher, source: Watched, asked: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    try:
        if asked["story"] == "in_the_background":
            publishing = pusher.push_async(source, asked["version"])
            for tensor in state.values():
                assert isinstance(tensor, DTensor)
                tensor.to_local().zero_()
            dist.barrier()  # the trainer's own collectives go on meanwhile
            receipt = asyncio.run(_receipt(publishing))
        else:
            receipt = pusher.push(source, asked["version"])
    except LiveweightsError as error:
        failures = [[failure.code, failure.tensor] for failure in error.failures]
        return {"error": type(error).__name__, "failures": failures, "has_receipt": error.receipt is not None}
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("liveweights-watch")]
    return {"outcome": receipt.outcome, "version": receipt.version, "observed": receipt.observed, "left": left}


async def _receipt(publishing: Any) -> Any:
    return await publishing


if __name__ == "__main__":
    main(*sys.argv[1:])
