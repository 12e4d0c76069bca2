"""Replicas of 0.1.0 replaced one by one: each new one starts on the checkpoint that its predecessor started on, and
catches up from the source that 0.1.0 recorded.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_adapter.testing import make_toy_checkpoint
from tests.cases import replica_program
from tests.integration.test_release_010 import LIVE, MESSAGES_010, RECORDED, URLS, state_of_010
from updater.demo.processes import free_port

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.case("F60")]
GUARD_S = 240.0


@contextmanager
def fronts_of_010() -> Iterator[dict[str, ThreadingHTTPServer]]:
    """What was recorded of both, at addresses of this machine."""
    servers = {}
    for name in URLS:
        servers[name] = ThreadingHTTPServer(("127.0.0.1", 0), _handler(name))
        threading.Thread(target=servers[name].serve_forever, daemon=True).start()
    yield servers
    for server in servers.values():
        server.shutdown()
        server.server_close()


def _handler(name: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            verb = self.path.rpartition("/")[2]
            known = verb in ("status", "describe")
            refused = MESSAGES_010[f"{name}.lead"]
            said = MESSAGES_010[f"{name}.{verb}"] if known else refused["body"]
            body = json.dumps(said).encode()
            self.send_response(200 if known else refused["status"])
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *values: Any) -> None:
            pass

    return Handler


@contextmanager
def running(*command: object) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, *map(str, command)])
    try:
        yield process
    finally:
        process.terminate()
        process.wait(GUARD_S)


def until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + GUARD_S
    while not reached():
        assert time.monotonic() < end, "hangs"
        time.sleep(0.05)


def told(url: str, path: str) -> dict[str, Any]:
    """Empty while nobody answers."""
    try:
        found: dict[str, Any] = httpx.get(f"{url}{path}", timeout=60.0, trust_env=False).json()
    except httpx.TransportError:
        return {}
    return found


def member(url: str, name: str) -> dict[str, Any]:
    found = [each for each in told(url, "/v1/fleet").get("members", []) if each["replica"] == name]
    return found[0] if found else {}


def serves_anew(url: str, name: str, before: str) -> bool:
    """As another process than `before`."""
    seen = member(url, name)
    return seen.get("state") == "open" and seen["incarnation"] != before


def test_each_replacement_catches_up_from_the_source_that_010_recorded(tmp_path: Path) -> None:
    # The toy checkpoints of these seeds are, by all their digests, those that the recorded fleet was fed with.
    models = tmp_path / "checkpoints"
    for seed in (0, 1, 2):
        make_toy_checkpoint(models / f"v{seed}", seed=seed)
    (models / "v2" / "liveweights.manifest.json").write_bytes((RECORDED / "liveweights.manifest.json").read_bytes())
    with fronts_of_010() as old:
        ports = {name: server.server_address[1] for name, server in old.items()}
        changed = {url: f"http://127.0.0.1:{ports[name]}" for name, url in URLS.items()}
        state = state_of_010(tmp_path / "state", {"/srv/checkpoints": str(models), **changed})
        url = f"http://127.0.0.1:{(port := free_port())}"
        serve = ("-m", "updater.cli.main", "serve", "--fleet", "prod", "--port", port, "--state", state)
        with running(*serve, "--root", models):
            until(lambda: {member(url, name).get("state") for name in URLS} == {"open"})
            assert told(url, "/v1/version")["version"] == "0-2"
            with ExitStack() as lives:
                for name in URLS:
                    old[name].shutdown()
                    old[name].server_close()
                    program = (replica_program.__file__, name, models / "v0", ports[name], url, models, tmp_path / name)
                    lives.enter_context(running(*program))
                    before = MESSAGES_010[f"{name}.status"]["incarnation"]
                    until(partial(serves_anew, url, name, before))
                    seen = member(url, name)
                    assert (seen["live_version"], seen["live_digest"], seen["failures"]) == ("0-2", LIVE, [])
                body = {"path": str(models / "v1"), "version": 3}
                answer = httpx.post(f"{url}/v1/updates?wait=true", json=body, timeout=GUARD_S, trust_env=False)
                assert answer.status_code == 200, answer.text
