"""A coordinator and vLLM servers that joined it, as processes of their own, for the length of a `with` block."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.vllm.server import ANSWER_S, START_S, VllmServer, reserved_port, running, serve, wait_ready

PREFIX = "/v1/liveweights"
_ENGINE = ("--worker-extension-cls", "engine_adapter.vllm.worker.LiveweightsWorker")


@dataclass(frozen=True, slots=True)
class Coordinator:
    """`client` talks to its HTTP API."""

    url: str
    client: httpx.Client
    log: Path

    def push(self, path: Path, step: int, *, expect: int | None = 200, **body: Any) -> dict[str, Any]:
        """Publish a folder and wait; the receipt or the problem document."""
        request = {"version": step, "path": str(path), **body}
        answer = self.client.post("/v1/updates", params={"wait": "true"}, json=request)
        found: dict[str, Any] = answer.json()
        assert expect is None or answer.status_code == expect, found
        return found

    def rollback(self, target: str, expected_live: str, **body: Any) -> dict[str, Any]:
        request = {"target": target, "expected_live": expected_live, **body}
        answer = self.client.post("/v1/rollback", params={"wait": "true"}, json=request)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def get(self, route: str) -> Any:
        return self.client.get(route).json()


@contextmanager
def coordinator(home: Path, roots: Sequence[Path]) -> Iterator[Coordinator]:
    """`liveweights serve` with its journal in `home`."""
    home.mkdir(parents=True, exist_ok=True)
    log = home / "coordinator.log"
    with reserved_port() as port:
        url = f"http://127.0.0.1:{port}"
        command = [
            sys.executable,
            "-m",
            "updater.cli.main",
            "serve",
            "--port",
            str(port),
            "--state",
            str(home / "state"),
        ]
        for root in roots:
            command += ["--root", str(root)]
        with running(command, log, dict(os.environ)) as process:
            with httpx.Client(base_url=url, timeout=ANSWER_S, trust_env=False) as client:
                wait_ready(process, client, "/healthz", log)
                yield Coordinator(url, client, log)


@contextmanager
def member(
    model: Path,
    log: Path,
    of: Coordinator | None,
    *,
    roots: Sequence[Path] = (),
    replica: str = "vllm",
    arguments: Sequence[str] = (),
    environment: Mapping[str, str | None] | None = None,
    joined: bool = True,
    **options: Any,
) -> Iterator[VllmServer]:
    """A stock vLLM server with worker extension and endpoint plugin, no more. `joined`: wait until it serves."""
    told: dict[str, str | None] = {
        "VLLM_PLUGINS": "liveweights",
        "LIVEWEIGHTS_REPLICA": replica,
        "LIVEWEIGHTS_ROOTS": os.pathsep.join(str(root) for root in roots),
        "LIVEWEIGHTS_COORDINATOR": of.url if of is not None else "",
        **(environment or {}),
    }
    ready = "/readyz" if joined else "/health"
    with serve(model, log, ready=ready, arguments=(*_ENGINE, *arguments), environment=told, **options) as server:
        yield server


def until(reached: Any, what: str, seconds: float = START_S) -> None:
    """Until `reached()` is true: a hang guard, not a measurement."""
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.05)
