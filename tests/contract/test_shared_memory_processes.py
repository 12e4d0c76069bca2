"""Real processes at both ends of a stream, stopped and killed in the middle of a bucket.

Either side learns of it within its deadline, names who it was, keeps nothing, and its next update is good.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from shared_memory_program import plan_of, tensors

from tests.standing import stand_still
from transports.buckets import Chunk
from transports.local.memfd import NAME
from transports.shared_memory import SharedMemoryHub, SharedMemorySender
from transports.stream import StreamSender
from transports.stream_testing import (
    HeldSender,
    Receiving,
    Transfer,
    manifest_of,
    offer_of,
    seats_for,
    send_all,
    specs_of,
)
from updater import wire
from updater.core.errors import Aborted, LiveweightsError
from updater.core.participant import StreamOffer

pytestmark = pytest.mark.engine
HANG_S = 90.0
#: A patience that is to end: only a process that was stopped has anything to do within it.
SHORT_S = 1.5


Take = Callable[[Chunk, torch.Tensor], None]


class Other:
    """The other process."""

    def __init__(self, role: str) -> None:
        program = Path(__file__).with_name("shared_memory_program.py")
        self.process = subprocess.Popen(
            [sys.executable, str(program), role], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, **values: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(values) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Its next line; pytest's time limit is the guard."""
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def signal(self, number: int) -> None:
        if number == signal.SIGSTOP:
            stand_still(self.process.pid)
        else:
            self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(HANG_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def started(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Other]]:
    made: list[Other] = []

    def start(role: str) -> Other:
        made.append(Other(role))
        return made[-1]

    yield start
    for other in made:
        other.kill()


def until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.01)


def mappings() -> set[str]:
    """Of shared buffers in this process."""
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if NAME in line}


@pytest.fixture
def mapped() -> Callable[[], int]:
    """Counts what was mapped since; whatever else this process runs may hold buffers of its own."""
    gc.collect()
    before = mappings()
    return lambda: len(mappings() - before)


def places(error: BaseException | None) -> list[tuple[str, str, int | None]]:
    assert isinstance(error, Aborted), error
    return [(failure.code, failure.replica, failure.rank) for failure in error.failures]


def code(error: BaseException | None) -> str:
    return error.code if isinstance(error, LiveweightsError) else repr(error)


class Here:
    """A sender in this process; one receiver in a thread, the other in the other process."""

    def __init__(self, other: Other) -> None:
        self.other = other
        self.sender, self.hub = SharedMemorySender(), SharedMemoryHub()
        assert other.answer() == {"ready": True}

    def start(self, seed: int, *, hold: int = -1, by: StreamSender | None = None) -> Transfer:
        held = tensors(seed)
        seats = seats_for(1, 1)
        offer = offer_of(self.sender, seats)
        self.other.tell(offer=wire.plain(offer), number=1, seed=seed, hold=hold)
        sender = by or self.sender
        update = Transfer(sender, [self.hub, self.hub], held, seats=seats, plan=plan_of(held), deadline_s=HANG_S)
        update.start(absent=(1,))
        return update

    def good(self, seed: int) -> None:
        update = self.start(seed)
        assert self.other.answer() == {"error": "", "equal": True}
        update.join()
        assert (update.sender_error, update.receivers[0].error) == (None, None)


def test_a_receiver_process_that_is_stopped_and_killed(
    started: Callable[[str], Other], mapped: Callable[[], int]
) -> None:
    here = Here(started("receive"))
    here.good(1)

    impatient = HeldSender(here.sender, 5, then_s=SHORT_S)
    update = here.start(2, hold=3, by=impatient)
    assert here.other.answer() == {"held": True}
    here.other.signal(signal.SIGSTOP)
    until(lambda: len(update.receivers[0].progress) > 3)  # the one here has said what it had to
    impatient.release.set()
    update.join()
    assert places(update.sender_error) == [("peer_timeout", "r1", 0)]
    assert code(update.receivers[0].error) == "peer_lost"
    here.other.signal(signal.SIGCONT)
    here.other.tell()
    assert here.other.answer() == {"error": "peer_lost", "equal": False}
    here.good(3)

    update = here.start(4, hold=3)
    assert here.other.answer() == {"held": True}
    here.other.kill()
    update.join()
    assert places(update.sender_error) == [("peer_lost", "r1", 0)]
    assert code(update.receivers[0].error) == "peer_lost"
    update.sender_error = update.receivers[0].error = None
    gc.collect()
    assert mapped() == 0

    fresh = Here(started("receive"))
    here.other = fresh.other
    here.good(5)
    for end in (here, fresh):
        end.sender.close()
        end.hub.close()


def test_a_sender_process_that_is_stopped_and_killed(
    started: Callable[[str], Other], mapped: Callable[[], int]
) -> None:
    hub, seats = SharedMemoryHub(), seats_for(1)

    def receive(sender: Other, seed: int, hold: int = -1, take: Take | None = None) -> tuple[Receiving, Any]:
        sender.tell(do="begin")
        found = sender.answer()
        sender.tell(do="send", seats=[wire.plain(each) for each in seats], seed=seed, hold=hold)
        receiving = Receiving(hub, manifest_of(specs_of(tensors(seed))), take=take)
        offer = StreamOffer("shared_memory", found["address"], found["session"], seats)
        return receiving, receiving.start(offer, 0)

    sender = started("send")
    receiving, thread = receive(sender, 1)
    assert sender.answer() == {"error": ""}
    thread.join(HANG_S)
    assert receiving.error is None

    stopped, last = threading.Event(), plan_of(tensors(2)).buckets[2].chunks[-1]
    receiving, thread = receive(
        sender, 2, hold=3, take=lambda chunk, _data: (chunk == last and stopped.wait(HANG_S), None)[1]
    )
    assert sender.answer() == {"held": True}
    sender.signal(signal.SIGSTOP)
    hub.patience_s = SHORT_S
    stopped.set()
    thread.join(HANG_S)
    hub.patience_s = None
    assert code(receiving.error) == "peer_timeout"
    sender.signal(signal.SIGCONT)
    sender.tell()
    assert sender.answer() == {"error": "peer_lost"}
    receiving, thread = receive(sender, 3)
    assert sender.answer() == {"error": ""}
    thread.join(HANG_S)
    assert receiving.error is None
    assert mapped() == 2  # kept for the next update

    receiving, thread = receive(sender, 4, hold=3)
    assert sender.answer() == {"held": True}
    sender.kill()
    thread.join(HANG_S)
    assert code(receiving.error) == "peer_lost"
    receiving.error = None
    gc.collect()
    assert mapped() == 0
    assert f"liveweights-{sender.process.pid}-" not in Path("/proc/net/unix").read_text()

    idle = started("send")
    receiving, thread = receive(idle, 5)
    assert idle.answer() == {"error": ""}
    thread.join(HANG_S)
    assert mapped() == 2
    files = len(os.listdir("/proc/self/fd"))
    idle.kill()  # between two updates: no receiver has to come for it to be noticed
    until(lambda: mapped() == 0)
    assert len(os.listdir("/proc/self/fd")) < files

    again = SharedMemorySender()
    held = tensors(6)
    offer = offer_of(again, seats)
    last = Receiving(hub, manifest_of(specs_of(held)))
    thread = last.start(offer, 0)
    send_all(again, offer, plan_of(held), held, HANG_S)
    thread.join(HANG_S)
    assert last.error is None
    again.close()
    hub.close()
