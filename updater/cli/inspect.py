"""`liveweights inspect`: a report of a checkpoint, and what each rank of a Llama-like engine would read of it.

A composition root: the report comes from `transports`, the shares of the ranks from `engine_adapter`'s placement.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from engine_adapter.placement.declared.layouts import Heads, Layout, Sharded
from engine_adapter.placement.declared.rules import Rules, Target, declare
from engine_adapter.placement.rows import CopyRow, Placement
from engine_adapter.transformers.families import DENSE, rules_of
from trainer_side.client.client import Client
from transports.base import Read
from transports.disk.report import RankReport, Report, inspect
from transports.disk.source import DiskSource
from transports.dtypes import TORCH_DTYPES
from updater.cli import against as comparing
from updater.cli import views
from updater.core.errors import refuse
from updater.protocol import wire
from updater.protocol.manifest import TensorSpec

SHOWN_FAULTS = 40


#: (client of a coordinator, what a push would ask of it)
Fleet = tuple[Client, comparing.PlannedPush]


def run(path: Path, tp: int | None, *, as_json: bool, against: Fleet | None = None) -> bool:
    """Print the report. True if the checkpoint has faults, or the fleet would refuse it."""
    report = look(path, tp)
    held = _held(path, *against) if against is not None else None
    if as_json:
        beside = {} if held is None else {"against": held.plain()}
        views.print_json(wire.plain(report) | {"sound": report.sound} | beside)
    else:
        _print(report)
        if held is not None:
            comparing.show(held)
    return not report.sound or (held is not None and bool(held.refused))


def _held(path: Path, client: Client, asked: comparing.PlannedPush) -> comparing.Against:
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    with views.byte_bar("values", sum(file.stat().st_size for file in files if file.is_file())) as told:
        return comparing.look(path, client, asked, told)


def look(path: Path, tp: int | None) -> Report:
    """The report, with the ranks' shares where the family is known; where it is not, a warning says so."""
    report = inspect(str(path))
    if tp is None or not report.sound:
        return report
    config = _config(path)
    if config is None:
        text = f"what a rank reads is known for {', '.join(sorted(DENSE))} configs only"
        return replace(report, warnings=(*report.warnings, text))
    return inspect(str(path), tp, lambda source, size: shares(source, config, size))


def shares(source: DiskSource, config: Any, size: int) -> Sequence[RankReport]:
    """One report per rank. Raises Rejected where the model cannot be cut over so many ranks."""
    rules = rules_of(config)
    targets = {name: Target(_local(spec, rules, size)) for name, spec in source.specs.items()}
    reports = []
    for rank in range(size):
        placement = declare(source.specs, targets, rules, rank, size)
        reads = list(_reads(placement, source.specs, targets))
        nbytes = sum(_nbytes(read, source.specs) for read in reads)
        names = {read.name for read in reads}
        reports.append(RankReport(rank, size, len(names), nbytes, source.bytes_to_ask(reads)))
    return reports


def _local(spec: TensorSpec, rules: Rules, size: int) -> tuple[int, ...]:
    """Shape of the parameter on one rank."""
    layout = rules.layout_of(spec.name)
    cut = _cut(layout, spec, size)
    if cut is None:
        return spec.shape
    dim, length = cut
    return (*spec.shape[:dim], length, *spec.shape[dim + 1 :])


def _cut(layout: Layout, spec: TensorSpec, size: int) -> tuple[int, int] | None:
    """(dimension, local length), or None for a tensor that every rank holds whole."""
    if isinstance(layout, Heads):
        return layout.dim, max(layout.count // size, 1) * layout.head_dim
    if isinstance(layout, Sharded):
        if spec.shape[layout.dim] % size:
            text = f"{spec.shape[layout.dim]} along dimension {layout.dim} cannot be cut over {size} ranks"
            raise refuse("placement_refused", text, tensor=spec.name)
        return layout.dim, spec.shape[layout.dim] // size
    return None


def _reads(placement: Placement, specs: Mapping[str, TensorSpec], targets: Mapping[str, Target]) -> Iterator[Read]:
    """What staging would ask the source for. The memory is never written to, so one piece serves all."""
    largest = max((torch.Size(target.shape).numel() for target in targets.values()), default=0)
    memory = torch.empty(largest * 8, dtype=torch.uint8)
    for row in placement.rows:
        if isinstance(row, CopyRow):
            dtype, shape = TORCH_DTYPES[specs[row.source].dtype], targets[row.target].shape
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            local = memory[:nbytes].view(dtype).view(shape)
            yield Read(row.source, row.source_box, local[row.target_box.slices()], row.permute)


def _nbytes(read: Read, specs: Mapping[str, TensorSpec]) -> int:
    return read.box.numel * TORCH_DTYPES[specs[read.name].dtype].itemsize


def _config(path: Path) -> Any:
    """The fields that the family's rules look at, or None if the family is another one."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict) or config.get("model_type") not in DENSE:
        return None
    known = {"tie_word_embeddings": False, "head_dim": None} | config
    known.setdefault("num_key_value_heads", known.get("num_attention_heads"))
    return SimpleNamespace(**known)


def _print(report: Report) -> None:
    files = [
        (file.file, views.size(file.size), file.tensors, "yes" if file.readable else "NO") for file in report.files
    ]
    out = views.out
    out.print(views.table(report.path, ("file", "size", "tensors", "readable"), files, right="size,tensors"))
    dtypes = [(one.dtype, one.tensors, views.size(one.nbytes)) for one in report.dtypes]
    out.print(views.table("dtypes", ("dtype", "tensors", "bytes"), dtypes, right="tensors,bytes"))
    out.print(f"{report.tensors} tensors, {views.size(report.nbytes)}; manifest: {report.manifest}")
    if report.ranks:
        ranks = [
            (f"{one.rank} of {one.size}", one.tensors, views.size(one.nbytes), views.size(one.asked))
            for one in report.ranks
        ]
        columns = ("rank", "tensors", "bytes of its slices", "asked of the disk")
        out.print(views.table("what a rank reads", columns, ranks, right=",".join(columns[1:])))
    for warning in report.warnings:
        out.print(f"warning: {warning}", style="yellow", markup=False)
    if report.faults:
        faults = [(fault.code, fault.file, fault.tensor, fault.message) for fault in report.faults[:SHOWN_FAULTS]]
        out.print(views.table(f"{len(report.faults)} faults", ("code", "file", "tensor", "what"), faults))
