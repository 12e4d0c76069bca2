"""Digest, finiteness scan and zero scan against a contiguous memcpy of the same bytes, one thread."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from math import prod

import torch

from benchmarks.common import Report, best_of
from transports.base import Box
from transports.digest import region_digest, tensor_digest
from transports.scans import nonfinite

#: One layer of a model of about 1 GB, with its vocabulary.
SHAPES = {
    "embed_tokens": (151_936, 2048),
    "q_proj": (2048, 2048),
    "gate_proj": (11_008, 2048),
    "down_proj": (2048, 11_008),
    "experts": (16, 1408, 2048),
    "norm": (2048,),
}
COLUMNS = ("down_proj", "q_proj")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a few KB: does it run at all")
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    shapes = {name: tuple(max(1, size // 64) for size in shape) for name, shape in SHAPES.items()}
    tensors = {
        name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in (shapes if chosen.small else SHAPES).items()
    }
    report = Report("digest")
    _whole(report, "digest / memcpy", tensors, chosen.rounds, tensor_digest, 0.4)
    _whole(report, "finiteness bf16 / memcpy", tensors, chosen.rounds, nonfinite, 0.5)
    _columns(report, tensors, chosen.rounds)
    report.finish()


def _whole(
    report: Report,
    name: str,
    tensors: dict[str, torch.Tensor],
    rounds: int,
    work: Callable[[torch.Tensor], object],
    goal: float,
) -> None:
    """All tensors one after the other, weighted by their bytes; the slowest is named."""
    copies = {key: torch.empty_like(tensor) for key, tensor in tensors.items()}
    total_copy = total_work = 0.0
    ratios = {}
    for key, tensor in tensors.items():
        copy, done = best_of(rounds, lambda k=key: copies[k].copy_(tensors[k]), lambda t=tensor: work(t))
        total_copy, total_work, ratios[key] = total_copy + copy, total_work + done, copy / done
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    shown = ", ".join(f"{key} {ratio:.2f}" for key, ratio in ratios.items())
    rates = f"{nbytes / total_work / 1e9:.1f} against {nbytes / total_copy / 1e9:.1f} GB/s; "
    report.add(name, total_copy / total_work, goal=goal, detail=rates + shown)


def _columns(report: Report, tensors: dict[str, torch.Tensor], rounds: int) -> None:
    """The right half of the columns, as a rank of TP=2 holds it in its spare, and as a view of the whole."""
    total = {"copy": 0.0, "held": 0.0, "view": 0.0}
    nbytes = 0
    for name in COLUMNS:
        tensor = tensors[name]
        shape, half = tuple(tensor.shape), tensor.shape[1] // 2
        box = Box((0, half), (shape[0], shape[1] - half))
        view = tensor[box.slices()]
        held, room = view.contiguous(), torch.empty(prod(box.size), dtype=tensor.dtype).view(box.size)
        times = best_of(
            rounds,
            lambda a=room, b=held: a.copy_(b),
            lambda t=held, s=shape, b=box: region_digest(t, s, "BF16", b),
            lambda t=view, s=shape, b=box: region_digest(t, s, "BF16", b),
        )
        total = {key: total[key] + time for key, time in zip(total, times, strict=True)}
        nbytes += held.nbytes
    for key, what in (("held", "of a rank's own shard"), ("view", "as a strided view")):
        detail = f"{nbytes / total[key] / 1e9:.1f} against {nbytes / total['copy'] / 1e9:.1f} GB/s"
        report.add(f"digest of column slices, {what} / memcpy", total["copy"] / total[key], goal=0.3, detail=detail)


if __name__ == "__main__":
    main()
