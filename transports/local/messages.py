"""What is said over the socket: frozen dataclasses as JSON, each with its kind, nothing nameless in them (I10).

    receiver: Hello                Answer             Ack   Ack ...
    sender:          StreamOpening        Buffers Announce   Announce ...

A sender that waits for one receiver says Waiting to all. Either side may say Goodbye at any time, and hangs up then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import ConfigDict, Discriminator, Field

from transports.buckets import StreamPlan
from transports.control.messages import STRICT, Count, Digest, Goodbye, Seconds, Waiting
from updater import wire
from updater.core.errors import Failure

#: Grows with every change that an older side would misunderstand.
PROTOCOL = 2
#: How long either side waits for the other, bucket by bucket, unless it is told otherwise.
PATIENCE_S = 30.0

#: Codes that a sender passes on as they are; whatever else ended an update is `peer_lost` to those who did no wrong.
TOLD = ("stream_mismatch", "transport_unsupported")

Hex = Annotated[str, Field(pattern=r"^([0-9a-f]{2})*$", max_length=1024)]


@dataclass(frozen=True, slots=True)
class Hello:
    """A receiver that came, once per update. `devices`: UUIDs that it can see; `handle_format`: the newest format of
    memory handles that its runtime opens (0: none); `runtime`: for messages; `release`: that it runs, empty from 0.1.0.
    """

    session: str
    number: Count
    pid: int
    devices: tuple[str, ...] = ()
    handle_format: Count = 0
    runtime: str = ""
    release: Annotated[str, Field(max_length=40)] = ""
    protocol: int = PROTOCOL
    kind: Literal["hello"] = "hello"
    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True, slots=True)
class StreamOpening:
    """The sender's plan with its digest. `patience_s`: how long it may say nothing before it is given up."""

    plan: StreamPlan
    digest: str
    patience_s: Seconds
    kind: Literal["opening"] = "opening"
    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True, slots=True)
class Answer:
    """What a receiver thinks of the plan: nothing against it, or why not."""

    failures: tuple[Failure, ...] = ()
    kind: Literal["answer"] = "answer"
    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True, slots=True)
class FileBuffer:
    """A sealed file; its descriptor travels beside the message, in the order of the buffers."""

    nbytes: Count
    kind: Literal["file"] = "file"
    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True, slots=True)
class DeviceBuffer:
    """Device memory that another process may open, once. Bytes are hex.

    `nbytes`: of the buffer; `storage_offset`: where it begins in its storage; `storage_bytes`: of the storage;
    `allocation_offset`: where the storage begins in the allocation that `handle` names; `counter` and
    `counter_offset`: what the opener counts down when it lets go; `event`: to be waited for where `event_required`.
    """

    device: Annotated[str, Field(min_length=1, max_length=80)]
    handle: Hex
    nbytes: Count
    storage_offset: Count
    storage_bytes: Count
    allocation_offset: Count
    counter: Hex
    counter_offset: Count
    event: Hex
    event_required: bool
    kind: Literal["device"] = "device"
    __pydantic_config__: ClassVar[ConfigDict] = STRICT


BufferDescriptor = Annotated[FileBuffer | DeviceBuffer, Discriminator("kind")]


@dataclass(frozen=True, slots=True)
class Buffers:
    """All buffers of the session from now on, in place of earlier ones."""

    buffers: tuple[BufferDescriptor, ...]
    kind: Literal["buffers"] = "buffers"
    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True, slots=True)
class Announce:
    """Bucket `bucket` lies at `offset` of a buffer, `nbytes` long. `digest`: of those bytes, or empty."""

    bucket: Count
    buffer: Count
    offset: Count
    nbytes: Count
    digest: Digest = ""
    kind: Literal["announce"] = "announce"
    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True, slots=True)
class Ack:
    """Every byte of the bucket has been copied away: its buffer may be overwritten."""

    bucket: Count
    kind: Literal["ack"] = "ack"
    __pydantic_config__: ClassVar[ConfigDict] = STRICT


Message = Hello | StreamOpening | Answer | Buffers | Announce | Waiting | Ack | Goodbye
_ANY: Any = Annotated[Message, Discriminator("kind")]

encode = wire.encode


def decode(frame: bytes) -> Message:
    """Raises `wire.WireError` with the path of the first bad field."""
    return cast(Message, wire.decode(_ANY, frame))
