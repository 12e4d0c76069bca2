"""Shared memory: who has a handle, who has read, and what there is room for."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transports.base import Box, Read
from transports.buckets import Bucket, Chunk, StreamPlan
from transports.digest import tensor_digest
from transports.media import memfd
from transports.shared_memory import SharedMemoryHub, SharedMemorySender
from transports.testing import refused
from transports.testing.source_contract import digests, noise
from transports.testing.transfer import Transfer, seats_for
from updater.core.errors import Aborted

#: What a reused buffer holds while no process may look at it.
POISON = 0xAB


class Poisoning(SharedMemorySender):
    """Overwrites a buffer as soon as it is free, which is when a receiver that kept views of it would see it."""

    def buffer(self, bucket: Bucket, deadline_s: float) -> torch.Tensor:
        return super().buffer(bucket, deadline_s).fill_(POISON)

    def finish(self, deadline_s: float, *, normal: bool) -> None:
        super().finish(deadline_s, normal=normal)
        for buffer in range(self.medium.buffers):
            self.medium.room(buffer, 1 << 20).fill_(POISON)


@pytest.mark.case("B033")
def test_a_fused_tensor_from_three_that_came_through_one_reused_buffer() -> None:
    parts = {name: noise("BF16", (16, 32), at) for at, name in enumerate(("q", "k", "v"))}
    sender, hub = Poisoning(), SharedMemoryHub()
    update = Transfer(sender, [hub], parts, bucket_bytes=1024)  # one part to a bucket, two buffers for three parts
    fused = torch.empty(48, 32, dtype=torch.bfloat16)
    whole = Box.whole((16, 32))
    update.receivers[0].reads = [Read(name, whole, fused[16 * at : 16 * at + 16]) for at, name in enumerate(parts)]
    update.run()
    assert update.plan is not None
    assert len(update.plan.buckets) == 3
    assert (update.sender_error, update.receivers[0].error) == (None, None)
    assert tensor_digest(fused) == tensor_digest(torch.cat(list(parts.values())))
    sender.close()
    hub.close()


@pytest.mark.case("B120")
@pytest.mark.slow
def test_four_ranks_and_handles_for_two() -> None:
    """No receiver gets a byte; the two that have no handle are listed; a seat has one holder."""
    sender, hubs = SharedMemorySender(), [SharedMemoryHub() for _ in range(4)]
    held = {"w": noise("BF16", (64, 64), 1)}
    update = Transfer(sender, hubs, held, seats=seats_for(4), deadline_s=4.0).run(absent=(1, 3), gathered=True)
    assert isinstance(update.sender_error, Aborted)
    assert [(f.code, f.replica, f.rank) for f in update.sender_error.failures] == [
        ("peer_timeout", "r0", 1),
        ("peer_timeout", "r0", 3),
    ]
    for receiver in (update.receivers[0], update.receivers[2]):
        assert isinstance(receiver.error, Aborted)
        assert (receiver.error.code, receiver.progress) == ("peer_lost", [])
    again = Transfer(sender, hubs, held, seats=seats_for(4)).run()
    assert again.sender_error is None
    assert all(digests(receiver.arrived) == digests(held) for receiver in again.receivers)
    sender.close()
    for hub in hubs:
        hub.close()


class Order:
    """Lets receivers take each bucket in a drawn order, by events and not by time.

    `late`: per bucket, receivers that may take it only when every other one has acknowledged it.
    """

    def __init__(self, count: int, late: list[int]) -> None:
        self.count, self.late = count, late
        self.taken: dict[int, set[int]] = {}
        self.changed = threading.Condition()

    def take(self, plan: StreamPlan, number: int) -> Callable[[Chunk, torch.Tensor], None]:
        of = {(chunk.name, chunk.box): bucket.index for bucket in plan.buckets for chunk in bucket.chunks}

        def take(chunk: Chunk, _data: torch.Tensor) -> None:
            bucket = of[chunk.name, chunk.box]
            with self.changed:
                if bucket < len(self.late) and self.late[bucket] == number:
                    others = self.count - 1
                    self.changed.wait_for(lambda: len(self.taken.get(bucket, ())) >= others, 60.0)
                self.taken.setdefault(bucket, set()).add(number)
                self.changed.notify_all()

        return take


@pytest.mark.case("B123")
@settings(max_examples=15, deadline=None)
@given(late=st.lists(st.integers(0, 3), min_size=8, max_size=8))
def test_a_buffer_is_written_again_only_when_all_ranks_have_read_it(late: list[int]) -> None:
    """In every bucket one rank of four comes last, after the others have long acknowledged; buffers are poisoned as
    soon as they are free.
    """
    held = {f"t{at}": noise("BF16", (8, 64), at) for at in range(8)}
    sender, hubs = Poisoning(), [SharedMemoryHub() for _ in range(4)]
    update = Transfer(sender, hubs, held, bucket_bytes=1024, seats=seats_for(4))
    assert update.plan is not None
    order = Order(4, late)
    for number, receiver in enumerate(update.receivers):
        receiver.take = order.take(update.plan, number)
    update.run()
    assert (update.sender_error, [receiver.error for receiver in update.receivers]) == (None, [None] * 4)
    assert all(digests(receiver.arrived) == digests(held) for receiver in update.receivers)
    sender.close()
    for hub in hubs:
        hub.close()


@pytest.mark.case("B123")
def test_the_last_bucket_is_done_when_all_ranks_have_read_it() -> None:
    """What ends an update is the slowest rank, not the first."""
    held = {"t": noise("BF16", (8, 64), 1)}
    sender, hubs = SharedMemorySender(), [SharedMemoryHub(), SharedMemoryHub()]
    update = Transfer(sender, hubs, held, bucket_bytes=1024)
    held_back, first = threading.Event(), threading.Event()
    update.receivers[0].take = lambda _chunk, _data: first.set()
    update.receivers[1].take = lambda _chunk, _data: (held_back.wait(60.0), None)[1]
    update.start()
    assert first.wait(60.0)
    assert sender.sending  # not finished: rank 1 has not read
    held_back.set()
    update.join()
    assert (update.sender_error, update.receivers[1].error) == (None, None)
    sender.close()
    for hub in hubs:
        hub.close()


@pytest.fixture(scope="module")
def limited() -> dict[str, Any]:
    """What a process with little of everything came to, by what it was short of."""
    program = Path(__file__).with_name("shared_memory_limits.py")
    ran = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr  # alive to the end: no signal
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.mark.case("B124")
@pytest.mark.slow
def test_two_thousand_tensors_with_room_for_256_descriptors(limited: dict[str, Any]) -> None:
    """Packed into two buffers, they need two descriptors; a process that cannot take one in says so."""
    found = limited["descriptors"]
    assert found["ends"] == [["", "", True]]
    assert len(found["files"]) == 1
    assert found["full"] == "no_space"


@pytest.mark.case("B125")
@pytest.mark.slow
def test_no_room_for_a_bucket_is_a_refusal_and_no_signal(limited: dict[str, Any]) -> None:
    found = limited["room"]
    assert found["refused"] == ["no_space", "peer_lost"]
    assert str(4 << 20) in found["message"]
    assert found["fits"] == ["", ""]


@pytest.mark.case("B125")
def test_room_is_reserved_before_it_is_touched() -> None:
    """Every page is there when the buffer is: writing to it can fail no more."""
    file = memfd.SealedFile(1 << 20)
    assert Path(f"/proc/self/fd/{file.number}").stat().st_blocks * 512 >= 1 << 20
    file.close()
    available = memfd.available_bytes()
    assert available is not None
    with refused("no_space"):
        memfd.SealedFile(2 * available)
