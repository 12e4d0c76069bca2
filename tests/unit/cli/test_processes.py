"""The demo's processes: readiness, early ends, and that nothing is left."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from updater.demo.processes import Child, Children, ProcessFailed, alive, free_port

HANG_S = 120.0  # a guard


def child(children: Children, code: str, port: int = 9) -> Child:
    """A process of ours that runs `code` instead of the command line."""
    log = children.logs / "child.log"
    with open(log, "wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
    made = Child("child", f"http://127.0.0.1:{port}", log, process)
    children.running.append(made)
    return made


def test_a_process_that_ends_early_is_reported_with_its_log(tmp_path: Path) -> None:
    children = Children(tmp_path)
    ended = child(children, "print('why it ended'); raise SystemExit(7)")
    with pytest.raises(ProcessFailed) as caught:
        children.wait_ready(ended, deadline_s=HANG_S)
    assert caught.value.returncode == 7
    assert ended.tail() == "why it ended"
    assert children.stop() == []


def test_one_that_answers_is_ready_and_stopped_in_order(tmp_path: Path) -> None:
    port = free_port()
    children = Children(tmp_path)
    server = (
        "import signal, sys\n"
        "from http.server import HTTPServer, SimpleHTTPRequestHandler as H\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        f"HTTPServer(('127.0.0.1', {port}), H).serve_forever()\n"
    )
    running = child(children, server, port)
    children.wait_ready(running, "/", deadline_s=HANG_S)
    assert children.stop() == []
    assert running.process.returncode == 0


def test_what_a_process_leaves_behind_is_found_and_ended(tmp_path: Path) -> None:
    children = Children(tmp_path)
    grandchild = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])"
    left = child(children, grandchild)
    left.process.wait(HANG_S)
    assert len(alive(left.process.pid)) == 1
    assert len(children.stop()) == 1
    until = time.monotonic() + HANG_S
    while alive(left.process.pid):
        assert time.monotonic() < until


def test_a_free_port_is_refused_to_everybody_but_the_server_that_is_told_of_it() -> None:
    port = free_port()
    with socket.socket() as other, pytest.raises(OSError):
        other.bind(("127.0.0.1", port))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(server.getsockname()) as there:
        assert there.getpeername() == ("127.0.0.1", port)
        with server.accept()[0] as here:
            assert here.getsockname() == ("127.0.0.1", port)


def test_one_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    children = Children(tmp_path)
    silent = child(children, "import signal; signal.pause()", free_port())
    with pytest.raises(ProcessFailed):
        children.wait_ready(silent, deadline_s=0.2)
    children.stop()
    assert silent.process.returncode is not None


def test_a_signal_during_a_start_waits_until_the_child_is_noted(tmp_path: Path) -> None:
    class Interrupted(Children):
        def _start(self, *_started: object) -> Child:
            self.interrupt(signal.SIGTERM)
            made = child(Children(self.logs), "import signal; signal.pause()")
            self.interrupt(signal.SIGTERM)
            return made

    children = Interrupted(tmp_path)
    with pytest.raises(SystemExit):
        children.start("child", [], 9)
    (noted,) = children.running
    assert children.stop() == []
    assert noted.process.returncode is not None


def test_a_signal_at_any_other_time_ends_at_once(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        Children(tmp_path).interrupt(signal.SIGTERM)
    assert caught.value.code == 143
