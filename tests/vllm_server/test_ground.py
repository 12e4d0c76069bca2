"""The ground that the other tests here stand on: checkpoints, and a server that is vLLM."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from safetensors import safe_open

from engine_adapter.models import SAFE_MARGIN, encode, longest_offset, reference_tokens
from tests.vllm_server.fleet import Fleet
from tests.vllm_server.models import PROMPTS, SHAPES, Checkpoints
from tests.vllm_server.server import Left, StartFailed, Starts, members, reserved_port, running, wait_ready

TOKENS = 32


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_token_has_a_wide_margin_and_versions_differ(
    checkpoints: Callable[..., Checkpoints], name: str, dtype: str
) -> None:
    made = checkpoints(name, dtype)
    said = []
    for prompt in PROMPTS:
        assert len(encode(prompt)) > longest_offset(SHAPES[name])
        old, new = (reference_tokens(path, encode(prompt), TOKENS) for path in (made.first, made.second))
        assert min(old.margins + new.margins) > SAFE_MARGIN
        assert old.tokens != new.tokens
        said.append(old.tokens)
    assert len(set(said)) == len(PROMPTS)


def test_versions_have_the_same_tensors_in_the_dtype_asked_for(checkpoints: Callable[..., Checkpoints]) -> None:
    narrow, wide = checkpoints("tied", "bfloat16"), checkpoints("tied", "float32")
    assert contents(narrow.first) == contents(narrow.second)
    assert contents(wide.first) == {name: ("F32", shape) for name, (_, shape) in contents(narrow.first).items()}
    assert json.loads((wide.first / "config.json").read_text())["dtype"] == "float32"


def test_float32_has_something_in_its_low_bits(checkpoints: Callable[..., Checkpoints]) -> None:
    with safe_open(checkpoints("llama", "float32").first / "model.safetensors", "pt") as file:
        flat = [name for name in file.keys() if (t := file.get_tensor(name)).bfloat16().float().equal(t)]  # noqa: SIM118
    assert flat == []


def contents(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}


def test_a_server_says_what_transformers_says(llama_fleet: Fleet) -> None:
    fleet, server = llama_fleet, llama_fleet.server
    fleet.publish(fleet.first)
    for prompt in PROMPTS:
        expected = reference_tokens(fleet.first, encode(prompt), TOKENS).tokens
        whole, parts = server.complete(prompt, TOKENS), server.complete_streaming(encode(prompt), TOKENS)
        assert whole.tokens == parts.tokens == expected
        assert whole.text == parts.text
    chat = server.chat(PROMPTS[0], TOKENS)
    assert chat.tokens == reference_tokens(fleet.first, encode(PROMPTS[0] + "\n"), TOKENS).tokens
    with pytest.raises(httpx.HTTPStatusError):
        list(server.stream(PROMPTS[0], TOKENS, model="another"))
    assert server.processes()[0].pid == server.group
    assert len(server.processes()) >= 3  # API server, engine core, worker


@pytest.mark.case("F00")
def test_a_worker_uses_the_kernels_that_the_tests_were_told_to(llama_fleet: Fleet) -> None:
    from tests.vllm_server.slow import KERNELS, kernels_of  # imports vLLM

    assert llama_fleet.slow is not None
    assert kernels_of(llama_fleet.slow).read_text() == os.environ.get(KERNELS, "")


def test_a_server_that_ends_before_it_is_ready_shows_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such option')"]
    with pytest.raises(StartFailed) as raised:
        start(command, tmp_path)
    assert "no such option" in raised.value.output
    assert raised.value.code == 1


def test_a_server_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    with pytest.raises(StartFailed):
        start(command, tmp_path, start_s=0.0)


def start(command: list[str], folder: Path, **limits: float) -> None:
    log = folder / "server.log"
    with reserved_port() as port, running(command, log, os.environ) as process:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            wait_ready(process, client, "/health", log, **limits)


#: A leader and a child that serves HTTP and does not mind SIGTERM. Arguments: port, whether the leader minds it.
_STUBBORN = """
import http.server, os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
if sys.argv[2] == "minds":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.pause()
"""


@pytest.mark.parametrize(("leader", "left"), [("minds", 1), ("ignores", 2)])
def test_processes_that_outlive_a_server_are_killed_and_reported(tmp_path: Path, leader: str, left: int) -> None:
    groups: list[int] = []
    with pytest.raises(Left) as raised:
        start_stubborn(tmp_path, leader, groups)
    assert len(raised.value.left) == left
    assert members(groups[0]) == []


def start_stubborn(folder: Path, leader: str, groups: list[int]) -> None:
    log = folder / "server.log"
    with reserved_port() as port:
        command = [sys.executable, "-c", _STUBBORN, str(port), leader]
        with running(command, log, os.environ, stop_s=0.5) as process:
            groups.append(process.pid)
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
                wait_ready(process, client, "/", log)
            assert len(members(process.pid)) == 2


def test_a_reserved_port_is_given_to_nobody_else_but_can_be_listened_on() -> None:
    with reserved_port() as port:
        with socket.socket() as other, pytest.raises(OSError):
            other.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_starts_have_a_budget() -> None:
    starts = Starts(budget=2)
    starts.take()
    starts.take()
    with pytest.raises(AssertionError):
        starts.take()
