"""Coordinators and replicas as processes that are killed, frozen, woken and started on other journals (I11).

Two replicas live through all of it. `calm` brings them back together before each test.
"""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_adapter.testing import make_toy_checkpoint
from tests.cases import replica_program
from tests.standing import stand_still
from trainer_side.client.client import Client
from trainer_side.publishing.pusher import Pusher
from updater.core.participant import Fence, FenceRequest
from updater.demo.processes import free_port
from updater.protocol import wire

pytestmark = [pytest.mark.engine, pytest.mark.slow]

GUARD_S = 240.0
NAMES = ("a", "b")


class World:
    """One place for a coordinator (`port`, `state`: its journal), and two replicas that know no other."""

    def __init__(self, home: Path) -> None:
        self.home, self.port = home, free_port()
        self.ports = {name: free_port() for name in NAMES}
        self.http = httpx.Client(timeout=60.0, trust_env=False)
        self.states, self.step = 0, 0
        self.replicas: dict[str, subprocess.Popen[bytes]] = {}
        self.others: list[subprocess.Popen[bytes]] = []
        self.models = [make_toy_checkpoint(home / f"model-{seed}", seed=seed) for seed in (7, 8, 9)]
        self.state = self.new_state()
        self.coordinator = self.serve(self.state, self.port, "--new-fleet")
        for name in NAMES:
            self.begin(name)

    # ----- processes

    def new_state(self) -> Path:
        self.states += 1
        return self.home / f"state-{self.states}"

    def serve(self, state: Path, port: int, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "updater.cli.main", "serve", "--port", str(port), "--state", str(state)]
        with (self.home / f"coordinator-{port}.log").open("ab") as log:
            process = subprocess.Popen([*command, "--root", str(self.home), *options], stdout=log, stderr=log)
        self.others.append(process)
        return process

    def restart(self, state: Path | None = None, *options: str) -> None:
        """Another life of the coordinator, as after a crash."""
        self.end(self.coordinator)
        self.state = state or self.state
        self.coordinator = self.serve(self.state, self.port, *options)
        self.until(lambda: self.asked(self.port, "/healthz") is not None)

    def begin(self, name: str) -> None:
        with (self.home / f"{name}.log").open("ab") as log:
            self.replicas[name] = subprocess.Popen(
                [
                    sys.executable, replica_program.__file__, name, self.models[0], str(self.ports[name]),
                    f"http://127.0.0.1:{self.port}", self.home, self.home / f"ranks-{name}",
                ],
                stdout=log,
                stderr=log,
            )  # fmt: skip

    def end(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait(GUARD_S)

    def close(self) -> None:
        for process in self.replicas.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.wait(GUARD_S)
        for process in self.others:
            self.end(process)
        self.http.close()

    # ----- asking

    def asked(self, port: int, path: str, **members: Any) -> httpx.Response | None:
        """None while no server answers."""
        try:
            address = f"http://127.0.0.1:{port}{path}"
            return self.http.post(address, json=members) if members else self.http.get(address)
        except httpx.TransportError:
            return None

    def until(self, reached: Callable[[], bool]) -> None:
        end = time.monotonic() + GUARD_S
        while not reached():
            assert time.monotonic() < end, "hangs"
            time.sleep(0.05)

    def told(self, port: int, path: str) -> dict[str, Any]:
        answer = self.asked(port, path)
        found: dict[str, Any] = answer.json() if answer is not None else {}
        return found

    def fleet(self, port: int | None = None) -> dict[str, Any]:
        return self.told(port or self.port, "/v1/fleet")

    def member(self, name: str) -> dict[str, Any]:
        found = [each for each in self.fleet().get("members", []) if each["replica"] == name]
        return found[0] if found else {}

    def held(self, port: int | None = None) -> str:
        """Why the coordinator is not ready, as a code; empty: it is ready, or says nothing."""
        return str(self.told(port or self.port, "/readyz").get("code", ""))

    def ready(self) -> bool:
        return self.told(self.port, "/readyz").get("status") == "ready"

    def serves(self, name: str) -> str:
        """The label that a completion of this replica carries, empty if it is shut."""
        answer = self.asked(self.ports[name], "/v1/completions", prompt=[5, 6, 7], max_tokens=2, ignore_eos=True)
        return answer.json()["liveweights"]["version"] if answer is not None and answer.status_code == 200 else ""

    def front(self, name: str) -> dict[str, Any]:
        answer = self.asked(self.ports[name], "/participant/v1/status")
        answer = self.http.post(f"http://127.0.0.1:{self.ports[name]}/participant/v1/status", json={})
        found: dict[str, Any] = answer.json()
        return found

    def urls(self) -> dict[str, str]:
        return {name: f"http://127.0.0.1:{port}" for name, port in self.ports.items()}

    def push(self, port: int | None = None) -> httpx.Response:
        """The next version, whatever became of the last one."""
        self.step += 1
        body = {"path": str(self.models[self.step % 2 + 1]), "version": self.step}
        return self.http.post(f"http://127.0.0.1:{port or self.port}/v1/updates?wait=true", json=body)

    def published(self, port: int | None = None) -> str:
        answer = self.push(port)
        assert answer.status_code == 200, answer.text
        return f"0-{self.step}"

    def published_everywhere(self) -> bool:
        """Both replicas serve the next version as soon as its receipt is there."""
        label = self.published()
        return {self.serves(name) for name in NAMES} == {label}

    def calm(self) -> str:
        """Both replicas are members that serve one version; returns its label."""
        for name in NAMES:
            if self.replicas[name].poll() is not None:
                self.begin(name)
        if self.coordinator.poll() is not None:
            self.restart()
        self.until(lambda: self.ready() and all(self.member(name).get("incarnation") for name in NAMES))
        label = self.published()
        self.until(lambda: all(self.serves(name) == label for name in NAMES))
        return label


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("fleet"))
    try:
        yield world
    finally:
        world.close()


