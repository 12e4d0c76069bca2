"""A Megatron-core trainer, tensor-parallel over two processes, publishes every step under Hugging Face names.

    liveweights serve &
    liveweights engine --model MODEL --port 8801 --coordinator http://127.0.0.1:8700 &
    torchrun --nproc-per-node 2 examples/04_megatron.py MODEL http://127.0.0.1:8700 2

MODEL: a folder with a Llama, Mistral, Qwen2 or Qwen3 checkpoint, which the replica was started on; the last argument:
how many steps. Works without CUDA (docs/megatron.md says what that takes).

Each process holds its slices of the fused matrices. `MegatronSource` knows which region of which checkpoint tensor they
are: digests are added up where the weights lie, and each tensor is put together once, on the process that sends.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from trainer_side import Pusher
from trainer_side.megatron import MegatronSource
from trainer_side.megatron.testing import gpt_chunks, load_folder, without_cuda


def main(model_folder: str, coordinator: str, steps: str) -> int:
    without_cuda()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    config = json.loads((Path(model_folder) / "config.json").read_text())
    (model,) = gpt_chunks(config, dtype=torch.bfloat16)
    names = {"naming": config["model_type"], "vocabulary": config["vocab_size"]}
    load_folder(MegatronSource(model, **names), model_folder)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)

    length = 32
    positions, mask = torch.arange(length)[None], torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    with Pusher(coordinator) as pusher:
        for step in range(1, int(steps) + 1):
            torch.manual_seed(step)  # tensor-parallel ranks see the same data
            tokens = torch.randint(32, 127, (1, length + 1))
            loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()

            receipt = pusher.push(MegatronSource(model, **names), step)
            if dist.get_rank() == 0:
                pause = receipt.pause.pause_ms if receipt.pause else 0.0
                print(
                    f"{receipt.version}: loss {loss.item():.3f}, {receipt.tensors_changed} of {receipt.tensors} tensors"
                    f" changed, {pause:.1f} ms paused, proof {receipt.proof}"
                )
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
