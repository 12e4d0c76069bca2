"""A coordinator and replicas in real processes, for benchmarks: started, published to over HTTP, stopped."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from updater.demo.processes import Child, Children, free_port

ENGINE = "benchmarks.measuring_engine:build"
VLLM_SERVER = "vllm.entrypoints.launchers.api_server.entry"
VLLM_WORKER = "benchmarks.measuring_worker.MeasuringWorker"


@dataclass(slots=True)
class Fleet:
    """One coordinator, one replica. `state`, `root`: folders of this fleet."""

    children: Children
    state: Path
    root: Path
    coordinator: Child
    replica: Child

    def publish(self, path: Path, step: int, **policy: Any) -> dict[str, Any]:
        """The receipt. Raises RuntimeError for any end but committed."""
        return self._post("/v1/updates", {"path": str(path), "version": step, "policy": policy})

    def rollback(self, target: str, live: str, **policy: str) -> dict[str, Any]:
        return self._post("/v1/rollback", {"target": target, "expected_live": live, "policy": policy})

    def complete(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        with self._http(self.replica) as http:
            body = {"prompt": prompt, "max_tokens": max_tokens}
            answer: dict[str, Any] = http.post("/v1/completions", json=body).raise_for_status().json()
        return answer

    def rank_pids(self) -> list[int]:
        with self._http(self.coordinator) as http:
            members = http.get("/v1/fleet").raise_for_status().json()["members"]
        return [rank["pid"] for member in members for rank in member["ranks"]]

    def shard_bytes(self) -> int:
        """Weights of all ranks together, replicated ones counted on each."""
        with self._http(self.coordinator) as http:
            members = http.get("/v1/fleet").raise_for_status().json()["members"]
        return sum(rank["weight_bytes"] for member in members for rank in member["ranks"])

    def ask_workers(self, method: str, **named: Any) -> list[Any]:
        """vLLM's own call of all its workers, in dev mode."""
        with self._http(self.replica) as http:
            answer = http.post("/collective_rpc", json={"method": method, "kwargs": named}).raise_for_status()
        results: list[Any] = answer.json()["results"]
        return results

    def kill_coordinator(self) -> None:
        """As a crash would: no goodbye."""
        self.coordinator.process.send_signal(signal.SIGKILL)
        self.coordinator.process.wait(10)
        self.children.running.remove(self.coordinator)

    def restart_coordinator(self) -> None:
        """On the same port and journal; returns when it is ready for the next update."""
        port = int(self.coordinator.url.rpartition(":")[2])
        self.coordinator = _serve(self.children, port, self.state, self.root)
        self.children.wait_ready(self.coordinator)

    def _post(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        with self._http(self.coordinator) as http:
            answer = http.post(route, params={"wait": "true"}, json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"{route} answered {answer.status_code}: {answer.text[:2000]}")
        receipt: dict[str, Any] = answer.json()
        return receipt

    def _http(self, child: Child) -> httpx.Client:
        return httpx.Client(base_url=child.url, trust_env=False, timeout=600.0)


@contextmanager
def fleet(work: Path, model: Path, tp: int, name: str) -> Iterator[Fleet]:
    """Engines of `measuring_engine`: the embedded one, which first measures a bare exchange of its own parameters."""
    folder = work / name
    folder.mkdir(parents=True, exist_ok=True)
    children = Children(folder)
    try:
        port = free_port()
        coordinator = _serve(children, port, folder / "state", work)
        children.wait_ready(coordinator, "/healthz")
        port = free_port()
        arguments = ["engine", "--model", str(model), "--tp", str(tp), "--port", str(port), "--replica", "r0"]
        options = ["--engine", ENGINE, "--option", f"bare_report={folder / 'bare'}"]
        sizes = ["--option", "num_blocks=64", "--option", "page_size=32"]
        where = ["--coordinator", coordinator.url, "--root", str(work)]
        replica = children.start("replica", [*arguments, *options, *sizes, *where], port)
        children.wait_ready(replica, deadline_s=300.0)
        yield Fleet(children, folder / "state", work, coordinator, replica)
    finally:
        children.stop()


@contextmanager
def vllm_fleet(work: Path, model: Path, dtype: str) -> Iterator[Fleet]:
    """A vLLM server at TP=1. Dev mode: for its own reload, and for what our workers measure on request."""
    folder = work / f"vllm-{model.name}-{dtype}"
    folder.mkdir(parents=True, exist_ok=True)
    children = Children(folder)
    try:
        port = free_port()
        coordinator = _serve(children, port, folder / "state", work)
        children.wait_ready(coordinator, "/healthz")
        port = free_port()
        arguments = ["--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype]
        sizes = ["--max-model-len", "512", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(256 << 20)]
        worker = ["--enforce-eager", "--worker-extension-cls", VLLM_WORKER]
        environment = {
            "VLLM_PLUGINS": "liveweights",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_CI_ENV": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "LIVEWEIGHTS_COORDINATOR": coordinator.url,
            "LIVEWEIGHTS_ROOTS": str(work),
        }
        replica = children.start(
            "vllm", [*arguments, *sizes, *worker], port, module=VLLM_SERVER, environment=environment
        )
        children.wait_ready(replica, deadline_s=600.0)
        yield Fleet(children, folder / "state", work, coordinator, replica)
    finally:
        children.stop()


def bare_exchange_s(work: Path, name: str) -> float:
    """Seconds (median) of a bare exchange: of the slower rank, with the chunk size that was best for all."""
    reports = [json.loads(path.read_text()) for path in sorted((work / name).glob("bare.*.json"))]
    return min(max(report[chunk] for report in reports) for chunk in reports[0])


def resident_bytes(pids: list[int]) -> int:
    """Proportional set size of these processes."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def _serve(children: Children, port: int, state: Path, root: Path) -> Child:
    os.makedirs(state, exist_ok=True)
    return children.start(
        "coordinator", ["serve", "--new-fleet", "--port", str(port), "--state", str(state), "--root", str(root)], port
    )
