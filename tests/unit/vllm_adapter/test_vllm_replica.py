"""A replica around a vLLM server whose join goes wrong: it says so, and is not joining for ever."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from engine_adapter.replica.app import ReplicaFace
from engine_adapter.vllm.replica import VllmReplica
from engine_adapter.vllm.traffic.gate import VllmGate
from updater.core.errors import Aborted, Failure


class Pool:
    """Ranks that never come."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def start(self, _deadline_s: float) -> Any:
        raise self._error


@pytest.mark.parametrize(
    ("error", "code"), [(Aborted(Failure("rank_failed", "no worker")), "rank_failed"), (OSError("no room"), "internal")]
)
def test_a_join_that_fails_says_why_whatever_was_raised(error: Exception, code: str) -> None:
    async def main() -> None:
        async def abort(_request_id: str) -> None:
            pass

        replica: Any = VllmReplica.__new__(VllmReplica)
        replica.settings = SimpleNamespace(start_s=5.0, replica="r")
        replica.face = ReplicaFace("r", VllmGate(abort))
        told: list[Any] = []
        replica._pool, replica._life = Pool(error), SimpleNamespace(refuse=told.append)
        replica.begin()
        assert await replica._joining is False
        (found,) = told
        assert (found.code, str(error).split(": ")[-1] in str(found)) == (code, True)

    asyncio.run(asyncio.wait_for(main(), 60))
