"""Real processes for the demo: started with a log each, waited for by their readiness, stopped without a trace."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

READY_S = 300.0
STOP_S = 120.0
_POLL_S = 0.05
#: The sockets of `free_port`: bound, so that the kernel gives their ports to no other process.
_held: list[socket.socket] = []


class ProcessFailed(Exception):
    """A process ended (`returncode`), or did not become ready (None). The message holds the end of its log."""

    def __init__(self, message: str, returncode: int | None = None) -> None:
        super().__init__(message)
        self.returncode = returncode


def free_port() -> int:
    """A port of 127.0.0.1 for a server that is started later, kept from all other processes while this one lives.

    None listens on it, so that connections are refused until the server does: it binds with SO_REUSEADDR, as servers
    do, beside a socket that does not listen.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _held.append(holder)
    port: int = holder.getsockname()[1]
    return port


@dataclass(frozen=True, slots=True)
class Child:
    name: str
    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def tail(self, lines: int = 15) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


@dataclass(slots=True)
class Children:
    """Each child leads a session of its own, so that it and everything it starts can be found again."""

    logs: Path
    running: list[Child] = field(default_factory=list)
    _starting: bool = False
    _interrupted: bool = False

    def interrupt(self, number: int, _frame: object = None) -> None:
        """A signal handler: ends the program by SystemExit, but never between a child's start and its being noted."""
        self._interrupted = True
        if not self._starting:
            raise SystemExit(128 + number)

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        port: int,
        *,
        module: str = "updater.cli.main",
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Run `liveweights <arguments>`, or another module. `environment`: beside what this process has."""
        self._starting = True
        try:
            child = self._start(name, [sys.executable, "-m", module, *arguments], port, environment or {})
            self.running.append(child)
        finally:
            self._starting = False
        if self._interrupted:
            raise SystemExit(128 + signal.SIGTERM)
        return child

    def _start(self, name: str, command: Sequence[str], port: int, environment: Mapping[str, str]) -> Child:
        log = self.logs / f"{name}.log"
        with open(log, "wb") as stream:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=_environment() | dict(environment),
                start_new_session=True,
            )
        return Child(name, f"http://127.0.0.1:{port}", log, process)

    def wait_ready(self, child: Child, path: str = "/readyz", deadline_s: float = READY_S) -> None:
        """Until the path answers 200. Raises ProcessFailed."""
        until = time.monotonic() + deadline_s
        with httpx.Client(base_url=child.url, trust_env=False, timeout=2.0) as http:
            while time.monotonic() < until:
                ended = child.process.poll()
                if ended is not None:
                    raise ProcessFailed(f"{child.name} ended with {ended}\n{child.tail()}", ended)
                try:
                    if http.get(path).status_code == 200:
                        return
                except httpx.HTTPError:
                    pass
                time.sleep(_POLL_S)
        raise ProcessFailed(f"{child.name} was not ready after {deadline_s:.0f} s\n{child.tail()}")

    def stop(self) -> list[str]:
        """Ask all to end, in the reverse order of their start; then make them. Returns what had to be made."""
        forced = []
        for child in reversed(self.running):
            if child.process.poll() is None:
                child.process.send_signal(signal.SIGTERM)
            try:
                child.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                forced.append(f"{child.name} did not end within {STOP_S:.0f} s")
            if _kill_group(child.process.pid):
                forced.append(f"{child.name} left processes behind")
            child.process.wait(STOP_S)
        self.running.clear()
        return forced


def alive(group: int) -> list[int]:
    """Processes of a group that run; a dead one that its parent has not collected yet does not count."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the command in parentheses, which may hold anything: state, parent, group.
            state, _parent, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(its_group) == group and state not in "ZX":
            found.append(int(stat.parent.name))
    return found


def _kill_group(group: int) -> bool:
    """Kill what is left of a session's process group. True if anything was."""
    if not alive(group):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    return True


def _environment() -> dict[str, str]:
    """Ours, without settings of another fleet; one thread per process, and no downloads."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("LIVEWEIGHTS_")}
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
