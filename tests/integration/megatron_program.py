"""One of two trainer ranks: a Megatron-core model per layout, loaded from a checkpoint, emitted, digested, run.

python megatron_program.py RANK PORT FOLDER    (FOLDER/jobs.json: what to do; results lie beside it)
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist
from megatron_shards import Slicer
from safetensors.torch import load_file, save_file

from trainer_side import Pusher
from trainer_side.megatron import MegatronSource
from trainer_side.megatron.testing import gpt_chunks, padded, without_cuda
from updater.core.errors import LiveweightsError

HANG_S = 600.0  # only a hang reaches it


class Trained:
    """The local chunks of one layout, filled from a checkpoint folder."""

    def __init__(self, job: Mapping[str, Any], rank: int) -> None:
        from megatron.core import parallel_state as state

        folder = Path(job["model"])
        self.config = json.loads((folder / "config.json").read_text())
        sizes = job["sizes"]
        state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.get("tp", 1),
            pipeline_model_parallel_size=sizes.get("pp", 1),
            virtual_pipeline_model_parallel_size=sizes.get("vp"),
            expert_model_parallel_size=sizes.get("ep", 1),
            expert_tensor_parallel_size=sizes.get("etp"),
        )
        self.job, self.slicer = job, Slicer(self.config, sizes, rank, job.get("padding", 7.25))
        dtype = getattr(torch, job.get("dtype", "float32"))
        self.whole = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
        self.chunks = gpt_chunks(self.config, dtype=dtype)
        self.load(self.whole)

    @torch.no_grad()
    def load(self, whole: Mapping[str, torch.Tensor]) -> None:
        rows = padded(self.config["vocab_size"])
        for number, chunk in enumerate(self.chunks):
            for name, parameter in chunk.named_parameters():
                parameter.copy_(self.slicer.value(name, number, whole, rows))

    def source(self, **options: Any) -> MegatronSource:
        family = self.config["model_type"]
        return MegatronSource(self.chunks, naming=family, vocabulary=self.config["vocab_size"], **options)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """(1, length, vocabulary) on the last stage."""
        length = tokens.shape[1]
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        positions = torch.arange(length)[None]
        (model,) = self.chunks
        model.eval()  # in training, experts under tensor parallelism want sequence parallelism, which needs Apex
        if self.slicer.sizes["pp"] > 1 and self.slicer.pp:
            hidden = torch.empty(length, 1, self.config["hidden_size"])
            dist.recv(hidden, 0)
            model.set_input_tensor(hidden)
        out: torch.Tensor = model(tokens, positions, mask)
        if self.slicer.sizes["pp"] > 1 and not self.slicer.pp:
            dist.send(out.detach(), 1)
            return None
        if self.slicer.sizes["tp"] > 1:
            parts = [torch.empty_like(out) for _ in range(2)]
            dist.all_gather(parts, out.detach().contiguous())
            out = torch.cat(parts, dim=-1)
        return out[..., : self.config["vocab_size"]].detach()

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of the next token, at one stage."""
        (model,) = self.chunks
        model.train()
        length = tokens.shape[1] - 1
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        losses: torch.Tensor = model(tokens[:, :-1], torch.arange(length)[None], mask, labels=tokens[:, 1:])
        return losses.mean()


