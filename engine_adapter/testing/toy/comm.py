"""What toy ranks say to one another: sums, gathers and rank 0's schedule as JSON bytes, over gloo."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore


class Ranks:
    """The collectives of one replica. With one rank nothing is started and every call is the identity."""

    def __init__(self, rank: int, size: int, rendezvous: str, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        if size > 1:
            store = FileStore(rendezvous, size)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
            )

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenated along the last dimension in rank order."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)

    def schedule(self, message: dict[str, Any] | None) -> dict[str, Any]:
        """Rank 0's message, on every rank; the others pass None. JSON only: nothing is unpickled (I10)."""
        if self.size == 1:
            if message is None:
                raise ValueError("rank 0 has to give the schedule")
            return message
        payload = json.dumps(message).encode() if self.rank == 0 else b""
        length = torch.tensor([len(payload)], dtype=torch.int64)
        dist.broadcast(length, 0)
        body = (
            torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            if payload
            else torch.empty(int(length), dtype=torch.uint8)
        )
        dist.broadcast(body, 0)
        parsed: dict[str, Any] = json.loads(bytes(body.numpy()))
        return parsed

    def close(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
