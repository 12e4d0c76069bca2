"""What passes between a front and a vLLM worker beside the rank protocol: how a worker introduces itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Attach:
    """First frame of a worker on the front's socket. `token`: what the front told it through vLLM's own channel."""

    token: str
    rank: int
    size: int
    pid: int


@dataclass(frozen=True, slots=True)
class Attached:
    """What a worker extension method answers through `collective_rpc`: it never raises across it."""

    rank: int
    ok: bool
    error: str = ""
