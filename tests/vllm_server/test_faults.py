"""Ranks that fail, hang and die inside a real vLLM engine at TP=2; then it is started anew and catches up.

The tests of this file share one engine and run in order: the last one kills it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_adapter.models import encode, reference_tokens
from engine_adapter.vllm.testing import EXTENSION, ORDERS
from tests.vllm_server.fleet import Coordinator, Fleet, coordinator, member, until
from tests.vllm_server.models import PROMPTS, Checkpoints

COUNT = 32
REPLICA = "vllm"


class Faulty(Fleet):
    """A fleet whose ranks follow orders."""

    __slots__ = ()

    @property
    def orders(self) -> Path:
        return self.home / "faults"

    def order(self, *orders: str) -> None:
        """At once and whole: the workers read it at any time."""
        fresh = self.home / "faults.new"
        fresh.write_text("\n".join(orders))
        fresh.replace(self.orders)

    def serves(self, path: Path) -> bool:
        answer = self.server.complete(PROMPTS[0], COUNT)
        expected = reference_tokens(path, encode(PROMPTS[0]), COUNT).tokens
        return answer.tokens == expected and answer.body["liveweights"]["version"] == self.live

    def member(self) -> dict[str, Any]:
        found: dict[str, Any] = self.coordinator.get("/v1/fleet")["members"][0]
        return found

    def ask_workers(self, method: str, **named: Any) -> list[Any]:
        """vLLM's own call of all its workers, in dev mode."""
        answer = self.server.client.post("/collective_rpc", json={"method": method, "kwargs": named})
        found: list[Any] = answer.raise_for_status().json()["results"]
        return found

    def ready(self) -> bool:
        return self.server.client.get("/readyz").status_code == 200


@pytest.fixture(scope="module")
def made(checkpoints: Callable[..., Checkpoints], tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoints, Path]:
    return checkpoints("llama"), tmp_path_factory.mktemp("faulty")


@pytest.fixture(scope="module")
def at(made: tuple[Checkpoints, Path]) -> Iterator[Coordinator]:
    models, home = made
    with coordinator(home / "coordinator", [models.first.parent, home]) as found:
        yield found


@pytest.fixture(scope="module")
def shared(made: tuple[Checkpoints, Path], at: Coordinator) -> Iterator[Faulty]:
    """Dev mode only so that the engine can be put to sleep, and its workers be called beside us."""
    models, home = made
    environment = {ORDERS: str(home / "faults"), "VLLM_SERVER_DEV_MODE": "1"}
    with member(
        models.first,
        home / "server.log",
        at,
        roots=[models.first.parent, home],
        ranks=2,
        replica=REPLICA,
        arguments=("--worker-extension-cls", EXTENSION),
        environment=environment,
    ) as server:
        yield Faulty(at, server, models.first, models.second, models.first, home=home)


@pytest.fixture
def fleet(shared: Faulty) -> Iterator[Faulty]:
    """Nothing is ordered before and after."""
    yield shared
    shared.order()


@pytest.mark.parametrize("transport", ["broadcast", "shared_memory"])
def test_a_trainers_stream_reaches_both_ranks(fleet: Faulty, transport: str) -> None:
    goes_to = fleet.other
    with fleet.stream(goes_to, transport) as (session, tensors):
        for name, tensor in tensors.items():
            session.put(name, tensor)
        session.seal()
        receipt = session.wait()
    assert (receipt.outcome, receipt.proof) == ("committed", "digests")
    fleet.path = goes_to
    assert fleet.serves(goes_to)


@pytest.mark.parametrize("verb", ["plan", "stage", "verify", "stand", "pause"])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_that_fails_before_the_decision_leaves_the_old_version_serving(
    fleet: Faulty, verb: str, rank: int
) -> None:
    """Nor do the ranks' states diverge, as flags do that only some of them reset: the next update goes through."""
    before = fleet.path
    fleet.order(f"raise:before:{verb}:{rank}")
    problem = fleet.publish(fleet.other, expect=424)
    assert [(failure["code"], failure["rank"]) for failure in problem["failures"]] == [("rank_failed", rank)]
    assert problem["outcome"] in ("rejected", "aborted")
    assert fleet.ready()
    assert fleet.serves(before)
    fleet.order()
    fleet.publish(fleet.other)
    assert fleet.serves(fleet.path)


