"""Train a little, publish, and ask the fleet which version answers.

    python examples/02_push_state_dict.py MODEL_FOLDER CHECKPOINTS STEP COORDINATOR REPLICA

MODEL_FOLDER: what the engines were started on; CHECKPOINTS: a folder under the coordinator's and the engines' roots.
"""

from __future__ import annotations

import sys

import httpx
import torch
from transformers import AutoModelForCausalLM

from trainer_side import push
from updater.core.errors import LiveweightsError


def main(model_folder: str, checkpoints: str, step: str, coordinator: str, replica: str) -> int:
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-2)
    tokens = torch.randint(32, 127, (1, 32))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimiser.step()

    try:
        receipt = push(model.state_dict(), int(step), url=coordinator, directory=checkpoints, config_from=model_folder)
    except LiveweightsError as error:
        print(f"{type(error).__name__.lower()}: {error}; live: {error.live_version}")
        return 1
    pause = receipt.pause.pause_ms if receipt.pause else 0.0
    print(f"{receipt.version}: {receipt.tensors_changed} of {receipt.tensors} tensors changed, proof {receipt.proof}")
    print(f"{receipt.update_ms:.0f} ms, of which {pause:.1f} ms paused")

    asked = {"prompt": "The lighthouse keeper wrote: ", "max_tokens": 8}
    reply = httpx.post(f"{replica}/v1/completions", json=asked, timeout=300.0).raise_for_status().json()
    print(f"answered by {reply['liveweights']['version']}: {reply['choices'][0]['text']!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
