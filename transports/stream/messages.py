"""What sender and receiver say to each other beside the bytes: frozen dataclasses as JSON, each with its kind (I10).

    receiver: Hello          Answer  Key...          Ready 0        Ready 1 ...
    sender:          Opening         Key... Buffers         Go 0  Go 1 ...       End

`Key`s only where a group forms, `Buffers` only where memory is shared. `Ready(n)` is a credit: n buckets are put away,
and `AHEAD` more may come. A sender that waits for one receiver says `Waiting` to the others. Either side may say
`Close` at any time, and hangs up then. Nothing here depends on which side made the connection.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import ConfigDict, Discriminator, Field

from transports.buckets import StreamPlan
from updater.core.errors import Failure
from updater.core.participant import StreamOffer
from updater.core.release import ORDER, RELEASE
from updater.protocol import wire

#: Of all streams. Grows with every change that an older side would misunderstand.
PROTOCOL = 3
#: Buckets that may be under way to a receiver: one that it puts away, one that travels.
AHEAD = 2
#: How long a receiver waits for each bucket of a sender that gives no sign, unless it is told otherwise, in seconds.
PATIENCE_S = 30.0
#: Patience that a sender may ask of its receivers, in seconds.
LONGEST_PATIENCE_S = 3600.0
#: A sender that waits says so at least this often, in seconds.
SIGN_S = 1.0

STRICT = ConfigDict(extra="forbid", strict=True)
Count = Annotated[int, Field(ge=0)]
Digest = Annotated[str, Field(pattern=r"^([0-9a-f]{16})?$")]
Seconds = Annotated[float, Field(gt=0, le=LONGEST_PATIENCE_S, allow_inf_nan=False)]
#: Of a sender's option; more than `LONGEST_PATIENCE_S` is as much.
Patience = Annotated[float, Field(gt=0)]
Hex = Annotated[str, Field(pattern=r"^([0-9a-f]{2})*$", max_length=1 << 17)]
ShortHex = Annotated[str, Field(pattern=r"^([0-9a-f]{2})*$", max_length=1024)]


@dataclass(frozen=True, slots=True)
class Hello:
    """A receiver that came, once per update. `seats`: digest of the seats it was given; `held`: what it still has of
    the update before (a group, a set of buffers), by its name, or empty; `devices`: UUIDs of CUDA devices that it can
    be reached on; `handle_format`: the newest format of memory handles that its runtime opens (0: none); `runtime`: for
    messages; `release`: that it runs, empty from 0.1.0.

    Fields that only other releases have are passed over: their hellos are refused by name and not as unreadable.
    """

    session: str
    number: Count
    seats: str = ""
    held: str = ""
    devices: tuple[str, ...] = ()
    handle_format: Count = 0
    runtime: str = ""
    release: Annotated[str, Field(max_length=40)] = ""
    protocol: int = PROTOCOL
    kind: Literal["hello"] = "hello"
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="ignore", strict=True)


@dataclass(frozen=True, slots=True)
class Opening:
    """The plan of this receiver with its digest; in what it will travel, by kind and name; and how long the receiver
    shall wait: `begin_within_s` until the first bucket, `patience_s` for each one after it.
    """

    plan: StreamPlan
    digest: str
    medium: Literal["gloo", "nccl", "file", "device"]
    name: str
    begin_within_s: Seconds
    patience_s: Seconds
    kind: Literal["opening"] = "opening"
    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True, slots=True)
class Agreed:
    """A receiver has nothing against the plan. One that has says Close with its reasons."""

    kind: Literal["answer"] = "answer"
    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True, slots=True)
class Key:
    """An entry of the store through which a group forms. The sender passes on what each receiver says."""

    name: Annotated[str, Field(max_length=1024)]
    value: Hex
    kind: Literal["key"] = "key"
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
    handle: ShortHex
    nbytes: Count
    storage_offset: Count
    storage_bytes: Count
    allocation_offset: Count
    counter: ShortHex
    counter_offset: Count
    event: ShortHex
    event_required: bool
    kind: Literal["device"] = "device"
    __pydantic_config__: ClassVar[ConfigDict] = STRICT


BufferDescriptor = Annotated[FileBuffer | DeviceBuffer, Discriminator("kind")]


@dataclass(frozen=True, slots=True)
class Buffers:
    """The buffers of the sender, for this receiver to map in place of earlier ones."""

    buffers: tuple[BufferDescriptor, ...]
    kind: Literal["buffers"] = "buffers"
    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True, slots=True)
class Ready:
    """`taken` buckets lie where they belong, and there is room for `AHEAD` more. The first one, of 0: the receiver is
    in the group, or has mapped the buffers.
    """

    taken: Count
    kind: Literal["ready"] = "ready"
    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True, slots=True)
class Go:
    """Bucket `bucket` of `nbytes` bytes is being posted in the group, or lies at `offset` of shared buffer `buffer`.
    `digest`: of those bytes, or empty.
    """

    bucket: Count
    nbytes: Count
    digest: Digest = ""
    buffer: Count = 0
    offset: Count = 0
    kind: Literal["go"] = "go"
    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True, slots=True)
class Waiting:
    """The sender is well; what keeps it is another receiver, which it will name when its own patience ends."""

    kind: Literal["waiting"] = "waiting"
    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True, slots=True)
class End:
    """`buckets` were sent, and no more follow."""

    buckets: Count
    kind: Literal["end"] = "end"
    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True, slots=True)
class Close:
    """Nothing follows, and why; the side that says it hangs up then. From a receiver also: its mappings are gone. Older
    releases know it by the same kind.
    """

    failures: tuple[Failure, ...] = ()
    kind: Literal["goodbye"] = "goodbye"
    __pydantic_config__: ClassVar[ConfigDict] = STRICT


Message = Hello | Opening | Agreed | Key | Buffers | Ready | Go | Waiting | End | Close
_ANY: Any = Annotated[Message, Discriminator("kind")]

encode = wire.encode


def decode(frame: bytes) -> Message:
    """Raises `wire.WireError` with the path of the first bad field."""
    return cast(Message, wire.decode(_ANY, frame))


def other_release(hello: Hello) -> Failure | None:
    """What a sender has against a receiver of another release or protocol, or None. 0.1.0 names no release."""
    if (hello.protocol, hello.release) == (PROTOCOL, RELEASE):
        return None
    theirs = f"of release {hello.release or '0.1.0'} (stream protocol {hello.protocol})"
    text = f"the replica is {theirs}, the trainer of {RELEASE} (stream protocol {PROTOCOL})"
    return Failure("release_mismatch", text, hint=f"{ORDER}; then run the trainer on that release too")


def seats_digest(offer: StreamOffer) -> str:
    """Membership with incarnations, in its order: only those that were given the same seats meet."""
    return hashlib.sha256(b"\n".join(wire.encode(each) for each in offer.seats)).hexdigest()
