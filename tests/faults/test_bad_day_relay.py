"""Each mode of a relay does to a connection what it says."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.faults.bad_day.relay import Mode, Network

HANG_S = 60.0


@dataclass
class Line:
    """A relay before a server that answers every line by itself, in capitals. `asked`: what reached the server."""

    network: Network
    asked: queue.SimpleQueue[bytes]

    def dial(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.network.links["line"].port), HANG_S)


@pytest.fixture
def line() -> Iterator[Line]:
    network, asked = Network(), queue.SimpleQueue[bytes]()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer(connection: socket.socket) -> None:
            with connection, connection.makefile("rb") as lines:
                try:
                    for text in lines:
                        asked.put(text)
                        connection.sendall(text.upper())
                except OSError:
                    pass

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        network.link("line", ("127.0.0.1", server.getsockname()[1]))
        yield Line(network, asked)
        network.close()
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("mode", [Mode.OPEN, Mode.DELAY])
def test_what_is_passed_on_comes_back(line: Line, mode: Mode) -> None:
    line.network.turn("line", mode)
    with line.dial() as near:
        near.sendall(b"a\n")
        assert near.recv(9) == b"A\n"


def test_what_is_dropped_arrives_when_the_link_is_mended(line: Line) -> None:
    with line.dial() as near:
        near.sendall(b"a\n")
        assert near.recv(9) == b"A\n"
        line.network.turn("line", Mode.DROP)
        near.sendall(b"b\n")
        assert line.asked.get(timeout=HANG_S) == b"a\n"
        assert line.asked.empty()
        line.network.mend()
        assert near.recv(9) == b"B\n"


def test_a_half_open_link_tells_the_far_side_alone(line: Line) -> None:
    with line.dial() as near:
        near.sendall(b"a\n")
        assert near.recv(9) == b"A\n"
        line.network.turn("line", Mode.HALF_OPEN)
        near.sendall(b"b\n")  # nothing says that this goes nowhere
        line.network.mend()
        with pytest.raises(ConnectionError):
            near.recv(9)
    assert line.asked.get(timeout=HANG_S) == b"a\n"
    assert line.asked.empty()


def test_a_reset_link_cuts_both_sides_off_and_lets_nobody_back(line: Line) -> None:
    with line.dial() as near:
        near.sendall(b"a\n")
        assert near.recv(9) == b"A\n"
        line.network.turn("line", Mode.RESET)
        with pytest.raises(ConnectionError):
            near.recv(9)
    with pytest.raises(ConnectionError), line.dial() as near:  # the dialling itself may end so
        near.recv(9)


def test_lost_answers_are_lost_after_the_request_was_heard(line: Line) -> None:
    line.network.turn("line", Mode.LOSE_ANSWERS)
    with line.dial() as near:
        near.sendall(b"a\n")
        with pytest.raises(ConnectionError):
            near.recv(9)
    assert line.asked.get(timeout=HANG_S) == b"a\n"
