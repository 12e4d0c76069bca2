"""A stock `vllm serve` as a process of its own, on loopback, for the length of a `with` block."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil

#: Limits that only a hang reaches, in seconds.
START_S, ANSWER_S, STOP_S, KILL_S = 400.0, 120.0, 60.0, 20.0
_POLL_S = 0.1
_COMMAND = Path(sys.executable).with_name("vllm")
_KV_CACHE_BYTES = 64 << 20
#: What makes a start short. None of it changes what is served.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_CI_ENV": "1",  # no warm-up
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}


@dataclass(slots=True)
class Starts:
    """How many engines this session has started. An engine takes most of a minute: there is a budget."""

    budget: int
    seconds: list[float] = field(default_factory=list)
    count: int = 0

    def take(self) -> None:
        self.count += 1
        assert self.count <= self.budget, f"more than {self.budget} vLLM engine starts: let tests share an engine"

    def __str__(self) -> str:
        took = ", ".join(f"{seconds:.0f} s" for seconds in self.seconds)
        return f"vLLM engine starts: {self.count}" + (f" ({took})" if took else "")


#: `make soak` starts more of them than `make test` has the time for.
SOAKING = os.environ.get("LIVEWEIGHTS_EXAMPLES") == "soak"
STARTS = Starts(budget=60 if SOAKING else 19)


class StartFailed(Exception):
    """The server ended, or was not ready in time. `output`: the last lines of its log. `code`: what it ended with."""

    def __init__(self, reason: str, output: str, code: int | None = None) -> None:
        super().__init__(f"{reason}\n{output}")
        self.output, self.code = output, code


class Left(AssertionError):
    """Processes of a server outlived it (they have been killed since). `left`: (pid, name) of each."""

    def __init__(self, left: Sequence[tuple[int, str]], output: str) -> None:
        super().__init__(f"after SIGTERM there were still {list(left)}\n{output}")
        self.left = tuple(left)


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice of a completion."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str | None
    body: Mapping[str, Any]  # of the reply, or of the last event


@dataclass(frozen=True, slots=True)
class VllmServer:
    """A server that is ready. `group`: the id of its process group, which all its processes are in."""

    url: str
    model: str
    process: subprocess.Popen[bytes]
    log: Path
    client: httpx.Client

    @property
    def group(self) -> int:
        return self.process.pid

    def complete(self, prompt: str | Sequence[int], count: int = 16, **fields: Any) -> Answer:
        """`count` greedy tokens after `prompt`. `fields`: further fields of the request.

        Raises httpx.HTTPStatusError for any status but 200.
        """
        reply = self.client.post("/v1/completions", json=self._request(prompt, count, fields))
        reply.raise_for_status()
        body = reply.json()
        choice = body["choices"][0]
        return Answer(choice["text"], tuple(choice["token_ids"]), choice["finish_reason"], body)

    def stream(self, prompt: str | Sequence[int], count: int = 16, **fields: Any) -> Iterator[dict[str, Any]]:
        """The events of the same completion, as they come. Leaving early closes the connection."""
        request = self._request(prompt, count, fields) | {"stream": True}
        with self.client.stream("POST", "/v1/completions", json=request) as reply:
            if reply.is_error:
                reply.read()
            reply.raise_for_status()
            yield from _events(reply)

    def complete_streaming(self, prompt: str | Sequence[int], count: int = 16, **fields: Any) -> Answer:
        """The whole stream, put together."""
        events = [event for event in self.stream(prompt, count, **fields) if event["choices"]]
        choices = [event["choices"][0] for event in events]
        tokens = tuple(token for choice in choices for token in choice["token_ids"] or ())
        return Answer("".join(c["text"] for c in choices), tokens, choices[-1]["finish_reason"], events[-1])

    def chat(self, content: str, count: int = 16, **fields: Any) -> Answer:
        """`count` greedy tokens after one message of the user's."""
        request = self._common(count) | {"messages": [{"role": "user", "content": content}], **fields}
        reply = self.client.post("/v1/chat/completions", json=request)
        reply.raise_for_status()
        body = reply.json()
        choice = body["choices"][0]
        return Answer(choice["message"]["content"], tuple(choice["token_ids"]), choice["finish_reason"], body)

    def processes(self) -> tuple[psutil.Process, ...]:
        """All that live, the API server first."""
        return tuple(sorted(members(self.group), key=lambda process: process.pid != self.group))

    def _common(self, count: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }

    def _request(self, prompt: str | Sequence[int], count: int, fields: Mapping[str, Any]) -> dict[str, Any]:
        return self._common(count) | {"prompt": prompt if isinstance(prompt, str) else list(prompt), **fields}


