"""The process group of one replica's ranks, for engines that have none of their own."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from engine_adapter.base import EngineSpec


def join_group(spec: EngineSpec, timeout_s: float, meet_s: float = 300.0) -> None:
    """All ranks at about the same time, over gloo. `timeout_s`: of every collective; `meet_s`: until all are there."""
    store = FileStore(spec.rendezvous, spec.size)
    store.set_timeout(timedelta(seconds=meet_s))
    dist.init_process_group(
        "gloo", store=store, rank=spec.rank, world_size=spec.size, timeout=timedelta(seconds=timeout_s)
    )


def broadcast_bytes(data: bytes | None, source: int = 0, group: dist.ProcessGroup | None = None) -> bytes:
    """`data` of rank `source`, on every rank; the others pass None. Nothing is unpickled (I10)."""
    length = torch.tensor([len(data or b"")])
    dist.broadcast(length, source, group=group)
    body = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(body, source, group=group)
    return bytes(body.numpy())
