"""New requests and cancellations from rank 0 to the other ranks, as JSON: nothing is unpickled (I10)."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.requests import RequestState

_FIELDS = ("request_id", "initial_tokens", "max_new_tokens", "streaming", "logit_processor_kwargs")


class PlainHelper(DistributedHelper):
    """The library's helper with its one use of pickle replaced; takes over the groups of the one it is made from."""

    def __init__(self, made: DistributedHelper) -> None:
        self.__dict__.update(made.__dict__)

    def tp_broadcast_object_from_rank_0(self, obj: Any) -> Any:
        """`obj`: (new request states, cancelled ids) on rank 0, ignored elsewhere. Returns it on every rank."""
        if self.tp_size <= 1:
            return obj
        data = pack(*obj) if self.is_tp_driver else b""
        length = torch.tensor([len(data)])
        dist.broadcast(length, src=self.tp_root_global_rank, group=self.cpu_comm_group)
        body = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if data
            else torch.empty(int(length), dtype=torch.uint8)
        )
        dist.broadcast(body, src=self.tp_root_global_rank, group=self.cpu_comm_group)
        return obj if self.is_tp_driver else unpack(bytes(body.numpy()))


def pack(states: list[RequestState], cancelled: list[str]) -> bytes:
    new = [
        {name: getattr(state, name) for name in _FIELDS} | {"stop": sorted(state._eos_token_ids)} for state in states
    ]
    return json.dumps({"new": new, "cancelled": cancelled}).encode()


def unpack(data: bytes) -> tuple[list[RequestState], list[str]]:
    payload = json.loads(data)
    states = [
        RequestState(**{name: entry[name] for name in _FIELDS}, eos_token_id=entry["stop"]) for entry in payload["new"]
    ]
    return states, payload["cancelled"]