@contextmanager
def serve(
    model: Path,
    log: Path,
    *,
    ranks: int = 1,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    eager: bool = True,
    ready: str = "/health",
    arguments: Sequence[str] = (),
    environment: Mapping[str, str | None] | None = None,
) -> Iterator[VllmServer]:
    """`vllm serve MODEL` at tensor parallel size `ranks`, ready when a GET of `ready` says 200.

    `arguments` come after ours and win; None in `environment` unsets a variable. Everything it prints is in `log`. On
    leaving, the API server gets SIGTERM and has to end with all its processes. Raises `StartFailed`, and `Left` if one
    of them had to be killed.
    """
    STARTS.take()
    began = time.monotonic()
    with reserved_port() as port:
        url = f"http://127.0.0.1:{port}"
        command = [*command_of(model, port, ranks, dtype, eager), *arguments]
        told = environment_of(ranks, environment or {}, log.parent)
        with running(command, log, told) as process:
            with httpx.Client(base_url=url, timeout=ANSWER_S, trust_env=False) as client:
                wait_ready(process, client, ready, log)
                STARTS.seconds.append(time.monotonic() - began)
                yield VllmServer(url, str(model), process, log, client)


@contextmanager
def running(
    command: Sequence[str], log: Path, environment: Mapping[str, str], *, stop_s: float = STOP_S
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that leads a group of its own and, on leaving, is stopped with all of it. Raises `Left`."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        left = _stop(process, stop_s)
    if left:
        raise Left(left, tail(log))


def wait_ready(
    process: subprocess.Popen[bytes], client: httpx.Client, ready: str, log: Path, *, start_s: float = START_S
) -> None:
    """Until a GET of `ready` says 200. Raises `StartFailed`."""
    end = time.monotonic() + start_s
    while True:
        if process.poll() is not None:
            raise StartFailed(f"the server ended with {process.returncode}", tail(log), process.returncode)
        with suppress(httpx.TransportError):
            if client.get(ready).status_code == httpx.codes.OK:
                return
        if time.monotonic() >= end:
            raise StartFailed(f"not ready in {start_s:.0f} s", tail(log))
        time.sleep(_POLL_S)


def _stop(process: subprocess.Popen[bytes], seconds: float) -> list[tuple[int, str]]:
    """SIGTERM to the leader, then SIGKILL to what is left of its group: (pid, name) of those."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    left = _wait_gone(process.pid, 0.0 if process.poll() is None else seconds)
    if left:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(KILL_S)
        _wait_gone(process.pid, KILL_S)
    return left


def members(group: int) -> list[psutil.Process]:
    """The living processes of a process group."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def tail(log: Path, lines: int = 60) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _wait_gone(group: int, seconds: float) -> list[tuple[int, str]]:
    """(pid, name) of the members that are still there after so long."""
    end = time.monotonic() + seconds
    while True:
        left = []
        for process in members(group):
            with suppress(psutil.NoSuchProcess):
                left.append((process.pid, process.name()))
        if not left or time.monotonic() >= end:
            return left
        time.sleep(_POLL_S)


def environment_of(ranks: int, changes: Mapping[str, str | None], home: Path) -> dict[str, str]:
    """Of a server of so many ranks. `home`: a folder that lives as long as it."""
    return _environment(ranks, changes) | _named_vllm(home)


def command_of(model: Path, port: int, ranks: int, dtype: str, eager: bool = True) -> list[str]:
    """`vllm serve` on a port of loopback."""
    command = [str(_COMMAND), "serve", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--tensor-parallel-size", str(ranks), "--dtype", dtype]
    command += ["--kv-cache-memory-bytes", str(_KV_CACHE_BYTES), "--max-model-len", "512", "--max-num-seqs", "8"]
    return [*command, *(("--enforce-eager",) if eager else ())]


def _named_vllm(home: Path) -> dict[str, str]:
    """The command asks for the version of a distribution named vllm, and that of the CPU build is named vllm-cpu: a
    name that only this server sees.
    """
    try:
        version("vllm")
    except PackageNotFoundError:
        found = version("vllm-cpu").partition("+")[0] + "+cpu"
    else:
        return {}
    named = home / "named" / f"vllm-{found}.dist-info"
    named.mkdir(parents=True, exist_ok=True)
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {found}\n")
    path = [str(named.parent), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(part for part in path if part)}


def _environment(ranks: int, changes: Mapping[str, str | None]) -> dict[str, str]:
    """Ours over that of this process, without what the Makefile and other tests set for themselves."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "OMP_"))}
    found: dict[str, str | None] = {**inherited, **ENVIRONMENT}
    if ranks > 1:
        cores = sorted(os.sched_getaffinity(0))
        found["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    return {name: value for name, value in (found | dict(changes)).items() if value is not None}


@contextmanager
def reserved_port() -> Iterator[int]:
    """A free port that stays bound, so that no other process is given it; one that asks for its number may listen."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def _events(reply: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in reply.iter_lines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield json.loads(data)
