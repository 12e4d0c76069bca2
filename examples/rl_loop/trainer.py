"""The loop, in every process of the trainer (`main.py` starts it under torchrun).

Rank 0 collects completions and hands them to the others; every rank computes the gradient of its share of them, FSDP2
adds the gradients up, and the new weights are published before the next completions are asked for. The gradient is
REINFORCE with the mean reward of a prompt's group as the baseline.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rollouts
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from trainer_side.publishing.pusher import Pusher
from trainer_side.sources import as_source
from updater.core.version import Version

PROMPTS, GROUP = 6, 8  # completions of a step: their product
PROMPT_TOKENS, MAX_TOKENS = 8, 16
LEARNING_RATE = 2e-3


@dataclass(frozen=True, slots=True)
class Batch:
    """`tokens`: int64, (completions, PROMPT_TOKENS + MAX_TOKENS); `rewards`: float32, (completions,)."""

    tokens: torch.Tensor
    rewards: torch.Tensor

    def share(self, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's tokens, and the advantage of each of its completions over the mean of its group."""
        groups = self.rewards.view(PROMPTS, GROUP)
        advantages = (groups - groups.mean(dim=1, keepdim=True)).view(-1)
        return self.tokens[rank::size], advantages[rank::size] / (groups.std() + 1e-4)


class Trainer:
    """One run from random weights."""

    def __init__(self, asked: argparse.Namespace, seed: int, mesh: DeviceMesh, pusher: Pusher) -> None:
        self.asked, self.seed, self.pusher = asked, seed, pusher
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(seed)  # equal on all ranks: each keeps its shard of the same weights
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(asked.model), dtype=torch.float32)
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimiser = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE)
        letters = torch.randint(97, 123, (PROMPTS, PROMPT_TOKENS))
        self.prompts = [tuple(row.tolist()) for row in letters for _ in range(GROUP)]

    def run(self) -> dict[str, Any]:
        """Every step of it, on rank 0 with its figures."""
        oldest = self._publish(0, {"new_run": True})[0]
        run = Version.parse(oldest).run
        steps = []
        for step in range(1, self.asked.steps + 1):
            began = time.perf_counter()
            batch, versions = self._collect(oldest)
            collected = time.perf_counter()
            self._update(batch)
            trained = time.perf_counter()
            wanted, pause_ms = oldest, 0.0
            if not self.asked.no_push:
                oldest, pause_ms = self._publish(f"{run}-{step}", {})
            if self.rank == 0:
                mean = float(batch.rewards.mean())
                times = {"rollouts": collected - began, "train": trained - collected}
                times["publish"] = time.perf_counter() - trained
                print(f"step {step:3d}  reward {mean:.3f}  by {versions[-1]}  pause {pause_ms:.1f} ms", flush=True)
                steps.append(
                    {
                        "step": step,
                        "rewards": batch.rewards.tolist(),
                        "asked_for": wanted,
                        "made_by": versions,
                        "published": oldest,
                        "pause_ms": pause_ms,
                        "seconds": {name: round(value, 4) for name, value in times.items()},
                    }
                )
        beyond = f"{run}-{self.asked.steps + 1}"
        refused = self.rank == 0 and rollouts.refuses(self.asked.replica, beyond)
        return {"seed": self.seed, "steps": steps, "refused_unpublished": refused}

    def _collect(self, oldest: str) -> tuple[Batch, list[str]]:
        """Completions that no version below `oldest` had a part in; the versions on rank 0."""
        count = len(self.prompts)
        tokens = torch.zeros(count, PROMPT_TOKENS + MAX_TOKENS, dtype=torch.int64)
        rewards = torch.zeros(count)
        versions: list[str] = []
        if self.rank == 0:
            made = rollouts.sample(self.asked.replica, self.prompts, max_tokens=MAX_TOKENS, min_version=oldest)
            tokens = torch.tensor([[*one.prompt, *one.tokens] for one in made])
            rewards = torch.tensor([one.reward for one in made])
            versions = sorted({one.version for one in made})
        dist.broadcast(tokens, src=0)
        dist.broadcast(rewards, src=0)
        return Batch(tokens, rewards), versions

    def _update(self, batch: Batch) -> None:
        tokens, advantages = batch.share(self.rank, self.size)
        logits = self.model(input_ids=tokens[:, :-1]).logits.float()
        chosen = tokens[:, 1:].unsqueeze(-1)
        logprobs = logits.log_softmax(dim=-1).gather(-1, chosen).squeeze(-1)[:, PROMPT_TOKENS - 1 :]
        loss = -(advantages * logprobs.mean(dim=1)).mean()
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()

    def _publish(self, version: int | str, policy: dict[str, Any]) -> tuple[str, float]:
        """Publish what the optimiser made, in the engine's dtype: all ranks together. (version, pause in ms)."""
        receipt = self.pusher.push(as_source(self.model, dtypes={"*": "BF16"}), version, policy=policy)
        return receipt.version, receipt.pause.pause_ms if receipt.pause else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, action="append", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--no-push", action="store_true")
    parser.add_argument("--transport", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--replica", required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        folder = {"directory": asked.work / "pushed"} if asked.transport == "disk" else {}
        with Pusher(asked.coordinator, transport=asked.transport, **folder) as pusher:
            runs = [Trainer(asked, seed, mesh, pusher).run() for seed in asked.seed]
        if dist.get_rank() == 0:
            (asked.work / "runs.json").write_text(json.dumps(runs))
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
