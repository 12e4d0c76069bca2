"""A trainer on the engine's own machine publishes through shared memory.

    liveweights serve &
    liveweights engine --model MODEL --port 8801 --coordinator http://127.0.0.1:8700 &
    python examples/06_colocated_shared_memory.py MODEL 1 http://127.0.0.1:8700 http://127.0.0.1:8801

Trainer and engine run as the same user of one machine: buffers go from one to the other as file descriptors over a
Unix socket, so nothing is left behind when either is killed. The trainer changes one layer, publishes, and asks which
version answers; then it takes the change back with a rollback, which moves no bytes at all.
"""

from __future__ import annotations

import sys

import httpx
import torch
from transformers import AutoModelForCausalLM

from trainer_side import Client, push


def main(model_folder: str, step: str, coordinator: str, replica: str) -> int:
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1.5)

    with Client(coordinator) as client:
        receipt = push(model, int(step), url=coordinator, transport="shared_memory")
        print(
            f"{receipt.version}: {receipt.tensors_changed} of {receipt.tensors} tensors changed, {receipt.bytes_read} B"
        )
        print(f"answered by {_ask(replica)}")
        back = client.rollback()
        print(f"back on {back.version} after {back.update_ms:.0f} ms and {back.bytes_read} bytes")
        print(f"answered by {_ask(replica)}")
    return 0


def _ask(replica: str) -> str:
    asked = {"prompt": "The lighthouse keeper wrote: ", "max_tokens": 8}
    reply = httpx.post(f"{replica}/v1/completions", json=asked, timeout=300.0).raise_for_status().json()
    return f"{reply['liveweights']['version']}: {reply['choices'][0]['text']!r}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
