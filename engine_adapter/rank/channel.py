"""Framed JSON between a front and one rank over a Unix socket pair. Nothing is unpickled (I10).

A frame is a 4-byte big-endian length, a JSON header line `{"kind", "id", "verb"}`, and the message as JSON. `call`
frames go from front to rank, `reply` and `refused` frames answer them by id, `event` frames come unasked: `tokens` with
a `TokenEvent`, `staged` with `BytesStaged`. The messages here are those beside a transaction: build, serve, label,
submit, stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from engine_adapter.base import EngineSpec, GenerateRequest
from engine_adapter.rank.messages import RANK_MESSAGES, RankDone, RankHello
from updater.protocol import wire

_LENGTH = struct.Struct(">I")

#: A plan reply of 150,000 tensors takes about 30 MB; nothing legitimate comes near this.
MAX_FRAME_BYTES = 256 * 1024 * 1024


class ChannelClosed(Exception):
    """The other side is gone."""


class ChannelError(Exception):
    """What came is not a frame: the channel cannot be used any more."""


class FrameKind(StrEnum):
    CALL = "call"
    REPLY = "reply"
    REFUSED = "refused"
    EVENT = "event"


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """`id` pairs answers with calls; 0 for events."""

    kind: FrameKind
    id: int
    verb: str


@dataclass(frozen=True, slots=True)
class Frame:
    """`body`: the message as JSON, not yet decoded: its type follows from the verb."""

    header: FrameHeader
    body: bytes

    @classmethod
    def of(cls, kind: FrameKind, number: int, verb: str, message: Any) -> Frame:
        return cls(FrameHeader(kind, number, verb), wire.encode(message))

    def pack(self) -> bytes:
        """The frame with its length. Raises ChannelError if it is over the bound."""
        payload = wire.encode(self.header) + b"\n" + self.body
        if len(payload) > MAX_FRAME_BYTES:
            raise ChannelError(f"a frame of {len(payload)} bytes is over the bound of {MAX_FRAME_BYTES}")
        return _LENGTH.pack(len(payload)) + payload

    @classmethod
    def parse(cls, payload: bytes) -> Frame:
        head, separator, body = payload.partition(b"\n")
        if not separator:
            raise ChannelError("a frame without a header line")
        try:
            return cls(wire.decode(FrameHeader, head), body)
        except wire.WireError as error:
            raise ChannelError(str(error)) from None


def bounded(length: bytes) -> int:
    """Bytes that follow. Checked before anything is allocated."""
    count: int = _LENGTH.unpack(length)[0]
    if count > MAX_FRAME_BYTES:
        raise ChannelError(f"a frame of {count} bytes is over the bound of {MAX_FRAME_BYTES}")
    return count


class FrontChannel:
    """The asyncio side. One task reads; `send` may be called from any task of the loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, end: socket.socket) -> FrontChannel:
        """Takes the socket over."""
        reader, writer = await asyncio.open_unix_connection(sock=end)
        return cls(reader, writer)

    def send(self, frame: Frame) -> None:
        """Queues the frame. Raises ChannelClosed."""
        if self._writer.is_closing():
            raise ChannelClosed
        self._writer.write(frame.pack())

    async def receive(self) -> Frame:
        """The next frame. Raises ChannelClosed at its end and ChannelError for rubbish."""
        try:
            count = bounded(await self._reader.readexactly(_LENGTH.size))
            return Frame.parse(await self._reader.readexactly(count))
        except (asyncio.IncompleteReadError, ConnectionError, OSError):
            raise ChannelClosed from None

    def close(self) -> None:
        self._writer.close()

    async def wait_closed(self) -> None:
        """After `close`: the descriptor is gone."""
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class RankChannel:
    """The blocking side. One thread reads; any thread may send."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()

    def send(self, frame: Frame) -> None:
        """Returns when the kernel has the bytes. Raises ChannelClosed."""
        data = frame.pack()
        with self._sending:
            try:
                self._socket.sendall(data)
            except OSError:
                raise ChannelClosed from None

    def receive(self) -> Frame:
        """The next frame. Raises ChannelClosed at its end and ChannelError for rubbish."""
        return Frame.parse(self._exactly(bounded(self._exactly(_LENGTH.size))))

    def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        got = 0
        while got < count:
            try:
                more = self._socket.recv_into(view[got:])
            except OSError:
                raise ChannelClosed from None
            if more == 0:
                raise ChannelClosed
            got += more
        return bytes(data)

    def close(self) -> None:
        self._socket.close()


@dataclass(frozen=True, slots=True)
class Build:
    """The first call to a rank: make the engine with `factory` (`package.module:function`) and load the model."""

    factory: str
    spec: EngineSpec


@dataclass(frozen=True, slots=True)
class StartServing:
    """The placement was admitted: label the live bytes and let the engine run. Once."""

    version: str
    digest: str


@dataclass(frozen=True, slots=True)
class RankLabel:
    """Relabel equal bytes, while paused: a joiner whose live digest is the fleet's opens under the fleet's version."""

    version: str
    digest: str


@dataclass(frozen=True, slots=True)
class CancelRequest:
    request_id: str


@dataclass(frozen=True, slots=True)
class CancelStaging:
    """Stop a running plan, stage or verify of `serial` soon. Handled at once, beside the staging thread."""

    serial: int


@dataclass(frozen=True, slots=True)
class StopEngine:
    """Stop and exit with status 0."""

    deadline_s: float


@dataclass(frozen=True, slots=True)
class BytesStaged:
    """Event: `done` bytes of what update `serial` has to bring to this rank are read."""

    serial: int
    done: int


#: Exit status of a rank whose engine said that it failed.
ENGINE_FAILED = 71

#: verb -> (request type, reply type)
CONTROL_MESSAGES: dict[str, tuple[type, type]] = {
    "build": (Build, RankHello),
    "start": (StartServing, RankDone),
    "label": (RankLabel, RankDone),
    "submit": (GenerateRequest, RankDone),
    "cancel_request": (CancelRequest, RankDone),
    "cancel_staging": (CancelStaging, RankDone),
    "stop": (StopEngine, RankDone),
}

#: Everything that goes from front to rank.
CALLS: dict[str, tuple[type, type]] = CONTROL_MESSAGES | RANK_MESSAGES
