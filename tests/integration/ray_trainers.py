"""Ranks of a trainer as Ray actors: FSDP2 and Megatron-core, over a gloo group of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WORLD = 2


class TrainerRank:
    """`store`: a file that does not exist yet, through which the ranks find each other."""

    def __init__(self, rank: int, store: str, coordinator: Any) -> None:
        import torch
        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        self._rank, self._coordinator = rank, coordinator
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)

    def fsdp2(self, model: str, step: int, **options: Any) -> dict[str, Any]:
        """Load the checkpoint, shard it, publish it."""
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in loaded.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(loaded, mesh=mesh)
        return self._pushed(loaded, step, options)

    def megatron(self, model: str, step: int, **options: Any) -> dict[str, Any]:
        """A GPTModel at TP=2 that holds the checkpoint."""
        sys.path.insert(0, str(HERE))
        from megatron.core import parallel_state
        from megatron_program import Trained

        from trainer_side.megatron.testing import without_cuda

        without_cuda()
        job = {"model": model, "sizes": {"tp": WORLD}, "dtype": "bfloat16", "padding": 0.0}
        try:
            return self._pushed(Trained(job, self._rank).source(), step, options)
        finally:
            parallel_state.destroy_model_parallel()

    def _pushed(self, weights: Any, step: int, options: dict[str, Any]) -> dict[str, Any]:
        from trainer_side import push
        from updater.ray.calls import address_of

        return push(weights, step, url=str(address_of(self._coordinator)), **options).model_dump(mode="json")