def test_a_call_that_fails_on_one_rank_leaves_no_reply_behind_for_the_next_call(fleet: Faulty) -> None:
    """vLLM's executor stops reading at the first rank that raises, and gives its later callers what the others said."""
    fleet.order("raise:before:stand:0")
    fleet.publish(fleet.other, expect=424)
    fleet.order()
    for _ in range(2):
        refused = fleet.ask_workers("liveweights_attach", address=str(fleet.home / "nobody"), token="none")
        assert [(reply["rank"], reply["ok"]) for reply in refused] == [(0, False), (1, False)]
        assert all("FileNotFoundError" in reply["error"] for reply in refused)
        assert fleet.ask_workers("check_health") == [None, None]
    fleet.publish(fleet.other)
    assert fleet.serves(fleet.path)


@pytest.mark.parametrize("order", ["raise:before:install:1", "once:before:set_version:0", "once:after:set_version:1"])
def test_one_rank_that_fails_while_it_installs_takes_all_back(fleet: Faulty, order: str) -> None:
    before, digest = fleet.path, fleet.member()["live_digest"]
    fleet.order(order)
    problem = fleet.publish(fleet.other, expect=424)
    assert problem["outcome"] == "rolled_back"
    assert fleet.member()["live_digest"] == digest
    assert fleet.ready()
    assert fleet.serves(before)
    fleet.order()
    fleet.publish(fleet.other)
    assert fleet.serves(fleet.path)


def test_a_rank_that_can_neither_install_nor_go_back_shuts_the_replica_until_it_is_readmitted(fleet: Faulty) -> None:
    before, client = fleet.path, fleet.server.client
    fleet.order("raise:before:set_version:0")
    fleet.publish(fleet.other, expect=424)
    assert client.get("/readyz").status_code == 503
    with pytest.raises(httpx.HTTPStatusError) as caught:
        fleet.server.complete(PROMPTS[0], COUNT)
    assert caught.value.response.status_code == 503
    fleet.order()
    assert client.post("/liveweights/v1/replica/v1/readmit", json={}).status_code == 200
    until(fleet.ready, "the readmitted replica opened")
    assert fleet.serves(before)
    fleet.publish(fleet.other)
    assert fleet.serves(fleet.path)


def test_a_rank_that_hangs_while_it_stages_ends_the_update_and_not_the_service(fleet: Faulty) -> None:
    before = fleet.path
    fleet.order("hang:before:stage:1")
    problem = fleet.publish(fleet.other, expect=424, deadline_s=3.0)
    assert problem["code"] == "phase_timeout"
    assert fleet.serves(before)
    fleet.order()
    fleet.publish(fleet.other)
    assert fleet.serves(fleet.path)


def test_a_rank_that_hangs_at_the_pause_keeps_the_replica_shut_until_it_answers(fleet: Faulty) -> None:
    before = fleet.path
    fleet.order("hang:before:pause:1")
    problem = fleet.publish(fleet.other, expect=424, quiesce_s=2.0, attempts=1)
    assert problem["code"] in ("phase_timeout", "quiesce_timeout")
    fleet.order()
    until(fleet.ready, "the replica opened again")
    assert fleet.serves(before)
    fleet.publish(fleet.other)
    assert fleet.serves(fleet.path)


def test_an_engine_that_sleeps_is_refused_and_not_touched(fleet: Faulty) -> None:
    before, client = fleet.path, fleet.server.client
    assert client.post("/sleep").status_code == 200
    problem = fleet.publish(fleet.other, expect=424)
    assert problem["code"] == "replica_asleep"
    assert client.post("/wake_up").status_code == 200
    assert fleet.serves(before)
    fleet.publish(fleet.other)
    assert fleet.serves(fleet.path)


def test_a_rank_that_is_killed_ends_the_replica_and_a_new_one_catches_up_before_it_serves(
    fleet: Faulty, made: tuple[Checkpoints, Path], at: Coordinator
) -> None:
    models, home = made
    if fleet.path == models.first:
        fleet.publish(models.second)
    live, digest = fleet.live, fleet.member()["live_digest"]
    assert live != "start"
    os.kill(fleet.member()["ranks"][1]["pid"], signal.SIGKILL)

    def gone() -> bool:
        try:
            return not fleet.ready()
        except httpx.TransportError:
            return True

    until(gone, "the replica is out of service")
    with pytest.raises((httpx.TransportError, httpx.HTTPStatusError)):
        fleet.server.complete(PROMPTS[0], COUNT)
    until(lambda: fleet.server.process.poll() is not None, "vLLM ended itself")
    roots = [models.first.parent, home]
    with member(models.first, home / "again.log", at, roots=roots, ranks=2, replica=REPLICA) as server:
        again = Faulty(at, server, models.first, models.second, models.second, home=home)
        assert (again.live, again.member()["live_version"], again.member()["live_digest"]) == (live, live, digest)
        assert again.serves(models.second)
        assert server.client.get("/liveweights/v1/version").json()["version"] == live
