"""A coordinator and vLLM servers that joined it, as processes of their own, for the length of a `with` block."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file

from tests.vllm_server.server import ANSWER_S, START_S, VllmServer, reserved_port, running, serve, wait_ready
from trainer_side.client.client import Client
from trainer_side.client.session import UpdateSession
from trainer_side.sources import as_source
from transports.registry import make_sender
from updater.server.security import ADMIN_ENV

Tensors = dict[str, torch.Tensor]

PREFIX = "/liveweights/v1"
#: The one worker inside the engine core's process, as vLLM has it on a GPU; on CPU it wants to be told.
IN_CORE: dict[str, Any] = {
    "arguments": ("--distributed-executor-backend", "uni"),
    "environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
}
_ENGINE = ("--worker-extension-cls", "engine_adapter.vllm.worker.LiveweightsWorker")


@dataclass(frozen=True, slots=True)
class Coordinator:
    """`client` talks to its HTTP API."""

    url: str
    client: httpx.Client
    log: Path
    token: str = ""

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


@dataclass(slots=True)
class Fleet:
    """One server under one coordinator, and the two checkpoints it goes between. `path`: what is live; `home`: a folder
    that sources may lie under; `slow`: the file whose presence makes its steps slow (`tests.vllm_server.slow`)."""

    coordinator: Coordinator
    server: VllmServer
    first: Path
    second: Path
    path: Path
    inference_key: str = ""
    home: Path = Path()
    slow: Path | None = None
    steps: Iterator[int] = field(default_factory=lambda: count(1))

    @property
    def live(self) -> str:
        found: str = self.coordinator.get("/v1/version")["version"]
        return found

    @property
    def other(self) -> Path:
        """The checkpoint that is not live."""
        return self.second if self.path == self.first else self.first

    def publish(self, path: Path, *, expect: int = 200, **policy: Any) -> dict[str, Any]:
        """The receipt, or the problem document."""
        answer = self.coordinator.push(path, next(self.steps), expect=expect, policy=policy)
        if expect == 200:
            self.path = path
        return answer

    @contextmanager
    def committing(self, path: Path, **policy: Any) -> Iterator[Callable[[], dict[str, Any]]]:
        """Staged and verified inside the block; what it is handed commits and returns the receipt.

        From then on steps are slow, until it is decided what becomes of the requests in flight: what begins in the
        block is in flight when the server is paused.
        """
        step, client = next(self.steps), self.coordinator.client
        body = {"version": step, "path": str(path), "policy": {**policy, "commit": "manual"}, "id": f"manual-{step}"}
        assert client.post("/v1/updates", json=body).status_code == 202
        at = f"/v1/updates/manual-{step}"
        until(lambda: self.coordinator.get(at)["phase"] == "ready", "the update is staged and verified")

        undecided = ("ready",) if policy.get("in_flight", "drain") == "drain" else ("ready", "pausing")

        def commit() -> dict[str, Any]:
            assert client.post(f"{at}/commit").status_code == 202
            until(lambda: self.coordinator.get(at)["phase"] not in undecided, "the replica is paused")
            self._fast()
            until(lambda: self.coordinator.get(at)["receipt"] is not None, "the update ended")
            receipt: dict[str, Any] = self.coordinator.get(at)["receipt"]
            assert receipt["outcome"] == "committed", receipt
            self.path = path
            return receipt

        if self.slow is not None:
            self.slow.touch()
        try:
            yield commit
        finally:
            self._fast()

    def _fast(self) -> None:
        if self.slow is not None:
            self.slow.unlink(missing_ok=True)

    @contextmanager
    def stream(self, path: Path, transport: str = "shared_memory") -> Iterator[tuple[UpdateSession, Tensors]]:
        """A session that is open, and the tensors of `path` to put into it."""
        tensors = dict(sorted(load_file(path / "model.safetensors").items()))
        source, sender = as_source(tensors), make_sender(transport)
        try:
            with (
                Client(self.coordinator.url, self.coordinator.token) as client,
                UpdateSession(client, sender, source.specs, next(self.steps), digests=source.digests()) as session,
            ):
                yield session, tensors
        finally:
            sender.close()


@contextmanager
def coordinator(home: Path, roots: Sequence[Path], token: str = "") -> Iterator[Coordinator]:
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
            "--new-fleet",
            "--port",
            str(port),
            "--state",
            str(home / "state"),
        ]
        for root in roots:
            command += ["--root", str(root)]
        environment = dict(os.environ) | ({ADMIN_ENV: token} if token else {})
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        with running(command, log, environment) as process:
            with httpx.Client(base_url=url, timeout=ANSWER_S, trust_env=False, headers=headers) as client:
                wait_ready(process, client, "/healthz", log)
                yield Coordinator(url, client, log, token)


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
        **({ADMIN_ENV: of.token} if of is not None and of.token else {}),
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
