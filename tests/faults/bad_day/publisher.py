"""The trainer of a bad day: a process of its own that pushes over every transport, and can be killed or stand still."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.bad_day.fleet import START_S, Fleet, NotStarted
from tests.standing import stand_still

TRANSPORTS = ("disk", "broadcast", "shared_memory")


@dataclass(frozen=True)
class Answer:
    """What a push came back with. `codes`: of the error's failures, none for a receipt. `receipt`: as JSON."""

    codes: tuple[str, ...] = ()
    receipt: Mapping[str, Any] | None = None
    text: str = ""

    @property
    def outcome(self) -> str:
        """Empty where the trainer was not told."""
        return str(self.receipt["outcome"]) if self.receipt else ""


class Trainer:
    """One life of it. Commands one at a time: `begin`, then `answer`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._line = connection.makefile("rw")
        self.pid: int = json.loads(self._line.readline())["pid"]
        self.stopped = False
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="bad-day-trainer", daemon=True).start()

    @property
    def alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def begin(self, command: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._line.write(json.dumps(command) + "\n")
            self._line.flush()

    def answer(self, seconds: float) -> Answer | None:
        """None if it died, or said nothing in time."""
        try:
            return self._answers.get(timeout=seconds)
        except queue.Empty:
            return None

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            stand_still(self.pid)
            self.stopped = True

    def go_on(self) -> None:
        if self.stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)
        self.stopped = False

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        while self.alive:
            time.sleep(0.005)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for text in self._line:
                told = json.loads(text)
                self._answers.put(Answer(tuple(told.get("codes", ())), told["receipt"], told.get("error", "")))
        self._answers.put(None)


class Trainers:
    """Where trainers come from: a process that has everything imported and forks."""

    def __init__(self, fleet: Fleet) -> None:
        self._address = str(fleet.home / "trainers.sock")
        told = {
            "address": self._address,
            "coordinator": fleet.network.links["trainer"].url,
            "sender_port": fleet.sender_port,
            "advertise": "127.0.0.2",
            "bucket_bytes": fleet.stand.bucket_bytes,
        }
        self.life = fleet.run("trainers", "trainers", told)

    def new(self) -> Trainer:
        end = time.monotonic() + START_S
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(self._address)
                return Trainer(connection)
            except OSError:
                connection.close()
                if time.monotonic() > end or not self.life.alive:
                    raise NotStarted(f"no trainers: {self.life.tail()}") from None
                time.sleep(0.05)

    def close(self) -> None:
        self.life.kill(signal.SIGTERM)
        Path(self._address).unlink(missing_ok=True)
