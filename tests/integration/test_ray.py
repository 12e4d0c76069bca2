"""Coordinator, replicas and trainer as Ray actors on two nodes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, RayActorError

from engine_adapter.testing.fronts import PROMPT
from tests.integration.ray_stage import (
    DEADLINES,
    HANG_S,
    Fleet,
    Nodes,
    Trainer,
    ask,
    ask_again,
    code_of,
    gone,
    ray_fleet,
    tokens,
    two_nodes,
    until,
)
from trainer_side import AsyncClient
from trainer_side.client.client import Canceller
from updater.core.errors import LiveweightsError, Rejected, Unavailable
from updater.ray_actor import start_coordinator, stop_coordinator
from updater.settings import STATE_ENV, Settings

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(4 * HANG_S)]

ROOT = Path(__file__).resolve().parents[2]
#: As many calls as a trainer's rollouts may have open at once.
PENDING = 2000


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with two_nodes() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def fleet(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ray_fleet(tmp_path_factory.mktemp("ray"), "test") as fleet:
        fleet.start("one", "left", tp=2)
        fleet.start("two", "right", step_ms=100)
        for replica in fleet.replicas.values():
            assert ask(replica.ready.remote())["body"]["state"] == "open"
        yield fleet


def test_a_trainer_actor_publishes_to_replicas_on_two_nodes_and_takes_it_back(fleet: Fleet) -> None:
    a, b = fleet.paths
    nodes = {ask(replica.processes.remote())["node"] for replica in fleet.replicas.values()}
    assert len(nodes) == 2
    trainer = ray.remote(Trainer).options(num_cpus=0).remote(fleet.coordinator)
    first = ask(trainer.push.remote(8, fleet.next(), directory=str(fleet.home / "pushed")))
    assert (first["outcome"], first["proof"], first["version"]) == ("committed", "digests", "0-1")
    second = ask(trainer.push.remote(7, fleet.next(), transport="broadcast"))
    assert (second["outcome"], second["proof"]) == ("committed", "digests")
    for name in fleet.replicas:
        fleet.serves(name, a, "0-2")
    back = ask(trainer.rollback.remote())
    assert (back["outcome"], back["kind"], back["live_version"]) == ("committed", "rollback", "0-1")
    for name in fleet.replicas:
        fleet.serves(name, b, "0-1")
    ray.kill(trainer)


def test_verbs_of_the_actors_are_those_of_http(fleet: Fleet) -> None:
    coordinator, one = fleet.coordinator, fleet.replicas["one"]
    assert ask(coordinator.version.remote())["body"]["version"] == fleet.client.version().version
    assert [receipt.version for receipt in fleet.client.history(1)] == [
        receipt["version"] for receipt in ask(coordinator.history.remote(1))["body"]["receipts"]
    ]
    begun = ask(coordinator.begin.remote({"path": str(fleet.other()), "version": fleet.next()}))
    assert begun["status"] == 202
    update = begun["body"]["id"]
    told = [ask(event) for event in coordinator.events.remote(update)]
    assert (told[0]["event"], told[-1]["event"], told[-1]["data"]["outcome"]) == ("phase", "receipt", "committed")
    assert [name for name, _data in fleet.client.events(update)] == ["phase", "receipt"]
    assert ask(coordinator.state.remote(update))["body"]["receipt"] == told[-1]["data"]
    refused = ask(coordinator.commit.remote(update))
    assert (refused["status"], refused["body"]["code"]) == (409, "wrong_phase")
    unknown = ask(next(coordinator.events.remote("nobody")))
    assert (unknown["event"], unknown["data"]["code"]) == ("problem", "not_found")
    error = code_of(lambda: fleet.client.update({"path": str(fleet.home / "missing"), "version": fleet.next()}))
    assert isinstance(error, Rejected)
    assert error.code == "source_missing"
    status = ask(one.status.remote())
    assert (status["status"], status["body"]["state"]) == (200, "open")
    assert ask(one.install.remote({}))["status"] == 400
    # What takes long has its own room: no call can put it into control's.
    assert ask(one.request.remote("POST", "/v1/completions", "{}"))["status"] == 400


def test_joins_and_adoptions_by_hand_end_as_they_do_over_http(fleet: Fleet) -> None:
    nobody = ask(fleet.coordinator.join.remote("ghost", "ray://ghost@test"))
    assert (nobody["status"], nobody["body"]["code"]) == (503, "unreachable")
    assert nobody["body"]["failures"][0]["replica"] == "ghost"
    again = ask(fleet.coordinator.adopt.remote([{"replica": "ghost", "url": "ray://ghost@test"}]))
    assert (again["status"], again["body"]["code"]) == (409, "wrong_phase")


def test_completions_come_as_a_stream(fleet: Fleet) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True, "stream": True})
    status, *pieces = [ask(piece) for piece in fleet.replicas["one"].stream.remote("POST", "/v1/completions", body)]
    assert status == 200
    assert len(pieces) > 2  # as they were made
    *chunks, done = [line.removeprefix("data: ") for line in "".join(pieces).split("\n\n") if line]
    assert done == "[DONE]"
    made = [token for chunk in chunks for token in json.loads(chunk)["choices"][0]["token_ids"]]
    assert made == tokens(fleet.live_path())


def test_the_async_client_and_a_cut_stream_of_events(fleet: Fleet) -> None:
    update = fleet.manual(fleet.other())
    fleet.phase(update, "ready")
    cut, first = Canceller(), threading.Event()

    def read() -> LiveweightsError:
        def events() -> None:
            for _event in fleet.client.events(update, cut):
                first.set()

        return code_of(events)

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        assert first.wait(HANG_S)
        cut()
        assert isinstance(reading.result(HANG_S), Unavailable)
    # The reader was let go of by its cut, not because the update ended.
    assert fleet.client.status(update).phase == "ready"

    async def over() -> list[str]:
        async with AsyncClient(f"ray://coordinator@{fleet.namespace}") as client, asyncio.timeout(HANG_S):
            assert (await client.version()).version == fleet.client.version().version
            with pytest.raises(Rejected):
                await client.status("nobody")
            await client.abort(update)
            return [name async for name, _data in client.events(update)]

    assert asyncio.run(over())[-1] == "receipt"
    assert fleet.ended(update).outcome == "aborted"


def test_an_update_gets_through_two_thousand_pending_generate_calls(fleet: Fleet) -> None:
    two, path = fleet.replicas["two"], fleet.other()
    calls = [two.generate.remote(PROMPT, 64, ignore_eos=True) for _ in range(PENDING)]
    until(lambda: _gauge(two, "in_flight") >= 16)
    step = fleet.next()
    policy = {"in_flight": "abort"}
    receipt = fleet.client.update({"path": str(path), "version": step, "policy": policy})
    assert receipt.outcome == "committed"
    assert receipt.aborted_requests > 0
    done, pending = ray.wait(calls, num_returns=PENDING, timeout=0)
    assert len(pending) > PENDING // 2  # most never had their turn
    cut = [ask(call)["body"] for call in done]
    assert {answer["liveweights"].get("reason") for answer in cut} >= {"aborted_by_update"}
    for call in pending:
        ray.cancel(call)
    # A caller that gives up leaves nothing behind, at the gate or in the engine (I6).
    until(lambda: _gauge(two, "in_flight") + _gauge(two, "waiting") == 0)
    for name in fleet.replicas:
        fleet.serves(name, path, f"0-{step}")


def _gauge(replica: Any, name: str) -> float:
    text = ask(replica.request.remote("GET", "/metrics"))["text"]
    return float(next(line.split()[1] for line in text.splitlines() if line.startswith(f"liveweights_replica_{name} ")))


def test_a_replica_killed_in_an_update_is_named_and_serves_again_only_when_it_caught_up(fleet: Fleet) -> None:
    a, b = fleet.paths
    if fleet.live_path() == a:  # what it starts on must not be what is live
        fleet.client.update({"path": str(b), "version": fleet.next()})
    live, two = fleet.client.version().version or "", fleet.replicas["two"]
    before = ask(two.processes.remote())
    update = fleet.manual(a)
    fleet.phase(update, "ready")
    os.kill(before["front"], signal.SIGKILL)
    receipt = fleet.ended(update)
    assert receipt.outcome == "aborted"
    assert [(failure.code, failure.replica) for failure in receipt.failures][:1] == [("replica_lost", "two")]
    fleet.serves("one", b, live)
    # The first answer of its next life: it waited at a shut gate until it had what is live.
    answer = ask_again(lambda: two.generate.remote(PROMPT, 6, ignore_eos=True))
    assert answer["body"]["liveweights"]["version"] == live
    assert answer["body"]["choices"][0]["token_ids"] == tokens(b)
    after = ask(two.processes.remote())
    assert after["front"] != before["front"]
    until(lambda: gone(before["ranks"]))
    step = fleet.next()
    assert fleet.client.update({"path": str(a), "version": step}).outcome == "committed"
    for name in fleet.replicas:
        fleet.serves(name, a, f"0-{step}")


def test_a_replica_that_lost_a_rank_is_restarted_and_catches_up(fleet: Fleet) -> None:
    one, path, step = fleet.replicas["one"], fleet.other(), fleet.next()
    fleet.client.update({"path": str(path), "version": step})
    before = ask(one.processes.remote())
    os.kill(before["ranks"][1], signal.SIGKILL)
    until(lambda: gone([before["front"]]))
    ask_again(lambda: one.ready.remote())
    fleet.open()
    until(lambda: gone(before["ranks"]))
    fleet.serves("one", path, f"0-{step}")


def test_a_coordinator_killed_in_the_pause_recovers_from_its_journal(fleet: Fleet) -> None:
    epoch, before = fleet.client.version().epoch, fleet.client.version().version
    old, new = fleet.live_path(), fleet.other()
    update, step = fleet.manual(new), fleet.steps
    fleet.phase(update, "ready")
    pid = ask(fleet.coordinator.pid.remote())
    for name, data in _told(fleet, update):
        if name == "phase" and data["phase"] == "ready":
            fleet.client.commit(update)
        elif name == "phase" and data["phase"] not in ("planning", "staging", "verifying", "pausing"):
            os.kill(pid, signal.SIGKILL)
            break
    receipt, version = fleet.ended(update), fleet.client.version()
    assert version.epoch == epoch + 1
    assert ask(fleet.coordinator.pid.remote()) != pid
    live, path = (f"0-{step}", new) if receipt.outcome == "committed" else (before, old)
    assert receipt.outcome in ("committed", "rolled_back")
    assert version.version == live
    for name in fleet.replicas:
        fleet.serves(name, path, live or "")
    fleet.open()
    again = fleet.next()
    assert fleet.client.update({"path": str(fleet.other()), "version": again}).version == f"0-{again}"


def _told(fleet: Fleet, update: str) -> Iterator[tuple[str, Any]]:
    yield from fleet.client.events(update)


def test_a_replica_of_a_dead_node_comes_back_on_another_one(fleet: Fleet, nodes: Nodes) -> None:
    two, path, step = fleet.replicas["two"], fleet.other(), fleet.next()
    fleet.client.update({"path": str(path), "version": step})
    before = ask(two.processes.remote())
    nodes.add("right")
    nodes.kill(before["node"])
    until(lambda: gone([before["front"], *before["ranks"]]))  # the actor outlives its node for a moment, and answers
    answer = ask_again(lambda: two.generate.remote(PROMPT, 6, ignore_eos=True))["body"]
    assert (answer["liveweights"]["version"], answer["choices"][0]["token_ids"]) == (f"0-{step}", tokens(path))
    after = ask(two.processes.remote())
    assert after["node"] not in (before["node"], ask(fleet.replicas["one"].processes.remote())["node"])
    again, other = fleet.next(), fleet.other()
    assert fleet.client.update({"path": str(other), "version": again}).outcome == "committed"
    for name in fleet.replicas:
        fleet.serves(name, other, f"0-{again}")


@pytest.mark.case("F14")
def test_a_coordinator_actor_needs_a_folder_that_all_nodes_see(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STATE_ENV, raising=False)
    for state in (None, Path("state")):
        with pytest.raises(LiveweightsError) as refused:
            start_coordinator(Settings(state=state), namespace="nowhere")
        assert refused.value.code == "state_not_shared"
        assert refused.value.failures[0].hint
    with pytest.raises(ValueError):
        ray.get_actor("coordinator", namespace="nowhere")


@pytest.mark.case("F14")
def test_a_second_coordinator_actor_is_refused_or_takes_over_on_another_node(nodes: Nodes, tmp_path: Path) -> None:
    """One folder, as a shared disk would show it to both nodes."""
    settings = Settings(state=tmp_path / "state", roots=(tmp_path,), deadlines=DEADLINES, new_fleet=True)
    first = start_coordinator(settings, namespace="first", resources={"left": 1})
    assert ask(first.version.remote())["body"]["epoch"] == 1

    refused = start_coordinator(settings, namespace="second", max_restarts=0, resources={"right": 1})
    with pytest.raises(ActorDiedError) as died:
        ask(refused.version.remote())
    error = died.value.args[0].cause  # what the actor could not begin for, as Ray carries it to its caller
    assert isinstance(error, Rejected)
    assert (error.code, error.failures[0].file) == ("state_in_use", str(tmp_path / "state" / "lock"))
    assert error.hint
    assert ask(first.version.remote())["body"]["epoch"] == 1

    taker = start_coordinator(settings, namespace="third", take_over=True, resources={"right": 1})
    assert ask(taker.version.remote())["body"]["epoch"] == 2
    # It notices by itself, ends for good and is not started again by Ray.
    until(lambda: _is_over(first))
    assert ask(taker.version.remote())["body"]["epoch"] == 2

    # Its own next life takes over from the one before, which Ray may have given up while it was only frozen.
    pid = ask(taker.pid.remote())
    os.kill(pid, signal.SIGKILL)
    assert ask_again(lambda: taker.version.remote())["body"]["epoch"] == 3
    assert ask(taker.pid.remote()) != pid
    stop_coordinator(taker, HANG_S)


def _is_over(coordinator: Any) -> bool:
    try:
        ask(coordinator.version.remote())
    except RayActorError:
        return True
    return False


def test_the_example_publishes_three_versions(nodes: Nodes, tmp_path: Path) -> None:
    environment = os.environ | {"RAY_ADDRESS": nodes.address, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "05_ray.py"), str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=2 * HANG_S,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    lines = ran.stdout.splitlines()
    assert [line.split()[:2] for line in lines if "committed" in line] == [
        ["0-1", "committed"],
        ["0-2", "committed"],
        ["0-3", "committed"],
    ]
    assert {line.split()[1] for line in lines if line.startswith("answered")} == {"0-3"}
