"""A stream between processes, over each medium: one sender, three receivers of two replicas, real sockets, real deaths.

Either side learns of one within its deadline, names who it was, keeps nothing, and its next update is good.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.standing import stand_still
from transports.testing.transfer import seats_for
from updater.protocol import wire

pytestmark = pytest.mark.engine

PROGRAM = Path(__file__).with_name("stream_program.py")
SMALL = (1, 3, 4096)
#: Tensors that fill a bucket each, larger than what the kernel holds between two processes.
LARGE = (2, 4, 16 << 20)
#: Patience that no peer comes to the end of, and one that is to end. Within that the others may still have to do their
#: part, as on a machine that is busy otherwise.
LONG_S, SHORT_S = 60.0, 6.0
SEATS = seats_for(1, 2)
RANKS = [("r0", 0), ("r1", 0), ("r1", 1)]


class End:
    """One process."""

    def __init__(self, role: str, kind: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), role, kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self.said: dict[str, Any] = {}

    def greet(self) -> End:
        self.said = self.hear()
        return self

    def tell(self, **job: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process has ended"
        said: dict[str, Any] = json.loads(line)
        return said

    def until_held(self, where: str) -> None:
        assert self.hear() == {"at": where}

    def signal(self, number: signal.Signals) -> None:
        if number == signal.SIGSTOP:
            stand_still(self.process.pid)
        else:
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class Fleet:
    """The ends, made again where they died."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.sender = End("send", kind)
        self.receivers = [End("receive", kind) for _ in RANKS]
        for end in (self.sender, *self.receivers):
            end.greet()

    def begin(
        self,
        model: tuple[int, int, int] = SMALL,
        *,
        sender: str = "",
        holds: tuple[str, str, str] = ("", "", ""),
        deadline_s: float = LONG_S,
        patience_s: float = LONG_S,
    ) -> None:
        """`sender`, `holds`: where each stands still. `deadline_s`: of the sender; `patience_s`: of the receivers."""
        where = {"address": self.sender.said["address"], "session": self.sender.said["session"]}
        offer = {"kind": self.kind, **where, "seats": [wire.plain(each) for each in SEATS]}
        bucket_bytes = max(model[2], 1024)
        self.sender.tell(offer=offer, model=model, bucket_bytes=bucket_bytes, deadline_s=deadline_s, hold=sender)
        for number, receiver in enumerate(self.receivers):
            receiver.tell(offer=offer, model=model, number=number, hold=holds[number], patience_s=patience_s)

    def sent(self) -> list[tuple[str, str, int | None]]:
        """What the sender ended with."""
        said = self.sender.hear()
        self.sender.said |= said
        return [tuple(each) for each in said["failures"]]

    def codes(self, *numbers: int) -> list[str]:
        """What receivers ended with; empty: well."""
        said = {number: self.receivers[number].hear() for number in numbers or range(len(self.receivers))}
        for number, each in said.items():
            self.receivers[number].said |= each
        assert all(each["right"] or each["failures"] for each in said.values())
        return [each["failures"][0][0] if each["failures"] else "" for each in said.values()]

    def good(self) -> None:
        self.begin()
        assert self.sent() == []
        assert self.codes() == ["", "", ""]

    def replace_sender(self) -> None:
        self.sender.kill()
        self.sender = End("send", self.kind).greet()

    def replace_receiver(self, number: int) -> None:
        self.receivers[number].kill()
        self.receivers[number] = End("receive", self.kind).greet()

    def close(self) -> None:
        for end in (self.sender, *self.receivers):
            end.kill()


@pytest.fixture(scope="module", params=["broadcast", "shared_memory"])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    fleet = Fleet(request.param)
    yield fleet
    fleet.close()


def under_way(fleet: Fleet, **patience: float) -> None:
    """A bucket is in the group or lies in shared memory, the second receiver stands still and takes nothing: this
    bucket or the one after it cannot arrive.
    """
    fleet.begin(LARGE, holds=("", "t1", ""), **patience)
    fleet.receivers[1].until_held("t1")
    fleet.receivers[1].signal(signal.SIGSTOP)


def test_a_sender_is_killed_before_the_plan(fleet: Fleet) -> None:
    fleet.begin(sender="open")
    fleet.sender.until_held("open")
    fleet.sender.signal(signal.SIGKILL)
    assert fleet.codes() == ["peer_lost"] * 3
    fleet.replace_sender()
    fleet.good()


def test_a_sender_is_stopped_before_the_plan(fleet: Fleet) -> None:
    fleet.begin(sender="open", patience_s=SHORT_S)
    fleet.sender.until_held("open")
    fleet.sender.signal(signal.SIGSTOP)
    assert fleet.codes() == ["peer_timeout"] * 3
    fleet.sender.signal(signal.SIGCONT)
    fleet.sender.tell()
    assert {code for code, *_ in fleet.sent()} <= {"peer_lost", "peer_timeout"}
    fleet.good()


