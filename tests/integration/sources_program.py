"""One rank of a trainer: every kind of sharding as a source, what it says and what it sends. Run by
test_sources_distributed, which compares it with `made` in one process.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from trainer_side.sources import as_source
from trainer_side.sources.source import WeightSource
from updater.core.errors import LiveweightsError

SIZE = 4
ROUNDED = {"*": "BF16", "*.gate.*": "F32"}


class Layer(torch.nn.Module):
    """Sizes that no number of ranks divides, one with fewer rows than ranks, and a dimension of one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(10)
        self.up = torch.nn.Linear(10, 14)
        self.down = torch.nn.Linear(14, 10, bias=False)
        self.gate = torch.nn.Linear(10, 3)
        self.scale = torch.nn.Parameter(torch.full((1,), 1 + 2**-12))
        self.register_buffer("seen", torch.tensor(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return x + self.scale * self.gate(x).sum(-1, keepdim=True) * self.down(self.up(x))


class Model(torch.nn.Module):
    """Tied embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(13, 10)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))
        self.head = torch.nn.Linear(10, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def made() -> Model:
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    return model


def adapted() -> torch.nn.Module:
    """With a LoRA adapter that is not at rest."""
    import peft

    model = peft.get_peft_model(made(), peft.LoraConfig(target_modules=["up", "down"], r=3))  # type: ignore[arg-type]
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter))
    return model


def sharded(module: torch.nn.Module, mesh: DeviceMesh | None = None) -> torch.nn.Module:
    """FSDP2: every layer and the rest."""
    layers = [each for each in module.modules() if isinstance(each, Layer)]
    for each in [*layers, module]:
        fully_shard(each, mesh=mesh)
    return module


def flat(strategy: ShardingStrategy, original: bool, mesh: DeviceMesh | None = None) -> torch.nn.Module:
    """FSDP1: a unit of every layer and one of the rest."""
    options: dict[str, Any] = {"sharding_strategy": strategy, "use_orig_params": original, "device_mesh": mesh}
    options["device_id"] = torch.device("cpu")
    model = made()
    for at, layer in enumerate(model.layers):
        model.layers[at] = FullyShardedDataParallel(layer, **options)
    return FullyShardedDataParallel(model, **options)


def tensor_parallel() -> torch.nn.Module:
    """FSDP2 over tensor parallelism: dimensions that are cut twice."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = made()
    for layer in model.layers:
        parallelize_module(layer, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return sharded(model, mesh["data"])


def seen(module: torch.nn.Module) -> torch.nn.Module:
    """After a forward pass that no backward pass followed: FSDP keeps the root's parameters whole."""
    with torch.no_grad():
        module(torch.tensor([[1, 2, 3]]))
    return module


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))


def replicas() -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(made())


FULL, HYBRID = ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD
#: name -> (the module, rank that sends)
CASES: dict[str, tuple[Callable[[], Any], int]] = {
    "fsdp2": (lambda: sharded(made()), 0),
    "fsdp2_seen": (lambda: seen(sharded(made())), 2),
    "fsdp2_compiled": (lambda: torch.compile(sharded(made()), backend="eager"), 0),
    "fsdp2_state_dict": (lambda: sharded(made()).state_dict(), 1),
    "hsdp": (lambda: sharded(made(), grid()), 3),
    "fsdp2_tp": (tensor_parallel, 0),
    "fsdp2_lora": (lambda: sharded(adapted()), 1),
    "fsdp1": (lambda: flat(FULL, True), 0),
    "fsdp1_seen": (lambda: seen(flat(FULL, True)), 3),
    "fsdp1_flat": (lambda: seen(flat(FULL, False)), 1),
    "fsdp1_hybrid": (lambda: flat(HYBRID, True, grid()), 2),
    "ddp": (replicas, 1),
    "ddp_compiled": (lambda: torch.compile(replicas(), backend="eager"), 0),
}
#: Which of them are stepped on afterwards, and how.
STEPPED = {"fsdp2": {"foreach": True}, "hsdp": {"fused": True}, "fsdp1": {"fused": True}, "ddp": {"foreach": True}}


def told(name: str, folder: Path) -> dict[str, Any]:
    """What this rank says of one case; its sender writes what it is given."""
    make, sender = CASES[name]
    weights = make()
    answer: dict[str, Any] = {}
    for kind, dtypes in (("whole", None), ("rounded", ROUNDED)):
        source = as_source(weights, dtypes=dtypes, sender_rank=sender)
        sent = {each: None if tensor is None else tensor.clone() for each, tensor in source.tensors()}
        if source.is_sender:
            torch.save(sent, folder / f"{name}-{kind}.pt")
        answer[kind] = {
            "digests": dict(source.digests()),
            "specs": [[spec.name, spec.dtype, list(spec.shape)] for spec in source.specs.values()],
            "ties": source.ties,
            "sender": source.is_sender,
            "given": sum(tensor is not None for tensor in sent.values()),
            "ranks": 1 if source.group is None else source.group.size(),
        }
        source.check_untouched()
    if name in STEPPED:
        answer["moved"] = moved(weights, as_source(weights), STEPPED[name])
    return answer


def moved(module: torch.nn.Module, source: WeightSource, options: dict[str, bool]) -> list[str]:
    """Names that an optimiser's step in between is seen to write to."""
    optimiser = torch.optim.AdamW(module.parameters(), **options)  # type: ignore[arg-type]
    module(torch.tensor([[1, 2, 3]])).sum().backward()
    source.check_untouched()
    optimiser.step()
    try:
        source.check_untouched()
    except LiveweightsError as error:
        return sorted(failure.tensor for failure in error.failures)
    return []


def disagreeing(rank: int) -> str:
    """One rank whose model is another one."""
    weights = made().state_dict()
    if rank == SIZE - 1:
        weights["layers.0.scale"] = torch.ones(2)
    try:
        as_source(weights, group=dist.group.WORLD).digests()
    except LiveweightsError as error:
        return error.code
    return ""


class Wide(torch.nn.Module):
    """One tensor that is large beside all others; rows that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.small = torch.nn.Parameter(torch.zeros(8))
        self.first = torch.nn.Parameter(torch.zeros(1021, 256))
        self.second = torch.nn.Parameter(torch.zeros(1021, 256))
        self.third = torch.nn.Parameter(torch.zeros(1021, 256))


def peaks(wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> dict[str, float]:
    """Most bytes that were allocated at once, in sizes of the largest tensor."""
    source = as_source(wrap(Wide()))
    largest = max(spec.nbytes for spec in source.specs.values())
    return {
        "digests": least_peak(lambda: source.digests()) / largest,
        "walk": least_peak(lambda: drain(source)) / largest,
    }


def drain(source: WeightSource) -> None:
    for _name, tensor in source.tensors():
        del tensor


def least_peak(work: Callable[[], object]) -> int:
    """Bytes. A thread of gloo may be the last to let go of what was gathered, after this one has gone on: what it frees
    is not in this thread's record, which then shows too much. So the least of several times.
    """
    return min(peak(work) for _ in range(8))


def peak(work: Callable[[], object]) -> int:
    """Bytes, from the allocator's own record of this thread."""
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as profile:
        work()
    live = highest = 0
    for event in profile.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            highest = max(highest, live)
    return highest


def main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=SIZE)
    answer: dict[str, Any] = {name: told(name, folder) for name in CASES}
    answer["disagreeing"] = disagreeing(rank)
    answer["peaks"] = {
        "fsdp2": peaks(lambda module: fully_shard(copy.deepcopy(module))),  # type: ignore[arg-type, return-value]
        "fsdp1": peaks(lambda module: FullyShardedDataParallel(module, device_id=torch.device("cpu"))),
    }
    (folder / f"{rank}.json").write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
