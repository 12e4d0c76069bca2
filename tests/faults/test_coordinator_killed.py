"""A real coordinator process, killed at every point of an update, over real HTTP to simulated fronts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn

from updater.coordinator.clock import LoopClock
from updater.demo.processes import free_port
from updater.testing.fronts import SimulatedFront, digest_of, front_app

PROGRAM = Path(__file__).with_name("coordinator_program.py")
GUARD_S = 180.0

pytestmark = pytest.mark.slow


def listen() -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener


class Fronts:
    """Simulated fronts on sockets of their own, in a thread of this process."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.fronts: dict[str, SimulatedFront] = {}
        self._servers: list[uvicorn.Server] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._listeners = {name: listen() for name in ("one", "two")}
        for name, listener in self._listeners.items():
            front = SimulatedFront(name, LoopClock(), url=f"http://127.0.0.1:{listener.getsockname()[1]}")
            self.fronts[name] = front
            config = uvicorn.Config(front_app(front), log_level="error", lifespan="off")
            self._servers.append(uvicorn.Server(config))
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        pairs = zip(self._servers, self._listeners.values(), strict=True)
        self.loop.run_until_complete(asyncio.gather(*(server.serve(sockets=[each]) for server, each in pairs)))

    def hold(self, name: str, verb: str) -> None:
        async def set_hold() -> None:
            self.fronts[name].hold[verb] = asyncio.Event()

        asyncio.run_coroutine_threadsafe(set_hold(), self.loop).result(GUARD_S)

    def release(self) -> None:
        async def let_go() -> None:
            for front in self.fronts.values():
                for event in front.hold.values():
                    event.set()
                front.hold.clear()

        asyncio.run_coroutine_threadsafe(let_go(), self.loop).result(GUARD_S)

    @property
    def serving(self) -> list[str | None]:
        return [front.serving for front in self.fronts.values()]

    @property
    def digests(self) -> set[str]:
        return {front.state.live.digest for front in self.fronts.values()}

    def close(self) -> None:
        self.release()
        for server in self._servers:
            server.should_exit = True
        self._thread.join(GUARD_S)
        for listener in self._listeners.values():
            listener.close()
        self.loop.close()


class Process:
    """One life of the coordinator."""

    def __init__(self, folder: Path, port: int, when: str = "") -> None:

        (folder / "checkpoints").mkdir(exist_ok=True)
        command = [sys.executable, str(PROGRAM), str(folder / "state"), str(folder / "checkpoints"), str(port)]
        self._process = subprocess.Popen([*command, *when.split()])
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=GUARD_S, trust_env=False)
        until(self._alive)

    def _alive(self) -> bool:
        assert self._process.poll() is None, "it ended by itself"
        with contextlib.suppress(httpx.HTTPError):
            return self.http.get("/healthz").status_code == 200
        return False

    def kill(self, number: int = signal.SIGKILL) -> int:
        self._process.send_signal(number)
        return self.ended()

    def ended(self) -> int:
        return self._process.wait(GUARD_S)

    def close(self) -> None:
        self.http.close()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(GUARD_S)


def until(holds: Callable[[], bool]) -> None:
    """Poll a fact of another process; the limit is only a guard against a hang."""
    end = time.monotonic() + GUARD_S
    while not holds():
        if time.monotonic() > end:
            raise AssertionError("it never came true")
        time.sleep(0.02)


class World:
    def __init__(self, folder: Path) -> None:
        self.folder, self.fronts = folder, Fronts()
        self.port = free_port()
        self.lives: list[Process] = []

    def start(self, when: str = "") -> Process:
        self.lives.append(Process(self.folder, self.port, when))
        return self.lives[-1]

    def checkpoint(self, step: int) -> dict[str, object]:
        path = self.folder / "checkpoints" / f"v{step}"
        path.write_text(f"v{step}")
        return {"path": str(path), "version": step}

    def join_and_push_seven(self, life: Process) -> None:
        for front in self.fronts.fronts.values():
            answer = life.http.post("/v1/fleet/replicas", json={"replica": front.replica, "url": front.url})
            assert answer.status_code == 201, answer.text
        until(lambda: self.fronts.serving == ["start", "start"])
        answer = life.http.post("/v1/updates?wait=true", json=self.checkpoint(7))
        assert answer.status_code == 200, answer.text

    def ends_on(self, life: Process, version: str, outcome: str) -> None:
        until(lambda: self.fronts.serving == [version, version])
        assert life.http.get("/v1/version").json()["version"] == version
        assert self.fronts.digests == {digest_of(f"v{version[-1]}")}
        until(lambda: life.http.get("/v1/updates/0-8").json()["receipt"] is not None)
        assert life.http.get("/v1/updates/0-8").json()["receipt"]["outcome"] == outcome
        answer = life.http.post("/v1/updates?wait=true", json=self.checkpoint(9))
        assert answer.status_code == 200, answer.text
        assert self.fronts.serving == ["0-9", "0-9"]

    def close(self) -> None:
        for life in self.lives:
            life.close()
        self.fronts.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize(
    ("verb", "version", "outcome"),
    [
        ("plan", "0-7", "aborted"),
        ("stage", "0-7", "aborted"),
        ("verify", "0-7", "aborted"),
        ("pause", "0-7", "aborted"),
        ("install", "0-7", "rolled_back"),
        ("invalidate", "0-8", "committed"),
        ("resume", "0-8", "committed"),
    ],
)
def test_killed_in_every_phase(world: World, verb: str, version: str, outcome: str) -> None:
    first = world.start()
    world.join_and_push_seven(first)
    world.fronts.hold("two", verb)
    assert first.http.post("/v1/updates", json=world.checkpoint(8)).status_code == 202
    until(lambda: world.fronts.fronts["two"].asked(verb) == 2)
    first.kill()
    if verb != "install":  # a member that is still at work has not installed
        world.fronts.release()
    second = world.start()
    world.fronts.release()
    world.ends_on(second, version, outcome)


