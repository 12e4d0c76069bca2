"""Messages of a stream from one who knows its session: each mutation is a message or refused as unreadable."""

from __future__ import annotations

import os
import random
import time
from typing import Any, get_args

import pytest
from mutations import mutated

from transports.buckets import StreamPlan
from transports.stream import messages
from updater.core.errors import Failure
from updater.protocol import wire
from updater.protocol.manifest import TensorSpec

SOAK = os.environ.get("LIVEWEIGHTS_EXAMPLES") == "soak"
COUNT = 10_000 if SOAK else 500
SEED = int(time.time()) if SOAK else 44

PLAN = StreamPlan((TensorSpec("a", "F32", (2, 3)), TensorSpec("b", "BF16", (0,))), 4096)
DIGEST = "0123456789abcdef"
FAILURE = Failure("stream_mismatch", "why", tensor="a", rank=1)
DEVICE = messages.DeviceBuffer("cuda:0", "00ff", 4096, 0, 4096, 0, "aa", 0, "", False)
ALL = (
    messages.Hello("session", 1, "seats", "held", ("gpu",), 1, "torch"),
    messages.Opening(PLAN, DIGEST, "gloo", "group", 5.0, 5.0),
    messages.Agreed(),
    messages.Key("store/0", "00ff"),
    messages.Buffers((messages.FileBuffer(4096), DEVICE)),
    messages.Ready(1),
    messages.Go(1, 128, DIGEST, 1, 64),
    messages.Waiting(),
    messages.End(2),
    messages.Close((FAILURE,)),
)


@pytest.mark.case("F43")
@pytest.mark.parametrize("message", ALL, ids=lambda message: message.kind)
def test_mutations_of_a_message_are_messages_or_unreadable(message: Any) -> None:
    chance, whole = random.Random(SEED), wire.encode(message)
    assert messages.decode(whole) == message
    for _ in range(COUNT):
        raw = mutated(whole, chance)
        try:
            read = messages.decode(raw)
        except wire.WireError:
            continue
        except Exception as error:
            raise AssertionError(f"seed {SEED}: {raw!r}") from error
        assert messages.decode(wire.encode(read)) == read


@pytest.mark.case("F43")
def test_every_message_is_mutated() -> None:
    assert {type(each) for each in ALL} == set(get_args(messages.Message))
