"""Connections of a stream: addresses, who is let in, frames."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from transports.stream.addresses import UnixListener, dial_unix, join_address, split_address
from transports.stream.connection import RECEIVER_LIMIT, SENDER_LIMIT, Connection, ConnectionClosed, wait
from transports.stream.messages import Hello, Message, Ready, encode
from transports.testing import refused
from updater.protocol import wire

HANG_S = 60.0
#: Abstract names are the machine's: another run of these tests has others.
NAME = f"@liveweights-{os.getpid()}"


def connect(address: str, within_s: float) -> Connection:
    return dial_unix(address, time.monotonic() + within_s, lambda: None)


@pytest.mark.case("B204")
def test_addresses_of_tcp() -> None:
    for host in ("127.0.0.1", "::1", "trainer.example"):
        assert split_address(join_address(host, 70)) == (host, 70)
    for bad in ("", "x", ":1", "host:", "host:port"):
        with refused("peer_lost"):
            split_address(bad)


@pytest.mark.parametrize("address", ["", "@", "relative", "127.0.0.1:80", "@" + "x" * 200, "/" + "x" * 200])
def test_what_is_no_address_is_refused(address: str) -> None:
    with refused("stream_mismatch"):
        connect(address, 1.0)


def test_nobody_at_an_address(tmp_path: Path) -> None:
    for address in (f"{NAME}-nobody", str(tmp_path / "none")):
        with refused("peer_lost"):
            connect(address, 1.0)


def test_a_sender_whose_queue_is_full_is_not_waited_for_for_ever() -> None:
    full, address = socket.socket(socket.AF_UNIX), f"{NAME}-full"
    full.bind(address.replace("@", "\0"))
    full.listen(0)
    waiting = [connect(address, 1.0)]
    with refused("peer_timeout"):
        waiting.append(connect(address, 0.1))
    for each in (full, *waiting):
        each.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_not_let_in_on_either_side() -> None:
    code = """
import os, socket, sys
os.setuid(65534)
if sys.argv[1] == "listen":
    other = socket.socket(socket.AF_UNIX)
    other.bind(sys.argv[2].replace("@", "\\0"))
    other.listen(5)
    print("listening", flush=True)
    sys.stdin.readline()
else:
    other = socket.socket(socket.AF_UNIX)
    other.connect(sys.argv[2].replace("@", "\\0"))
    print(len(other.recv(10)), flush=True)
"""
    listener = UnixListener(f"{NAME}-owner")
    with subprocess.Popen(
        [sys.executable, "-c", code, "connect", listener.address], stdout=subprocess.PIPE, text=True
    ) as other:
        wait([listener], HANG_S)
        assert listener.accept() == []
        assert other.communicate(timeout=HANG_S)[0].split() == ["0"]  # hung up, without a word
    listener.close()
    command = [sys.executable, "-c", code, "listen", f"{NAME}-other"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline().split() == ["listening"]
        with refused("peer_lost"):
            connect(f"{NAME}-other", 5.0)
        other.communicate("\n", timeout=HANG_S)


def test_a_frame_longer_than_is_taken() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    channel = Connection(ours, 1000)
    theirs.send((1001).to_bytes(4, "big") + b"{}")
    with pytest.raises(wire.WireError):
        channel.messages()
    channel.close()
    theirs.close()


def test_frames_in_pieces_and_several_at_once() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    channel = Connection(ours, 1 << 20)
    frames = b"".join(struct.pack(">I", len(body)) + body for body in (encode(Ready(at)) for at in range(3)))
    heard: list[Message] = []
    for cut in (frames[:2], frames[2:9], frames[9 : len(frames) - 1], frames[-1:]):
        theirs.send(cut)
        heard += channel.messages()
    assert heard == [Ready(0), Ready(1), Ready(2)]
    theirs.send(frames[:7])
    theirs.close()
    with pytest.raises(ConnectionClosed):
        channel.messages()
    channel.close()


def test_a_message_longer_than_the_socket_holds_goes_out_in_pieces() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    here, there = Connection(ours, RECEIVER_LIMIT), Connection(theirs, SENDER_LIMIT)
    long = Hello("s", 0, devices=("x" * 3_000_000,))
    here.post(long)
    assert here.unsent
    heard: list[Message] = []
    while not heard:
        wait([here, there], HANG_S)
        heard = there.messages()
    assert heard == [long]
    assert not here.unsent
    here.close()
    there.close()
