"""Frames between a front and a rank: whole, bounded, and never taken for something else."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading

import pytest

from engine_adapter.base import TokenEvent
from engine_adapter.rank import channel
from engine_adapter.rank.channel import (
    ChannelClosed,
    ChannelError,
    Frame,
    FrameHeader,
    FrameKind,
    FrontChannel,
    RankChannel,
)
from updater.protocol import wire


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def test_a_message_arrives_as_it_was_sent_in_both_directions() -> None:
    ours, theirs = pair()
    message = TokenEvent("r1", (1, 2), "0-1", "stop", cached_tokens=3)

    async def front() -> Frame:
        end = await FrontChannel.over(ours)
        end.send(Frame.of(FrameKind.CALL, 7, "plan", message))
        frame = await end.receive()
        end.close()
        return frame

    rank = RankChannel(theirs)
    seen: list[Frame] = []

    def serve() -> None:
        seen.append(rank.receive())
        rank.send(Frame(FrameHeader(FrameKind.REPLY, 7, "plan"), seen[0].body))

    thread = threading.Thread(target=serve)
    thread.start()
    answer = asyncio.run(front())
    thread.join()
    rank.close()
    assert seen[0].header == FrameHeader(FrameKind.CALL, 7, "plan")
    assert answer.header == FrameHeader(FrameKind.REPLY, 7, "plan")
    assert wire.decode(TokenEvent, answer.body) == message


def test_frames_of_many_threads_do_not_interleave() -> None:
    ours, theirs = pair()
    sender, receiver = RankChannel(ours), RankChannel(theirs)
    body = b'"' + b"x" * 300_000 + b'"'

    def send(start: int) -> None:
        for number in range(start, start + 20):
            sender.send(Frame(FrameHeader(FrameKind.EVENT, number, "tokens"), body))

    threads = [threading.Thread(target=send, args=(start,)) for start in (0, 100, 200)]
    for thread in threads:
        thread.start()
    frames = [receiver.receive() for _ in range(60)]
    for thread in threads:
        thread.join()
    sender.close()
    receiver.close()
    assert all(frame.body == body for frame in frames)
    assert sorted(frame.header.id for frame in frames) == [*range(20), *range(100, 120), *range(200, 220)]


def test_a_claimed_length_over_the_bound_is_refused_before_anything_is_read() -> None:
    ours, theirs = pair()
    rank = RankChannel(theirs)
    ours.sendall(struct.pack(">I", channel.MAX_FRAME_BYTES + 1))
    with pytest.raises(ChannelError):
        rank.receive()
    ours.close()
    rank.close()


@pytest.mark.parametrize(
    "payload",
    [
        b"no header line",
        b'{"kind":"call","id":1,"verb":"plan"',
        b'{"kind":"other","id":1,"verb":"plan"}\n{}',
        b"\x80\x04K\x01.\n{}",
    ],
)
def test_rubbish_is_not_a_frame(payload: bytes) -> None:
    with pytest.raises(ChannelError):
        Frame.parse(payload)


def test_the_end_of_the_other_side_is_told_also_in_the_middle_of_a_frame() -> None:
    ours, theirs = pair()
    rank = RankChannel(theirs)
    ours.sendall(struct.pack(">I", 100) + b"half")
    ours.close()
    with pytest.raises(ChannelClosed):
        rank.receive()
    with pytest.raises(ChannelClosed):
        rank.send(Frame(FrameHeader(FrameKind.EVENT, 0, "tokens"), b"{}"))
    rank.close()