@pytest.mark.case("B089")
def test_a_sender_is_killed_while_a_bucket_travels(fleet: Fleet) -> None:
    under_way(fleet)
    fleet.sender.signal(signal.SIGKILL)
    assert fleet.codes(0, 2) == ["peer_lost"] * 2
    fleet.receivers[1].signal(signal.SIGCONT)
    fleet.receivers[1].tell()
    assert fleet.codes(1) == ["peer_lost"]
    fleet.replace_sender()
    fleet.good()


def test_a_sender_is_stopped_while_a_bucket_travels(fleet: Fleet) -> None:
    under_way(fleet, patience_s=SHORT_S)
    fleet.sender.signal(signal.SIGSTOP)
    assert fleet.codes(0, 2) == ["peer_timeout"] * 2
    fleet.receivers[1].signal(signal.SIGCONT)
    fleet.receivers[1].tell()
    assert fleet.codes(1)[0] in ("peer_timeout", "peer_lost")
    fleet.sender.signal(signal.SIGCONT)
    assert {code for code, *_ in fleet.sent()} <= {"peer_lost", "peer_timeout"}
    fleet.good()


def test_a_receiver_is_killed_at_the_plan(fleet: Fleet) -> None:
    fleet.begin(holds=("", "plan", ""))
    fleet.receivers[1].until_held("plan")
    fleet.receivers[1].signal(signal.SIGKILL)
    assert fleet.sent() == [("peer_lost", "r1", 0)]
    assert fleet.codes(0, 2) == ["peer_lost"] * 2
    fleet.replace_receiver(1)
    fleet.good()


def test_a_receiver_is_stopped_at_the_plan(fleet: Fleet) -> None:
    fleet.begin(holds=("", "plan", ""), deadline_s=SHORT_S)
    fleet.receivers[1].until_held("plan")
    fleet.receivers[1].signal(signal.SIGSTOP)
    assert ("peer_timeout", "r1", 0) in fleet.sent()
    assert fleet.codes(0, 2) == ["peer_lost"] * 2
    fleet.receivers[1].signal(signal.SIGCONT)
    fleet.receivers[1].tell()
    assert fleet.codes(1) == ["peer_lost"]
    fleet.good()


def test_a_receiver_is_killed_while_a_bucket_travels(fleet: Fleet) -> None:
    under_way(fleet)
    fleet.receivers[1].signal(signal.SIGKILL)
    assert fleet.sent()[0] == ("peer_lost", "r1", 0)  # before who lost it within the group, and may have said so
    assert fleet.codes(0, 2) == ["peer_lost"] * 2
    assert [end.said["mapped"] for end in (fleet.sender, fleet.receivers[0], fleet.receivers[2])] == [0, 0, 0]
    fleet.replace_receiver(1)
    fleet.good()


def test_a_receiver_is_stopped_while_a_bucket_travels(fleet: Fleet) -> None:
    under_way(fleet, deadline_s=SHORT_S)
    assert ("peer_timeout", "r1", 0) in fleet.sent()
    assert fleet.codes(0, 2) == ["peer_lost"] * 2
    fleet.receivers[1].signal(signal.SIGCONT)
    fleet.receivers[1].tell()
    assert fleet.codes(1) == ["peer_lost"]
    fleet.good()


def test_twenty_updates_leave_nothing_behind(fleet: Fleet) -> None:
    """After all that happened above; a first update ends what is still ending."""
    counts, sessions = [], set()
    for _ in range(20):
        fleet.good()
        ends = (fleet.sender, *fleet.receivers)
        counts.append([(end.said["descriptors"], end.said["threads"]) for end in ends])
        sessions.add(fleet.sender.said["session"])
    for early, late in zip(counts[4], counts[19], strict=True):
        assert late[0] <= early[0]
        assert late[1] <= early[1]
    assert len(sessions) == 1


def test_what_a_dead_sender_had_shared_is_given_back_without_another_update(fleet: Fleet) -> None:
    """Mappings are kept for the next update, and no receiver has to come for the end to be noticed."""
    fleet.good()
    kept = 2 if fleet.kind == "shared_memory" else 0  # buffers
    assert [receiver.said["mapped"] for receiver in fleet.receivers] == [kept] * 3
    before = [receiver.said["descriptors"] for receiver in fleet.receivers]
    fleet.sender.kill()
    limit = time.monotonic() + LONG_S
    while True:
        seen = []
        for receiver in fleet.receivers:
            receiver.tell(look=True)
            seen.append(receiver.hear())
        if all(now["mapped"] == 0 and now["descriptors"] < then for now, then in zip(seen, before, strict=True)):
            break
        assert time.monotonic() < limit
    assert f"liveweights-{fleet.sender.process.pid}-" not in Path("/proc/net/unix").read_text()
    fleet.replace_sender()
    fleet.good()