@pytest.fixture
def world(shared: World) -> World:
    shared.calm()
    return shared


@pytest.mark.case("F15")
def test_a_refused_verb_leaves_no_mark(world: World) -> None:
    said = world.front("a")
    fence = Fence(said["fleet"], said["epoch"], 5000, 1, said["incarnation"], said["owner"])
    for verb in ("install", "invalidate", "pause"):
        body = json.loads(wire.encode(FenceRequest(fence)))
        body |= {
            "pause": {"in_flight": "drain", "quiesce_s": 1.0, "lease_s": 1.0},
            "invalidate": {"cache": "reset"},
        }.get(verb, {})
        answer = world.http.post(f"{world.urls()['a']}/participant/v1/{verb}", json=body)
        assert answer.json()["code"] == "wrong_phase", answer.text
    for change in ({"epoch": 7}, {"fleet": "default"}):
        body = {"fence": {**json.loads(wire.encode(fence)), **change}}
        answer = world.http.post(f"{world.urls()['a']}/participant/v1/discard", json=body)
        assert answer.json()["code"] == "replica_fenced"
    label = world.published()
    assert {world.serves(name) for name in NAMES} == {label}


@pytest.mark.case("F13")
def test_a_member_that_was_silent_at_a_recovery_takes_streams_again(world: World) -> None:
    stand_still(world.replicas["a"].pid)
    world.restart()
    world.until(lambda: world.member("a").get("state") == "lost")
    world.replicas["a"].send_signal(signal.SIGCONT)
    world.until(lambda: world.member("a").get("state") == "open" and world.ready())
    world.step += 1
    with Pusher(f"http://127.0.0.1:{world.port}", transport="broadcast") as pusher:
        receipt = pusher.push(world.models[1], world.step)
    assert receipt.outcome == "committed"
    assert {world.serves(name) for name in NAMES} == {f"0-{world.step}"}


@pytest.mark.case("F12")
def test_a_member_that_was_declared_dead_and_wakes_up_joins_again_in_the_same_process(world: World) -> None:
    before = world.front("b")["incarnation"]
    stand_still(world.replicas["b"].pid)
    world.until(lambda: world.member("b").get("state") == "lost")
    gone = world.http.delete(f"http://127.0.0.1:{world.port}/v1/fleet/replicas/b?confirm_dead=true")
    assert gone.status_code == 204
    label = world.published()
    world.replicas["b"].send_signal(signal.SIGCONT)
    world.until(lambda: world.serves("b") == label)
    assert world.replicas["b"].poll() is None
    assert world.front("b")["incarnation"] != before
    assert world.published_everywhere()


