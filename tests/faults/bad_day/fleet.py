"""The processes of one fleet: a coordinator, a replica over two ranks, one over a single rank; each can die alone."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.faults.bad_day.engines import Stand, vllm_server
from tests.faults.bad_day.relay import Network
from tests.standing import stand_still
from updater.demo.processes import free_port

RANKS = {"pair": 2, "single": 1}
MARK = "BAD_DAY"  # in the environment of every process of one fleet, and of what these start
START_S, VLLM_START_S = 90.0, 400.0  # only a hang reaches it
_ASK_S = 3.0
JOURNAL = "journal.sqlite3"


class NotStarted(AssertionError):
    """A process of the fleet ended, or did not come up."""


@dataclass(eq=False)
class Life:
    """One process of ours, with its log."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    stopped: bool = False
    _reader: threading.Thread | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        """SIGSTOP."""
        if self.alive:
            stand_still(self.pid)
            self.stopped = True

    def go_on(self) -> None:
        if self.stopped and self.alive:
            os.kill(self.pid, signal.SIGCONT)
        self.stopped = False

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.go_on()
        if self.alive:
            self.process.send_signal(number)
        try:
            self.process.wait(30.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(30.0)

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""


@dataclass(eq=False)
class Fleet:
    """`home` holds everything: checkpoints under `models`, the journal under `state`, what processes call temporary
    under `tmp`. Nothing of it is shared with another fleet. Used from one thread, which has to live as long.
    """

    home: Path
    stand: Stand
    network: Network = field(default_factory=Network)
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    fronts: dict[str, Life] = field(default_factory=dict)
    models: dict[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("tmp", "logs"):
            (self.home / name).mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.ports = {name: free_port() for name in RANKS}
        self.sender_port = free_port()
        for name in RANKS:
            self.network.link(f"to {name}", ("127.0.0.1", self.ports[name]))
            self.network.link(f"from {name}", ("127.0.0.1", self.port))
        self.network.link("trainer", ("127.0.0.1", self.port))
        self.network.link("ranks", ("127.0.0.1", self.sender_port), "127.0.0.2", self.sender_port)
        self.client = httpx.Client(timeout=_ASK_S, trust_env=False)
        self._groups: set[int] = set()
        self.coordinator: Life | None = None
        self.seconds: list[Life] = []  # further coordinators
        self.second_port = 0  # of the last one
        self.state = self.home / "state"
        self.copy: Path | None = None  # of the state folder, as it was some time ago

    # ----- life

    def start(self) -> None:
        self.start_coordinator()
        for name in RANKS:
            self.start_front(name)
        start_s = VLLM_START_S if self.stand.is_vllm else START_S
        self.until(lambda: all(self.is_open(name) for name in RANKS), "both replicas serve", start_s)

    def start_coordinator(self) -> None:
        told = self._told(self.state, self.port)
        self.coordinator = self.run("coordinator", "coordinator", told)
        self.until(lambda: self.get("/healthz") is not None, "the coordinator answers", watched=self.coordinator)

    def start_second(self, state: Path, *, take_over: bool = False) -> Life:
        """Another coordinator, at another address. Does not wait."""
        self.second_port = free_port()
        told = {**self._told(state, self.second_port), "take_over": take_over}
        self.seconds.append(self.run("second", "coordinator", told))
        return self.seconds[-1]

    def _told(self, state: Path, port: int) -> dict[str, Any]:
        return {"state": str(state), "roots": [str(self.home)], "port": port, "slower": self.stand.slower}

    def second_answers(self) -> bool:
        return self._ask(f"http://127.0.0.1:{self.second_port}/healthz") is not None

    def end_seconds(self) -> None:
        """An operator keeps one of them: what the others have taken, the first address serves again."""
        lived = [life for life in self.seconds if life.alive]
        for life in [*lived, self.coordinator] if lived else ():
            if life is not None:
                life.kill(signal.SIGTERM)
        self.seconds.clear()

    def keep_copy(self) -> None:
        """Of the journal as it is now, for a round to come."""
        fresh = self.home / "copy.new"
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(self.state, fresh, ignore=shutil.ignore_patterns("*.sqlite3*", "lock*"))
        with (
            contextlib.closing(sqlite3.connect(self.state / JOURNAL)) as journal,
            contextlib.closing(sqlite3.connect(fresh / JOURNAL)) as kept,
        ):
            journal.backup(kept)
        self.copy = self.home / "copy"
        shutil.rmtree(self.copy, ignore_errors=True)
        fresh.rename(self.copy)

    def adopt(self, port: int) -> bool:
        """`POST /v1/fleet/adopt` with all replicas."""
        members = [{"replica": name, "url": self.announced(name)} for name in RANKS]
        url = f"http://127.0.0.1:{port}/v1/fleet/adopt"
        with contextlib.suppress(httpx.HTTPError):
            return self.client.post(url, json={"members": members, "confirm": True}, timeout=30.0).status_code == 200
        return False

    def announced(self, name: str) -> str:
        """Where the coordinator finds a front's contract."""
        return self.network.links[f"to {name}"].url + self.stand.below

    def delete(self, route: str) -> None:
        with contextlib.suppress(httpx.HTTPError):
            self.client.delete(f"http://127.0.0.1:{self.port}{route}")

    def start_front(self, name: str, model: Path | None = None) -> None:
        """On the checkpoint it started on before, if no other one is named. Does not wait."""
        model = self.models[name] = model or self.models.get(name, self.stand.checkpoints[0])
        if self.stand.is_vllm:
            self.fronts[name] = self._start_vllm(name, model)
            return
        told = {
            "model": str(model),
            "tp": RANKS[name],
            "port": self.ports[name],
            "announced": self.announced(name),
            "coordinator": self.network.links[f"from {name}"].url,
            "replica": name,
            "roots": [str(self.home)],
            "engine": self.stand.engine,
            "options": dict(self.stand.options),
        }
        self.fronts[name] = self.run(name, "front", told)

    def _start_vllm(self, name: str, model: Path) -> Life:
        told = {
            **self._marks(),
            "LIVEWEIGHTS_COORDINATOR": self.network.links[f"from {name}"].url,
            "LIVEWEIGHTS_URL": self.network.links[f"to {name}"].url,
            "LIVEWEIGHTS_REPLICA": name,
            "LIVEWEIGHTS_ROOTS": str(self.home),
            "LIVEWEIGHTS_WAIT_S": "10",
        }
        command, environment = vllm_server(model, RANKS[name], self.ports[name], told, self.home)
        return self._run(name, command, environment)

    def run(self, name: str, kind: str, told: Mapping[str, Any]) -> Life:
        """A process of `programs`."""
        command = [sys.executable, "-m", "tests.faults.bad_day.programs", kind, json.dumps(told)]
        return self._run(name, command, self.environment())

    def _run(self, name: str, command: list[str], environment: Mapping[str, str]) -> Life:
        """Its output comes through a pipe: a limit on the sizes of its files is not one on its log."""
        log = self.home / "logs" / f"{name}.log"
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        reader = threading.Thread(target=_copy, args=(process, log), name=f"log of {name}", daemon=True)
        reader.start()
        self._groups.add(process.pid)
        return Life(name, process, log, _reader=reader)

    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("LIVEWEIGHTS_")}
        ours = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        return kept | self._marks() | ours

    def _marks(self) -> dict[str, str]:
        return {MARK: self.token, "TMPDIR": str(self.home / "tmp")}

    def close(self) -> list[str]:
        """Ask all to end, fronts first. Returns what was left of them, which is gone then too."""
        self.network.mend()
        self.go_on()
        for life in [*self.fronts.values(), *self.seconds, self.coordinator]:
            if life is not None:
                life.kill(signal.SIGTERM)
        left = [f"{process.name()} {process.pid}" for process in self.processes()]
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        left += [str(path.relative_to(self.home)) for path in sorted((self.home / "tmp").iterdir())]
        self.network.close()
        self.client.close()
        return left

    def go_on(self) -> None:
        """SIGCONT to all that stand still, ranks too."""
        for life in [*self.fronts.values(), *self.seconds, self.coordinator]:
            if life is not None:
                life.go_on()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()  # whatever its state: one that is busy may not show yet that it was told to stop

    # ----- looking

    def processes(self) -> list[psutil.Process]:
        """All that carry the mark of this fleet, or are in a group of its processes: one that gives itself a title may
        have written over its environment."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.status() != psutil.STATUS_ZOMBIE and self._is_ours(process):
                    found.append(process)
        return found

    def _is_ours(self, process: psutil.Process) -> bool:
        return os.getpgid(process.pid) in self._groups or process.environ().get(MARK) == self.token

    def ranks(self, name: str) -> list[psutil.Process]:
        life = self.fronts.get(name)
        if life is None or not life.alive:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(life.pid).children(recursive=True)
            return [child for child in children if _is_rank(child.cmdline())]
        return []

    def not_ready(self) -> str:
        """The code for which the coordinator says that it cannot publish; empty if it can, or does not answer."""
        with contextlib.suppress(httpx.HTTPError, ValueError):
            answer = self.client.get(f"http://127.0.0.1:{self.port}/readyz")
            return "" if answer.status_code == 200 else str(answer.json().get("code", ""))
        return ""

    def get(self, route: str) -> Any:
        """What the coordinator answers, not through a relay; None for no answer or a refusal."""
        return self._ask(f"http://127.0.0.1:{self.port}{route}")

    def status(self, name: str) -> Any:
        """The front's own status, or None."""
        return self._ask(f"{self.url(name)}{self.stand.below}/participant/v1/status", {})

    def url(self, name: str) -> str:
        """Of the front itself, where clients ask."""
        return f"http://127.0.0.1:{self.ports[name]}"

    def is_open(self, name: str) -> bool:
        status = self.status(name)
        return status is not None and status["state"] == "open"

    def _ask(self, url: str, body: Any = None) -> Any:
        try:
            answer = self.client.get(url) if body is None else self.client.post(url, json=body)
            return answer.json() if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            return None

    def until(
        self, reached: Callable[[], bool], what: str, seconds: float = START_S, watched: Life | None = None
    ) -> None:
        """Asked again and again. Raises NotStarted if it never comes true, or `watched` ended."""
        end = time.monotonic() + seconds
        while not reached():
            if time.monotonic() > end or (watched is not None and not watched.alive):
                logs = [watched] if watched is not None else [*self.fronts.values(), self.coordinator]
                told = "\n".join(f"--- {life.name}\n{life.tail()}" for life in logs if life is not None)
                raise NotStarted(f"not within {seconds:g} s: {what}\n{told}")
            time.sleep(0.05)

    # ----- the disk of the coordinator

    def fill_disk(self) -> None:
        """From now on no file of the coordinator grows beyond a page: its next append fails, as on a full disk."""
        if self.coordinator is not None and self.coordinator.alive:
            _, hard = resource.prlimit(self.coordinator.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(self.coordinator.pid, resource.RLIMIT_FSIZE, (4096, hard))

    def free_disk(self) -> None:
        if self.coordinator is not None and self.coordinator.alive:
            _, hard = resource.prlimit(self.coordinator.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(self.coordinator.pid, resource.RLIMIT_FSIZE, (hard, hard))


@contextlib.contextmanager
def running_fleet(home: Path, stand: Stand) -> Iterator[Fleet]:
    fleet = Fleet(home, stand)
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.close()


def _is_rank(command: list[str]) -> bool:
    """Of ours, or of vLLM's workers, which give themselves a title."""
    return "engine_adapter.rank.main" in command or any(part.startswith("VLLM::Worker") for part in command)


def _copy(process: subprocess.Popen[bytes], log: Path) -> None:
    output = process.stdout
    if output is not None:
        with output, log.open("ab") as kept:
            for line in output:
                kept.write(line)
                kept.flush()