@pytest.mark.parametrize(
    ("when", "version", "outcome"),
    [
        ("before decided", "0-7", "aborted"),
        ("after decided", "0-7", "rolled_back"),
        ("before published", "0-8", "committed"),
        ("after published", "0-8", "committed"),
    ],
)
def test_killed_around_every_record(world: World, when: str, version: str, outcome: str) -> None:
    first = world.start(when)
    world.join_and_push_seven(first)
    assert first.http.post("/v1/updates", json=world.checkpoint(8)).status_code == 202
    assert first.ended() == -signal.SIGKILL
    world.ends_on(world.start(), version, outcome)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_aborts_what_is_undecided_and_ends_cleanly(world: World, number: signal.Signals) -> None:
    first = world.start()
    world.join_and_push_seven(first)
    world.fronts.hold("two", "stage")
    answers: list[httpx.Response] = []
    waiting = threading.Thread(
        target=lambda: answers.append(first.http.post("/v1/updates?wait=true", json=world.checkpoint(8)))
    )
    waiting.start()
    until(lambda: world.fronts.fronts["two"].asked("stage") == 2)
    assert first.kill(number) == 0
    waiting.join(GUARD_S)
    assert answers[0].json()["receipt"]["outcome"] == "aborted"
    assert world.fronts.serving == ["0-7", "0-7"]
    assert world.fronts.fronts["one"].state.plan is None
    world.fronts.release()
    world.ends_on(world.start(), "0-7", "aborted")


def test_a_second_coordinator_on_the_same_address_takes_nothing_over(world: World) -> None:

    first = world.start()
    world.join_and_push_seven(first)
    command = [sys.executable, str(PROGRAM), str(world.folder / "state"), str(world.folder / "checkpoints")]
    second = subprocess.run([*command, str(world.port)], stderr=subprocess.DEVNULL, timeout=GUARD_S)
    assert second.returncode == 1
    assert first.http.post("/v1/updates?wait=true", json=world.checkpoint(8)).status_code == 200
    assert world.fronts.serving == ["0-8", "0-8"]


@pytest.mark.case("B156")
def test_paths_that_no_client_library_would_send_are_closed_too(tmp_path: Path) -> None:
    """On the wire: with a token configured, nothing but the two exact paths answers without it."""

    port = free_port()
    program = (
        "import sys; from pathlib import Path; from updater.server.serving import serve; "
        "from updater.settings import Settings; "
        "from updater.server.security import Tokens;"
        "serve(Settings(state=Path(sys.argv[1]), port=int(sys.argv[2]), new_fleet=True, tokens=Tokens.from_env()))"
    )
    env = os.environ | {"LIVEWEIGHTS_ADMIN_TOKEN": "admin-token-0123"}
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path), str(port)], env=env)
    try:
        until(lambda: answers(port, "/healthz") == 200)
        for path in (
            "/v1/version",
            "//v1/version",
            "/v1/../healthz",
            "/healthz/..",
            "/healthz/",
            "/HEALTHZ",
            "*",
            "/%2e",
        ):
            assert answers(port, path) in (400, 401), path
        assert answers(port, "/v1/version", "Authorization: Bearer admin-token-0123\r\n") == 200
        doubled = "Authorization: Bearer admin-token-0123\r\n" * 2
        assert answers(port, "/v1/version", doubled) == 401
    finally:
        process.terminate()
        assert process.wait(GUARD_S) == 0


def answers(port: int, path: str, headers: str = "") -> int:
    """The status of one raw request, 0 when no process listens."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=GUARD_S) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n{headers}Connection: close\r\n\r\n".encode())
            return int(connection.makefile("rb").readline().split()[1])
    except (OSError, IndexError):
        return 0
