"""Two FSDP2 trainer processes publish every step to a fleet of two replicas, by broadcast: no disk in between.

    liveweights serve &
    liveweights engine --model MODEL --port 8801 --coordinator http://127.0.0.1:8700 &
    liveweights engine --model MODEL --port 8802 --coordinator http://127.0.0.1:8700 &
    torchrun --nproc-per-node 2 examples/03_broadcast_fsdp2.py MODEL http://127.0.0.1:8700 3

MODEL: a folder that transformers can load and both replicas were started on; the last argument: how many steps.

The parameters stay sharded in float32; each is gathered alone, in bfloat16, when its turn to be sent has come. Every
process calls `push` (gathering takes all of them) and gets the receipt or the same error; rank 0 talks to the fleet.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from trainer_side.publishing.pusher import Pusher
from trainer_side.sources import as_source


def main(model_folder: str, coordinator: str, steps: str) -> int:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)  # every process has its own data

    with Pusher(coordinator, transport="broadcast") as pusher:
        for step in range(1, int(steps) + 1):
            tokens = torch.randint(32, 127, (2, 32))
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()

            receipt = pusher.push(as_source(model, dtypes={"*": "BF16"}), step)
            if rank == 0:
                pause = receipt.pause.pause_ms if receipt.pause else 0.0
                print(
                    f"{receipt.version}: loss {loss.item():.3f}, {receipt.tensors_changed} of {receipt.tensors} tensors"
                    f" changed on {len(receipt.members)} replicas, {pause:.1f} ms paused, proof {receipt.proof}"
                )
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
