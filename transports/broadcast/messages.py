"""What is said beside a group: frozen dataclasses as JSON, each with its kind (I10).

    receiver: Hello          Answer  Key...  Formed  Ready 0  Ready 1 ...                Done
    sender:          Opening         Key...                   Go 0 [bucket 0]  Go 1 ...  End

A sender that waits for one receiver says Waiting to all. Either side may say Goodbye at any time, and hangs up then. A
bucket is posted in the group only behind its Go, and Go is said only when every receiver is Ready for it: no rank waits
in a collective for somebody who is not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import ConfigDict, Discriminator, Field

from transports.buckets import StreamPlan
from transports.control.messages import STRICT, Count, Digest, Goodbye, Seconds, Waiting
from updater import wire

#: Grows with every change that an older side would misunderstand.
PROTOCOL = 2

Hex = Annotated[str, Field(pattern=r"^([0-9a-f]{2})*$", max_length=1 << 17)]


@dataclass(frozen=True, slots=True)
class Hello:
    """A receiver that came, once per update. `seats`: digest of the seats it was given; `held`: the group it still
    has, or empty; `device`: UUID of its CUDA device, or empty; `release`: that it runs, empty from 0.1.0.
    """

    session: str
    number: Count
    seats: str
    held: str = ""
    device: str = ""
    release: Annotated[str, Field(max_length=40)] = ""
    protocol: int = PROTOCOL
    kind: Literal["hello"] = "hello"
    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True, slots=True)
class Opening:
    """The plan with its digest, the group that it will travel in, and how long a receiver shall wait:
    `begin_within_s` until the first bucket, `patience_s` for each one after it.
    """

    plan: StreamPlan
    digest: str
    group: str
    backend: Literal["gloo", "nccl"]
    begin_within_s: Seconds
    patience_s: Seconds
    kind: Literal["opening"] = "opening"
    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True, slots=True)
class Answer:
    """A receiver has nothing against the plan. One that has says Goodbye with its reasons."""

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
class Formed:
    """The receiver is in the group."""

    kind: Literal["formed"] = "formed"
    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True, slots=True)
class Ready:
    """The receiver has room for bucket `bucket`, and waits for its Go."""

    bucket: Count
    kind: Literal["ready"] = "ready"
    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True, slots=True)
class Go:
    """Bucket `bucket` of `nbytes` bytes is being posted. `digest`: of those bytes, or empty."""

    bucket: Count
    nbytes: Count
    digest: Digest = ""
    kind: Literal["go"] = "go"
    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True, slots=True)
class End:
    """`buckets` were sent, and no more follow."""

    buckets: Count
    kind: Literal["end"] = "end"
    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True, slots=True)
class Done:
    """Every byte lies where the receiver wants it."""

    kind: Literal["done"] = "done"
    __pydantic_config__: ClassVar[ConfigDict] = STRICT


Message = Hello | Opening | Answer | Key | Formed | Ready | Go | Waiting | End | Done | Goodbye
_ANY: Any = Annotated[Message, Discriminator("kind")]


def group_limit(patience_s: float) -> float:
    """How long a collective may take before the group itself gives up, in seconds: longer than either side's patience,
    since a group that breaks does not say through whom.
    """
    return 2 * patience_s + 30.0


encode = wire.encode


def decode(frame: bytes) -> Message:
    """Raises `wire.WireError` with the path of the first bad field."""
    return cast(Message, wire.decode(_ANY, frame))
