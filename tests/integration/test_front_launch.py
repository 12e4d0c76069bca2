"""`liveweights engine` beside a real coordinator: joins, serves what is published, catches up, leaves no trace."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from engine_adapter.testing import ToyReference, make_toy_checkpoint
from updater.demo.processes import free_port
from updater.server.security import ADMIN_ENV, INFERENCE_ENV

pytestmark = pytest.mark.engine

PROMPT = [5, 6, 7, 8, 9, 10]
START_S, STOP_S = 200.0, 120.0


@contextmanager
def program(log: Path, *arguments: object, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """`liveweights <arguments>` with 256 descriptors; killed at the end if the test did not stop it."""
    limited = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256));"
    limited += "os.execv(sys.executable, [sys.executable, '-m', 'updater.cli.main', *sys.argv[1:]])"
    command = [sys.executable, "-c", limited, *map(str, arguments)]
    with log.open("ab") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env=os.environ | environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    with httpx.Client(base_url=url, trust_env=False, timeout=30.0) as client:
        while time.monotonic() < end:
            assert process.poll() is None, log.read_text()
            try:
                if client.get("/readyz").status_code == 200:
                    return
            except httpx.TransportError:
                pass  # no process listens yet
            time.sleep(0.1)  # between two questions; the deadline is START_S
    raise AssertionError(log.read_text())


def complete(url: str, token: str = "") -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=200.0, trust_env=False)
    told: dict[str, Any] = answer.json()
    return told


def ended(process: subprocess.Popen[bytes], how: signal.Signals, ranks: list[psutil.Process]) -> int:
    process.send_signal(how)
    status = process.wait(STOP_S)
    _, alive = psutil.wait_procs(ranks, timeout=STOP_S)
    assert alive == []
    return status


@contextmanager
def idlers(*urls: str, count: int = 300) -> Iterator[None]:
    """So many connections to each that say nothing, and as many that say half a header."""
    with ExitStack() as open_ones:
        for url in urls:
            host, port = url.removeprefix("http://").rsplit(":", 1)
            for number in range(2 * count):
                line = open_ones.enter_context(socket.create_connection((host, int(port)), timeout=START_S))
                if number % 2:
                    with suppress(ConnectionError):  # it may have been closed already
                        line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Le")
        yield


@pytest.mark.case("F40", "F42")
def test_a_replica_joins_serves_catches_up_and_leaves(tmp_path: Path) -> None:
    """With a token: the coordinator speaks to the front with the key of this front."""
    torch.set_num_threads(1)
    roots = tmp_path / "checkpoints"
    old, new = make_toy_checkpoint(roots / "old", seed=7), make_toy_checkpoint(roots / "new", seed=8)
    expected = {name: list(ToyReference.load(path).generate(PROMPT, 8)) for name, path in (("old", old), ("new", new))}
    hub, engine = f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
    log = tmp_path / "log"
    serve = ("serve", "--new-fleet", "--port", hub.rsplit(":", 1)[1], "--state", tmp_path / "state", "--root", roots)
    start = ("engine", "--engine", "toy", "--model", old, "--tp", 2, "--port", engine.rsplit(":", 1)[1])
    start = (*start, "--coordinator", hub, "--root", roots, "--replica", "r0")

    token = {ADMIN_ENV: "admin-token-0123", INFERENCE_ENV: "inference-token-0123"}
    client = httpx.Client(base_url=hub, timeout=200.0, trust_env=False)
    client.headers["Authorization"] = f"Bearer {token[ADMIN_ENV]}"
    key = token[INFERENCE_ENV]
    with program(log, *serve, **token) as coordinator, client:
        with program(log, *start, **token) as replica:
            until_ready(engine, replica, log)
            ranks = psutil.Process(replica.pid).children()
            assert len(ranks) == 2
            answer = complete(engine, key)
            assert (answer["choices"][0]["token_ids"], answer["liveweights"]["version"]) == (expected["old"], "start")
            with idlers(hub, engine):
                receipt = client.post("/v1/updates", params={"wait": "true"}, json={"path": str(new), "version": 1})
                assert receipt.status_code == 200, receipt.text
                answer = complete(engine, key)
            assert [member["state"] for member in client.get("/v1/fleet").json()["members"]] == ["open"]
            assert (answer["choices"][0]["token_ids"], answer["liveweights"]["version"]) == (expected["new"], "0-1")
            assert ended(replica, signal.SIGTERM, ranks) == 0
            assert client.get("/v1/fleet").json()["members"] == []
        with program(log, *start, **token) as replica:
            # It starts on the old checkpoint and may serve only once it has caught up.
            until_ready(engine, replica, log)
            answer = complete(engine, key)
            assert (answer["choices"][0]["token_ids"], answer["liveweights"]["version"]) == (expected["new"], "0-1")
            ranks = psutil.Process(replica.pid).children()
            assert ended(replica, signal.SIGKILL, ranks) == -signal.SIGKILL
        assert ended(coordinator, signal.SIGTERM, []) == 0


def test_an_engine_that_cannot_start_exits_non_zero_and_leaves_nothing(tmp_path: Path) -> None:
    model = make_toy_checkpoint(tmp_path / "model")
    log = tmp_path / "log"
    options = ("--engine", "toy", "--model", model, "--port", free_port(), "--option", "no_such_option=1")
    with program(log, "engine", *options) as replica:
        assert replica.wait(START_S) == 1


def test_a_quarantined_replica_is_readmitted_by_its_operator(tmp_path: Path) -> None:
    """A cache that does not clear, then a rank that does not go back: no front serves that until it was proved."""
    torch.set_num_threads(1)
    roots = tmp_path / "checkpoints"
    old, new = make_toy_checkpoint(roots / "old", seed=7), make_toy_checkpoint(roots / "new", seed=8)
    expected = {name: list(ToyReference.load(path).generate(PROMPT, 8)) for name, path in (("old", old), ("new", new))}
    hub, engine = f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
    log = tmp_path / "log"
    serve = ("serve", "--new-fleet", "--port", hub.rsplit(":", 1)[1], "--state", tmp_path / "state", "--root", roots)
    # Labels on rank 1: at the start, by the admission, by the install; the one of the restore fails.
    fault = "fault=raise:before:reset_cache:0:1;raise:before:set_version:1:4"
    start = ("engine", "--engine", "toy", "--model", old, "--tp", 2, "--port", engine.rsplit(":", 1)[1])
    start = (*start, "--coordinator", hub, "--root", roots, "--replica", "r0", "--option", fault)

    with program(log, *serve), httpx.Client(base_url=hub, timeout=200.0, trust_env=False) as client:
        with program(log, *start) as replica:
            until_ready(engine, replica, log)
            receipt = client.post("/v1/updates", params={"wait": "true"}, json={"path": str(new), "version": 1})
            assert receipt.json()["outcome"] == "rolled_back", receipt.text
            assert client.get(f"{engine}/readyz").status_code == 503
            assert client.get(f"{engine}/healthz").json()["state"] == "quarantined"
            with program(log, "readmit", engine) as operator:
                assert operator.wait(START_S) == 0, log.read_text()
            until_ready(engine, replica, log)
            answer = complete(engine)
            assert (answer["choices"][0]["token_ids"], answer["liveweights"]["version"]) == (expected["old"], "start")
            receipt = client.post("/v1/updates", params={"wait": "true"}, json={"path": str(new), "version": 2})
            assert receipt.status_code == 200, receipt.text
            answer = complete(engine)
            assert (answer["choices"][0]["token_ids"], answer["liveweights"]["version"]) == (expected["new"], "0-2")
            assert [member["replica"] for member in client.get("/v1/fleet").json()["members"]] == ["r0"]
            assert client.get("/v1/version").json()["version"] == "0-2"
