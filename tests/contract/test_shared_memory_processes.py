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
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from shared_memory_program import PATIENCE_S, plan_of, tensors

from transports.local.memfd import NAME
from transports.shared_memory import SharedMemoryHub, SharedMemorySender
from transports.stream_testing import Receiving, Transfer, manifest_of, offer_of, seats_for, send_all, specs_of
from updater import wire
from updater.core.errors import Aborted, LiveweightsError
from updater.core.participant import StreamOffer

pytestmark = pytest.mark.engine
HANG_S = 90.0


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
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            until(lambda: Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")

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
        self.sender, self.hub = SharedMemorySender(patience_s=PATIENCE_S), SharedMemoryHub()
        assert other.answer() == {"ready": True}

    def start(self, seed: int, *, hold: int = -1) -> Transfer:
        held = tensors(seed)
        seats = seats_for(1, 1)
        offer = offer_of(self.sender, seats)
        self.other.tell(offer=wire.plain(offer), number=1, seed=seed, hold=hold)
        update = Transfer(
            self.sender, [self.hub, self.hub], held, seats=seats, plan=plan_of(held), deadline_s=PATIENCE_S
        )
        update.receivers[0].hub = self.hub
        update.start(absent=(1,))
        return update

    def good(self, seed: int) -> None:
        """The first meeting of a fresh process may take a while."""
        update = self.start(seed)
        assert self.other.answer() == {"error": "", "equal": True}
        update.join()
        assert (update.sender_error, update.receivers[0].error) == (None, None)


def test_a_receiver_process_that_is_stopped_and_killed(
    started: Callable[[str], Other], mapped: Callable[[], int]
) -> None:
    here = Here(started("receive"))
    here.good(1)

    update = here.start(2, hold=3)
    assert here.other.answer() == {"held": True}
    here.other.signal(signal.SIGSTOP)
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

    def receive(sender: Other, seed: int, hold: int = -1) -> tuple[Receiving, Any]:
        sender.tell(do="begin")
        found = sender.answer()
        sender.tell(do="send", seats=[wire.plain(each) for each in seats], seed=seed, hold=hold)
        receiving = Receiving(hub, manifest_of(specs_of(tensors(seed))))
        offer = StreamOffer("shared_memory", found["address"], found["session"], seats)
        return receiving, receiving.start(offer, 0)

    sender = started("send")
    receiving, thread = receive(sender, 1)
    assert sender.answer() == {"error": ""}
    thread.join(HANG_S)
    assert receiving.error is None

    receiving, thread = receive(sender, 2, hold=3)
    assert sender.answer() == {"held": True}
    sender.signal(signal.SIGSTOP)
    thread.join(HANG_S)
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
    idle.kill()  # between two updates: nobody has to come for it to be noticed
    until(lambda: mapped() == 0)
    assert len(os.listdir("/proc/self/fd")) < files

    again = SharedMemorySender()
    held = tensors(6)
    offer = offer_of(again, seats)
    last = Receiving(hub, manifest_of(specs_of(held)))
    thread = last.start(offer, 0)
    send_all(again, offer, plan_of(held), held, 20.0)
    thread.join(HANG_S)
    assert last.error is None
    again.close()
    hub.close()