def main(rank: int, port: int, folder: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.manual_seed(0)
    without_cuda()
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=HANG_S))
    for job in json.loads((folder / "jobs.json").read_text()):
        with _layout(job, rank) as trained:
            facts = {check: CHECKS[check](trained, rank, folder) for check in job["checks"]}
        (folder / f"{job['name']}-{rank}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


@contextlib.contextmanager
def _layout(job: Mapping[str, Any], rank: int) -> Iterator[Trained]:
    from megatron.core import parallel_state as state

    try:
        yield Trained(job, rank)
    finally:
        state.destroy_model_parallel()


def emitted(trained: Trained, rank: int, folder: Path) -> dict[str, Any]:
    """Digests first, then the walk; the sender keeps the tensors for the test."""
    source = trained.source()
    before = dict(source.digests())
    kept = {}
    for name, tensor in source.tensors():
        assert (tensor is not None) == source.is_sender
        if tensor is not None:
            kept[name] = tensor.clone()
    source.check_untouched()
    if source.is_sender:
        save_file(kept, folder / f"{trained.job['name']}.safetensors")
    specs = {name: [spec.dtype, list(spec.shape)] for name, spec in source.specs.items()}
    return {"digests": before, "specs": specs, "ties": source.ties, "again": dict(source.digests()) == before}


def rounded(trained: Trained, rank: int, folder: Path) -> dict[str, Any]:
    """What travels as bfloat16, but for the norms: digests are of the rounded values."""
    source = trained.source(dtypes={"*": "BF16", "*norm.weight": "F32"})
    kept = {name: tensor.clone() for name, tensor in source.tensors() if tensor is not None}
    if source.is_sender:
        save_file(kept, folder / f"{trained.job['name']}-rounded.safetensors")
    return {"digests": dict(source.digests())}


def swapped(trained: Trained, rank: int, folder: Path) -> dict[str, Any]:
    """A loader that put up where the gate belongs, and one that put the values where the keys belong."""
    found = {}
    for one, other in (("mlp.gate_proj", "mlp.up_proj"), ("self_attn.k_proj", "self_attn.v_proj")):
        mixed = dict(trained.whole)
        names = (f"model.layers.1.{one}.weight", f"model.layers.1.{other}.weight")
        mixed[names[0]], mixed[names[1]] = mixed[names[1]], mixed[names[0]]
        trained.load(mixed)
        found[one] = dict(trained.source().digests())
    trained.load(trained.whole)
    return found


def stepped(trained: Trained, rank: int, folder: Path) -> dict[str, Any]:
    """An optimiser that steps on this rank between the source and its end."""
    source = trained.source()
    name, parameter = next(iter(trained.chunks[0].named_parameters()))
    with torch.no_grad():
        parameter.mul_(2).mul_(0.5)
    return {"codes": _codes(source.check_untouched), "tensors": _tensors(source.check_untouched), "wrote": name}


def drifted(trained: Trained, rank: int, folder: Path) -> dict[str, Any]:
    """A copy that one rank alone has changed: a norm of tensor-parallel ranks, the tied embedding of the last stage."""
    chunk = trained.chunks[-1]
    kinds = {"norm": "decoder.layers.0.input_layernorm.weight", "tied": "output_layer.weight"}
    wanted = kinds[trained.job["drift"]]
    parameters = dict(chunk.named_parameters())
    if rank == 1:
        parameters[wanted].data[0] += 1
    source = trained.source()
    faults = _failures(source.digests)
    if rank == 1:
        parameters[wanted].data[0] -= 1
    return {"faults": faults, "after": _codes(source.digests)}


def unknown(trained: Trained, rank: int, folder: Path) -> dict[str, Any]:
    """A parameter that no rule names, on the second rank alone: both ranks learn of it, and it can be ignored."""
    if rank == 1:
        trained.chunks[0].adapter_scale = torch.nn.Parameter(torch.ones(3))
    faults = _failures(trained.source)
    ignoring = len(trained.source(ignored=("adapter_*",)).specs)
    if rank == 1:
        del trained.chunks[0].adapter_scale
    return {"faults": faults, "ignoring": ignoring, "without": len(trained.source().specs)}


def wrapped(trained: Trained, rank: int, folder: Path) -> dict[str, Any]:
    """The same names where Megatron's DistributedDataParallel is around the model."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = trained.chunks[0].config
    around = DistributedDataParallel(config, DistributedDataParallelConfig(), trained.chunks[0], disable_bucketing=True)
    names = list(MegatronSource(around, naming="llama", vocabulary=trained.config["vocab_size"]).specs)
    return {"same": names == list(trained.source().specs)}


def run(trained: Trained, rank: int, folder: Path) -> dict[str, Any]:
    """Logits of the Megatron model itself."""
    logits = trained.logits(torch.tensor([trained.job["tokens"]]))
    last = trained.slicer.sizes["pp"] - 1 if trained.slicer.sizes["pp"] > 1 else 0
    if logits is not None and rank == last:
        save_file({"logits": logits.contiguous()}, folder / f"{trained.job['name']}-logits.safetensors")
    return {}


def deserted(trained: Trained, rank: int, folder: Path) -> dict[str, Any]:
    """The second rank dies in the middle of a walk."""
    source = trained.source()
    if rank == 1:
        next(source.tensors())
        (folder / f"{trained.job['name']}-1.json").write_text("{}")
        os._exit(0)
    return {"faults": _failures(lambda: [name for name, _tensor in source.tensors()]), "names": list(source.specs)}


def pushed(trained: Trained, rank: int, folder: Path) -> dict[str, Any]:
    """Publishes what it was loaded with through shared memory, trains one step, and publishes that through a folder."""
    job, receipts, answers = trained.job, [], []
    with Pusher(job["url"], transport="shared_memory") as pusher:
        receipts.append(pusher.push(trained.source(), 3))
    answers.append(_answer(job) if rank == 0 else {})
    optimiser = torch.optim.SGD(trained.chunks[0].parameters(), lr=1e-3)
    trained.loss(torch.tensor([job["tokens"]])).backward()
    optimiser.step()
    with Pusher(job["url"], transport="disk", directory=job["directory"], config_from=job["model"]) as pusher:
        receipts.append(pusher.push(trained.source(), 4))
    answers.append(_answer(job) if rank == 0 else {})
    return {"receipts": [receipt.model_dump(mode="json") for receipt in receipts], "answers": answers}


def delivered(trained: Trained, rank: int, folder: Path) -> dict[str, Any]:
    """Publishes what it was loaded with by broadcast, as the run's first step."""
    with Pusher(trained.job["url"], transport="broadcast") as pusher:
        receipt = pusher.push(trained.source(), 1)
    return {"receipt": receipt.model_dump(mode="json"), "answer": _answer(trained.job) if rank == 0 else {}}


def _answer(job: Mapping[str, Any]) -> dict[str, Any]:
    asked = {"prompt": job["tokens"], "max_tokens": 16, "temperature": 0}
    reply = httpx.post(f"{job['replica']}/v1/completions", json=asked, timeout=HANG_S).raise_for_status().json()
    return {"text": reply["choices"][0]["text"], "version": reply["liveweights"]["version"]}


def _failures(call: Callable[[], Any]) -> list[list[Any]]:
    try:
        call()
    except LiveweightsError as error:
        return [[failure.code, failure.tensor, failure.rank] for failure in error.failures]
    return []


def _codes(call: Callable[[], Any]) -> list[str]:
    return [str(failure[0]) for failure in _failures(call)]


def _tensors(call: Callable[[], Any]) -> list[str]:
    return [str(failure[1]) for failure in _failures(call)]


CHECKS: dict[str, Callable[[Trained, int, Path], dict[str, Any]]] = {
    check.__name__: check
    for check in (emitted, rounded, swapped, stepped, drifted, unknown, wrapped, run, deserted, pushed, delivered)
}

if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
