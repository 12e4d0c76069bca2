"""Messages of a stream from one who knows its session: each mutation is a message or refused as unreadable."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any, get_args

import pytest
from mutations import mutated

from transports.broadcast import messages as broadcast
from transports.local import messages as local
from transports.stream import StreamPlan
from updater import wire
from updater.core.errors import Failure
from updater.manifest import TensorSpec

SOAK = os.environ.get("LIVEWEIGHTS_EXAMPLES") == "soak"
COUNT = 10_000 if SOAK else 500
SEED = int(time.time()) if SOAK else 44

PLAN = StreamPlan((TensorSpec("a", "F32", (2, 3)), TensorSpec("b", "BF16", (0,))), 4096)
DIGEST = "0123456789abcdef"
FAILURE = Failure("stream_mismatch", "why", tensor="a", rank=1)
DEVICE = local.DeviceBuffer("cuda:0", "00ff", 4096, 0, 4096, 0, "aa", 0, "", False)
LOCAL = (
    local.Hello("session", 1, 7, ("gpu",), 1, "torch"),
    local.StreamOpening(PLAN, DIGEST, 5.0),
    local.Answer((FAILURE,)),
    local.Buffers((local.FileBuffer(4096), DEVICE)),
    local.Announce(1, 0, 64, 128, DIGEST),
    local.Ack(1),
    local.Waiting(),
    local.Goodbye((FAILURE,)),
)
BROADCAST = (
    broadcast.Hello("session", 1, "seats", "held", "gpu"),
    broadcast.Opening(PLAN, DIGEST, "group", "gloo", 5.0, 5.0),
    broadcast.Answer(),
    broadcast.Key("store/0", "00ff"),
    broadcast.Formed(),
    broadcast.Ready(1),
    broadcast.Go(1, 128, DIGEST),
    broadcast.Waiting(),
    broadcast.End(2),
    broadcast.Done(),
    broadcast.Goodbye((FAILURE,)),
)


@pytest.mark.case("F43")
@pytest.mark.parametrize(
    ("decode", "message"),
    [(local.decode, each) for each in LOCAL] + [(broadcast.decode, each) for each in BROADCAST],
    ids=lambda value: f"{type(value).__module__.split('.')[1]}-{value.kind}" if hasattr(value, "kind") else "",
)
def test_mutations_of_a_message_are_messages_or_unreadable(decode: Callable[[bytes], Any], message: Any) -> None:
    chance, whole = random.Random(SEED), wire.encode(message)
    assert decode(whole) == message
    for _ in range(COUNT):
        raw = mutated(whole, chance)
        try:
            read = decode(raw)
        except wire.WireError:
            continue
        except Exception as error:
            raise AssertionError(f"seed {SEED}: {raw!r}") from error
        assert decode(wire.encode(read)) == read


@pytest.mark.case("F43")
def test_every_message_of_both_protocols_is_mutated() -> None:
    assert {type(each) for each in LOCAL} == set(get_args(local.Message))
    assert {type(each) for each in BROADCAST} == set(get_args(broadcast.Message))
