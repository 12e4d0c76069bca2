"""A coordinator, two replicas and a trainer as Ray actors; the trainer publishes three versions.

    python examples/05_ray.py FOLDER

FOLDER, new or empty, holds the journal, a small model and the pushed checkpoints: on a cluster, a folder that every
node sees. Joins the Ray cluster that it finds, else it starts one on this machine. The engine here is the toy of the
tests; `engine="transformers"` and a model folder of yours make it real.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ray
import torch

from engine_adapter.ray_replica import start_replica, stop_replica
from engine_adapter.replica.launch import settings as replica_settings
from engine_adapter.testing import fixture_config, make_toy_checkpoint, toy_tensors
from trainer_side import push
from updater.ray_actor import start_coordinator, stop_coordinator
from updater.settings import Settings

NAMESPACE = "liveweights-example"
WAIT_S = 300.0


class Trainer:
    """Holds the coordinator's handle, as it would hold handles of anything else."""

    def __init__(self, coordinator: Any, folder: str) -> None:
        self._coordinator, self._folder = coordinator, folder
        self._weights = toy_tensors(fixture_config("M0"), seed=0)

    def step(self, number: int) -> dict[str, Any]:
        """One step of training, and its weights to all replicas."""
        for tensor in self._weights.values():
            tensor.mul_(torch.tensor(1.0 + 0.01 * number).to(tensor.dtype))
        url = ray.get(self._coordinator.address.remote())
        receipt = push(self._weights, number, url=url, directory=self._folder)
        return receipt.model_dump(mode="json")


def main(folder: str) -> int:
    root = Path(folder).resolve()
    model = make_toy_checkpoint(root / "base")
    ray.init(log_to_driver=False)
    coordinator = start_coordinator(
        Settings(state=root / "journal", roots=(root,), new_fleet=True), namespace=NAMESPACE
    )
    replicas = [
        start_replica(
            replica_settings(model=model, engine="toy", replica=name, port=0, roots=(root,)),
            coordinator=coordinator,
            namespace=NAMESPACE,
            num_cpus=1,
        )
        for name in ("one", "two")
    ]
    ray.get([replica.ready.remote() for replica in replicas], timeout=WAIT_S)
    trainer = ray.remote(Trainer).options(num_cpus=1).remote(coordinator, str(root / "pushed"))
    for number in (1, 2, 3):
        receipt = ray.get(trainer.step.remote(number), timeout=WAIT_S)
        print(f"{receipt['version']} {receipt['outcome']} in {receipt['update_ms']:.0f} ms, proof {receipt['proof']}")
    for replica in replicas:
        reply = ray.get(replica.generate.remote([5, 6, 7, 8], max_tokens=4), timeout=WAIT_S)["body"]
        print(f"answered {reply['liveweights']['version']} with {reply['choices'][0]['token_ids']}")
    ray.kill(trainer)
    for replica in replicas:
        stop_replica(replica)
    stop_coordinator(coordinator)
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
