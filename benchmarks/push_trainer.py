"""One process of the trainer of `bench_push`, under torchrun: bare work and pushes in turns, times and memory."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from benchmarks.watching import held, peak_bytes
from trainer_side.publishing.pusher import Pusher
from transports.digest import tensor_digest
from transports.dtypes import DTYPE_NAMES


class Bench:
    """The same model, walked and sent by hand and by `push`. Every rank makes the same calls."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.bfloat16)
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=self.mesh)
        fully_shard(self.model, mesh=self.mesh)
        self.tensors = dict(self.model.named_parameters())
        self.bytes = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())
        self.largest = max(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())
        self.shard = sum(tensor.to_local().nbytes for tensor in self.tensors.values())
        gc.collect()
        self.before = held("self").resident - self.shard  # libraries

    def bare(self) -> dict[str, Any]:
        """Seconds of gathering every tensor, of broadcasting as many bytes to one process, of digesting them."""
        if not self.asked.bare:
            return {}
        bucket = torch.ones(min(self.asked.bucket_bytes, self.bytes), dtype=torch.uint8)
        found = {"walk": self._timed(self._walk)}
        found["broadcast"] = self._timed(lambda: self._broadcast(bucket))
        found["digest"] = self._timed(self._digest) if dist.get_rank() == 0 else self._timed(lambda: None)
        return {"bare": found}

    def push(self, pusher: Pusher, version: str) -> dict[str, Any]:
        """Times of one push, and the most memory that this process held during it, beside libraries."""
        with torch.no_grad():  # something is new in every version
            next(iter(self.tensors.values())).mul_(1.01)
        Path("/proc/self/clear_refs").write_text("5")
        dist.barrier()
        began = time.perf_counter()
        receipt = pusher.push(self.model, version)
        seconds = time.perf_counter() - began
        peaks = self.gathered(peak_bytes("self") - held("self").mapped_files - self.before)
        pause_ms = receipt.pause.pause_ms if receipt.pause else 0.0
        return {"seconds": seconds, "pause_ms": pause_ms, "phases_ms": receipt.phases_ms, "peaks": peaks}

    def gathered(self, value: int) -> list[int]:
        """Of every rank."""
        mine = torch.tensor([value])
        values = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(values, mine)
        return [int(each) for each in values]

    def _walk(self) -> None:
        with torch.no_grad():
            for tensor in self.tensors.values():
                tensor.full_tensor()

    def _broadcast(self, bucket: torch.Tensor) -> None:
        left = self.bytes
        while left:
            size = min(left, bucket.numel())
            dist.broadcast(bucket[:size], src=0)
            left -= size

    def _digest(self) -> None:
        """Of tensors of the same shapes: what is in them makes no difference."""
        room = torch.ones(self.largest, dtype=torch.uint8)
        for tensor in self.tensors.values():
            size = tensor.numel() * tensor.element_size()
            tensor_digest(room[:size].view(tensor.dtype).view(tensor.shape), DTYPE_NAMES[tensor.dtype])

    def _timed(self, work: Callable[[], None]) -> float:
        dist.barrier()
        began = time.perf_counter()
        work()
        dist.barrier()
        return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--pushed", required=True, help="folder for the disk transport")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--bucket-bytes", type=int, required=True)
    parser.add_argument("--first-step", type=int, required=True)
    parser.add_argument("--bare", action="store_true", help="do the bare work as well")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    bench = Bench(asked)
    kinds: dict[Any, dict[str, Any]] = {
        "disk": {"directory": asked.pushed},
        "broadcast": {"bucket_bytes": asked.bucket_bytes},
        "shared_memory": {"bucket_bytes": asked.bucket_bytes},
    }
    found: dict[str, Any] = {}
    for number, (kind, options) in enumerate(kinds.items()):
        steps = [f"0-{asked.first_step + number * 1000 + turn}" for turn in range(asked.rounds + 1)]
        with Pusher(asked.coordinator, transport=kind, **options) as pusher:
            # The first round is warm-up: groups form, buffers are touched, modules are loaded.
            found[kind] = [bench.bare() | bench.push(pusher, step) for step in steps][1:]
        gc.collect()
        found[kind][-1]["kept"] = bench.gathered(held("self").resident - bench.before)
    if dist.get_rank() == 0:
        sizes = {"bytes": bench.bytes, "largest": bench.largest, "shard": bench.shard}
        asked.out.write_text(json.dumps(found | sizes))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    # FSDP2 keeps torch's default group, whose threads may be inside torch when the interpreter is finalised: then the
    # process dies of SIGABRT with all its work done (pytorch issue 190489). There is nothing left to finalise here.
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
