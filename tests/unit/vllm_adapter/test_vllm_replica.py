"""A replica around a vLLM server whose join goes wrong: it says so, and is not joining for ever."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from engine_adapter.replica.app import ReplicaApp
from engine_adapter.replica.lifecycle import Membership, ReplicaLifecycle
from engine_adapter.vllm.gate import VllmGate
from engine_adapter.vllm.replica import VllmReplica
from updater.core.errors import Aborted, Failure, Rejected, Unavailable


class Pool:
    """Ranks that never come."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def start(self, _deadline_s: float) -> Any:
        raise self._error

    async def stop(self) -> None:
        pass


async def generate(prompt: Any, sampling_params: Any, request_id: str) -> AsyncGenerator[Any, None]:
    """As vLLM's client has it."""
    yield prompt, sampling_params, request_id


class Asked(httpx.AsyncBaseTransport):
    """A coordinator that says yes to everything. `calls`: (method, path) of what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.called = asyncio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.calls.append((request.method, request.url.path))
        self.called.set()
        return httpx.Response(200, json={})


@pytest.mark.parametrize(
    ("error", "code"), [(Aborted(Failure("rank_failed", "no worker")), "rank_failed"), (OSError("no room"), "internal")]
)
def test_a_join_that_fails_says_why_whatever_was_raised(error: Exception, code: str) -> None:
    async def main() -> None:
        async def abort(_request_id: str) -> None:
            pass

        replica: Any = VllmReplica.__new__(VllmReplica)
        replica.settings = SimpleNamespace(start_s=5.0, replica="r")
        replica.face = ReplicaApp("r", VllmGate(abort))
        told: list[Any] = []
        replica._pool, replica._life = Pool(error), SimpleNamespace(refuse=told.append, keep_asking=lambda: None)
        replica.begin()
        assert await replica._joining is False
        (found,) = told
        assert (found.code, str(error).split(": ")[-1] in str(found)) == (code, True)

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.case("F24")
def test_a_server_that_stays_up_without_a_front_goes_on_asking_its_coordinator_in() -> None:
    """Which then asks it who it is, hears why it cannot start, and says so of it."""
    why = Failure("placement_refused", "other weights", hint="load them")

    async def main() -> None:
        async def abort(_request_id: str) -> None:
            pass

        asked = Asked()
        replica: Any = VllmReplica.__new__(VllmReplica)
        replica.settings = SimpleNamespace(start_s=5.0, stop_s=5.0, replica="r")
        replica.face = ReplicaApp("r", gate := VllmGate(abort))
        pool: Any = Pool(Rejected(why))
        membership = Membership("r", "http://r.test", "m", "http://coordinator.test", transport=asked)
        replica._pool, replica._life = pool, ReplicaLifecycle(membership, pool, gate, replica.face)
        replica.begin()
        await asked.called.wait()
        assert asked.calls == [("POST", "/v1/fleet/replicas")]
        body = json.loads(bytes((await replica.face.readyz()).body))
        assert [(each["code"], each["hint"]) for each in body["failures"][1:]] == [(why.code, why.hint)]
        with pytest.raises(Unavailable) as caught:
            await replica.face.version()
        assert caught.value.failures == (why.at(replica="r"),)
        with pytest.raises(Unavailable) as caught:  # at once: the gate waits for nothing
            await anext(gate.gating(generate)("hello", None, "one"))
        assert caught.value.failures[-1].code == why.code
        await replica.stop()

    asyncio.run(asyncio.wait_for(main(), 60))