@pytest.mark.case("F10")
def test_the_loss_of_a_journal_shuts_no_replica_and_begins_no_other_fleet(world: World) -> None:
    label, identity = world.serves("a"), world.fleet()["identity"]
    world.restart(world.new_state())
    world.end(world.replicas["b"])
    world.begin("b")
    world.until(lambda: world.held() == "adopt_needed" and bool(world.front("a")["unclaimed"]))
    ready = world.asked(world.ports["a"], "/readyz")
    assert ready is not None
    assert (ready.status_code, ready.json()["unclaimed"]) == (200, True)
    assert world.push().json()["code"] == "adopt_needed"
    log = world.home / "b.log"
    world.until(lambda: "adopt_needed" in log.read_text())
    assert (world.serves("a"), world.serves("b")) == (label, "")
    command = [sys.executable, "-m", "updater.cli.main", "adopt", "--json", "--url", f"http://127.0.0.1:{world.port}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S)
    assert done.returncode == 0, done.stderr
    adopted = json.loads(done.stdout)
    assert (adopted["identity"], adopted["live_version"], adopted["hold"]) == (identity, label, None)
    assert not world.front("a")["unclaimed"]
    world.until(lambda: world.member("b").get("state") == "joining")
    label = world.published()
    world.until(lambda: {world.serves(name) for name in NAMES} == {label})


@pytest.mark.case("F11")
def test_an_older_journal_follows_what_its_members_serve(world: World) -> None:
    world.end(world.coordinator)
    older = world.new_state()
    shutil.copytree(world.state, older)
    world.restart()
    world.until(world.ready)
    label = world.published()
    world.restart(older)
    world.until(world.ready)
    assert world.fleet()["live_version"] == label
    world.end(world.replicas["b"])
    world.begin("b")
    world.until(lambda: world.member("b").get("state") == "joining")
    assert (world.serves("a"), world.serves("b")) == (label, "")
    label = world.published()
    world.until(lambda: {world.serves(name) for name in NAMES} == {label})


@pytest.mark.case("F11")
def test_an_older_journal_waits_for_a_member_that_stands_still(world: World) -> None:
    world.end(world.coordinator)
    older = world.new_state()
    shutil.copytree(world.state, older)
    world.restart()
    world.until(world.ready)
    label = world.published()
    stand_still(world.replicas["b"].pid)
    world.restart(older)
    world.until(lambda: world.held() == "behind")
    assert world.push().json()["code"] == "behind"
    assert world.serves("a") == label
    world.replicas["b"].send_signal(signal.SIGCONT)
    world.until(world.ready)
    assert world.fleet()["live_version"] == label
    assert world.published_everywhere()


@pytest.mark.case("F09")
def test_a_coordinator_whose_fleet_was_adopted_while_it_stood_still_stops(world: World) -> None:
    label = world.serves("a")
    stand_still(world.coordinator.pid)
    second, state = free_port(), world.new_state()
    taker = world.serve(state, second)
    world.until(lambda: world.held(second) == "listening")
    with Client(f"http://127.0.0.1:{second}") as client:
        adopted = client.adopt(world.urls())
    assert (adopted.live_version, {each.state for each in adopted.members}) == (label, {"open"})
    label = world.published(second)
    old = world.coordinator
    old.send_signal(signal.SIGCONT)
    assert old.wait(GUARD_S) == 1
    assert {world.serves(name) for name in NAMES} == {label}
    # Started again on its journal, it takes nothing back.
    lost_state = world.state
    world.restart(lost_state)
    world.until(lambda: world.held() == "behind")
    assert world.push().json()["code"] == "behind"
    label = world.published(second)
    assert {world.serves(name) for name in NAMES} == {label}
    world.end(taker)
    world.restart(state)
    world.until(world.ready)


def claimed(state: Path) -> tuple[int, str]:
    """Epoch and owner that the journal in this folder names."""
    with closing(sqlite3.connect(state / "journal.sqlite3")) as db:
        epoch, owner = db.execute("SELECT epoch, owner FROM ownership").fetchone()
    return int(epoch), str(owner)


@pytest.mark.case("F61")
def test_a_state_folder_copied_while_its_coordinator_lives_takes_the_fleet_with_the_next_epoch(world: World) -> None:
    label, state, second = world.serves("a"), world.new_state(), free_port()
    shutil.copytree(world.state, state)
    old, taker = world.coordinator, world.serve(state, second)
    assert old.wait(GUARD_S) == 1
    assert " ERROR " in (world.home / f"coordinator-{world.port}.log").read_text()
    assert {world.serves(name) for name in NAMES} == {label}
    label = world.published(second)
    assert {world.serves(name) for name in NAMES} == {label}
    world.end(taker)
    world.restart(state)
    world.until(world.ready)


@pytest.mark.case("F61")
def test_of_two_coordinators_on_copies_with_one_epoch_the_higher_owner_loses(world: World) -> None:
    """Both start while no replica can say whom it obeys, so both claim the same epoch."""
    label, second = world.serves("a"), free_port()
    copy = world.new_state()
    shutil.copytree(world.state, copy)
    world.end(world.coordinator)
    for name in NAMES:
        stand_still(world.replicas[name].pid)
    before = claimed(copy)
    other = world.serve(copy, second)
    world.restart()
    world.until(lambda: all(claimed(state) != before for state in (world.state, copy)))
    sides = {claimed(state): (port, process, state) for state, port, process in (
        (world.state, world.port, world.coordinator), (copy, second, other))}  # fmt: skip
    assert {epoch for epoch, _ in sides} == {before[0] + 1}
    for name in NAMES:
        world.replicas[name].send_signal(signal.SIGCONT)
    (winner, _, kept), (loser, lost, _) = (sides[claim] for claim in sorted(sides))
    world.until(lambda: lost.poll() == 1 or world.held(loser) == "behind")
    assert {world.serves(name) for name in NAMES} == {label}
    world.until(lambda: [each["state"] for each in world.fleet(winner)["members"]] == ["open", "open"])
    assert {world.front(name)["owner"] for name in NAMES} == {min(sides)[1]}
    assert world.held(winner) == ""
    world.until(lambda: "copy" in (world.home / f"coordinator-{winner}.log").read_text())
    if lost.poll() is None:
        assert world.push(loser).json()["code"] == "behind"
    label = world.published(winner)
    assert {world.serves(name) for name in NAMES} == {label}
    for process in (other, world.coordinator):
        world.end(process)
    world.restart(kept)
    world.until(world.ready)
