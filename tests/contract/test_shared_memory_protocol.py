"""What lies below the suite: sealed buffers, who is let in, messages that are none, what is left over."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from transports.buckets import StreamPlan
from transports.contract import digests, noise
from transports.control.channel import RECEIVER_LIMIT, SENDER_LIMIT, Gone, wait
from transports.control.messages import Goodbye
from transports.local import memfd
from transports.local.addresses import Listener, connect
from transports.local.line import Line
from transports.local.messages import Ack, Announce, Buffers, FileBuffer, Hello, Message, encode
from transports.local.testing import ScriptedSender
from transports.shared_memory import SharedMemoryHub, SharedMemorySender
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
from transports.testing import refused
from updater import wire
from updater.core.errors import Aborted, LiveweightsError
from updater.core.participant import StreamOffer
from updater.core.release import RELEASE

HANG_S = 60.0
#: Abstract names are the machine's: another run of these tests has others.
NAME = f"@liveweights-{os.getpid()}"


def never() -> bool:
    return False


def tensors(seed: int = 1, rows: int = 40) -> dict[str, torch.Tensor]:
    return {f"t{at}": noise("BF16", (rows, 100), 10 * seed + at) for at in range(4)}


def mapped_lines() -> set[str]:
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if memfd.NAME in line}


_EARLIER: set[str] = set()


@pytest.fixture(autouse=True)
def _counted_from_here() -> None:
    """Other tests of this process may have left buffers to the collector, or hold some of their own."""
    gc.collect()
    _EARLIER.clear()
    _EARLIER.update(mapped_lines())


def mappings() -> list[str]:
    """Permissions of every shared buffer that was mapped here since the test began."""
    return [line.split()[1] for line in mapped_lines() - _EARLIER]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < limit
        threading.Event().wait(0.005)


@contextmanager
def ends(count: int = 1) -> Iterator[tuple[SharedMemorySender, list[SharedMemoryHub]]]:
    sender, hubs = SharedMemorySender(), [SharedMemoryHub() for _ in range(count)]
    try:
        yield sender, hubs
    finally:
        sender.close()
        for hub in hubs:
            hub.close()


def good(update: Transfer) -> None:
    assert (update.sender_error, [each.error for each in update.receivers]) == (None, [None] * len(update.receivers))
    assert all(digests(each.arrived) == digests(dict(update.tensors)) for each in update.receivers)


# buffers


def test_a_buffer_has_its_size_for_good_and_one_writer() -> None:
    file = memfd.SealedFile(1 << 16)
    assert file.tensor is not None
    file.tensor.fill_(7)
    seen = memfd.open_sealed(file.number, 1 << 16)
    assert bool((seen == 7).all())
    for size in (1 << 15, 1 << 17):
        with pytest.raises(PermissionError):
            os.ftruncate(file.number, size)
    with pytest.raises(PermissionError):
        mmap.mmap(file.number, 1 << 16, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        fcntl.fcntl(file.number, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert sorted(mappings()) == ["r--s", "rw-s"]
    file.close()
    file.tensor = None
    assert mappings() == ["r--s"]
    view = seen[10:20]
    del seen
    assert bool((view == 7).all())  # a view holds the mapping
    del view
    assert mappings() == []


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW])
def test_a_file_that_could_be_truncated_is_not_mapped(seals: int) -> None:
    number = os.memfd_create("open", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(number, 4096)
    fcntl.fcntl(number, fcntl.F_ADD_SEALS, seals)
    with refused("stream_mismatch"):
        memfd.open_sealed(number, 4096)
    os.close(number)


def test_a_buffer_longer_than_its_file_is_not_mapped() -> None:
    file = memfd.SealedFile(4096)
    for nbytes in (0, 4097):
        with refused("stream_mismatch"):
            memfd.open_sealed(file.number, nbytes)
    file.close()
    with Path("/dev/null").open("rb") as other, refused("stream_mismatch"):
        memfd.open_sealed(other.fileno(), 4096)


def test_more_memory_than_there_is_is_refused_before_it_is_asked_for() -> None:
    available = memfd.available_bytes()
    assert available is not None
    before = open_files()
    with refused("no_space"):
        memfd.SealedFile(available * 4)
    assert open_files() <= before  # fewer, where something of another test was still ending


def test_a_sender_holds_two_buckets_and_keeps_them() -> None:
    with ends() as (sender, hubs):
        good(Transfer(sender, hubs, tensors(), bucket_bytes=4096).run())
        first = sorted(mappings())
        assert first == ["r--s", "r--s", "rw-s", "rw-s"]
        files = open_files()
        good(Transfer(sender, hubs, tensors(2), bucket_bytes=2048).run())  # smaller ones fit
        assert sorted(mappings()) == first
        assert open_files() <= files
        good(Transfer(sender, hubs, tensors(3), bucket_bytes=1 << 16).run())  # one bucket, larger than both
        assert sorted(mappings()) == ["r--s", "rw-s"]
        good(Transfer(sender, hubs, tensors(4), bucket_bytes=4096).run())
        assert sorted(mappings()) == first


# who is let in


def test_an_abstract_address_is_in_no_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with ends() as (sender, hubs):
        assert sender.address.startswith("@")
        good(Transfer(sender, hubs, tensors()).run())
        assert list(tmp_path.iterdir()) == []


def test_a_path_is_for_its_owner_and_gone_at_the_end(tmp_path: Path) -> None:
    sender, hub = SharedMemorySender(folder=str(tmp_path)), SharedMemoryHub()
    path = Path(sender.address)
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(OSError):
        Listener(sender.address)
    good(Transfer(sender, [hub], tensors()).run())
    sender.finish(1.0, normal=False)
    assert list(tmp_path.iterdir()) == []
    good(Transfer(sender, [hub], tensors()).run())
    assert (sender.address != str(path), len(list(tmp_path.iterdir()))) == (True, 1)
    sender.close()
    hub.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", ["", "@", "relative", "127.0.0.1:80", "@" + "x" * 200, "/" + "x" * 200])
def test_what_is_no_address_is_refused(address: str) -> None:
    with refused("stream_mismatch"):
        connect(address, 1.0, never)


def test_nobody_at_an_address(tmp_path: Path) -> None:
    for address in (f"{NAME}-nobody", str(tmp_path / "none")):
        with refused("peer_lost"):
            connect(address, 1.0, never)


def test_a_sender_whose_queue_is_full_is_not_waited_for_for_ever() -> None:
    full, address = socket.socket(socket.AF_UNIX), f"{NAME}-full"
    full.bind(address.replace("@", "\0"))
    full.listen(0)
    waiting = [connect(address, 1.0, never)]
    with refused("peer_timeout"):
        waiting.append(connect(address, 0.1, never))
    for each in (full, *waiting):
        each.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_not_let_in_on_either_side() -> None:
    code = """
import os, socket, sys
os.setuid(65534)
if sys.argv[1] == "listen":
    other = socket.socket(socket.AF_UNIX)
    other.bind(sys.argv[2].replace("@", "\\0"))
    other.listen(5)
    print("listening", flush=True)
    sys.stdin.readline()
else:
    other = socket.socket(socket.AF_UNIX)
    other.connect(sys.argv[2].replace("@", "\\0"))
    print(len(other.recv(10)), flush=True)
"""
    listener = Listener(f"{NAME}-owner")
    with subprocess.Popen(
        [sys.executable, "-c", code, "connect", listener.address], stdout=subprocess.PIPE, text=True
    ) as other:
        wait([listener], HANG_S)
        assert listener.accept() == []
        assert other.communicate(timeout=HANG_S)[0].split() == ["0"]  # hung up, without a word
    listener.close()
    command = [sys.executable, "-c", code, "listen", f"{NAME}-other"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline().split() == ["listening"]
        with refused("peer_lost"):
            connect(f"{NAME}-other", 5.0, never)
        other.communicate("\n", timeout=HANG_S)


class Stranger:
    """A connection that says what it likes."""

    def __init__(self, address: str) -> None:
        self.channel = Line(connect(address, 5.0, never), SENDER_LIMIT, descriptors=True)

    def says(self, message: Message | bytes) -> Stranger:
        self.channel.post(message)
        return self

    def hears(self) -> list[Message]:
        """Until it was hung up on."""
        heard: list[Message] = []
        while True:
            wait([self.channel], HANG_S)
            try:
                heard += self.channel.messages()
            except Gone:
                self.channel.close()
                return heard


@pytest.mark.case("F60")
@pytest.mark.parametrize("other", [{"release": ""}, {"release": "9.9.9"}, {"release": RELEASE, "protocol": 99}])
def test_a_receiver_of_another_release_is_named(other: dict[str, Any]) -> None:
    with ends() as (sender, _hubs):
        odd = Stranger(sender.address).says(Hello(sender.session, 0, 1, **other))
        update = Transfer(sender, [], tensors(), seats=seats_for(1)).run()
        odd.hears()
        assert isinstance(update.sender_error, Aborted)
        (failure,) = update.sender_error.failures
        assert failure.code == "release_mismatch"
        assert failure.replica
        assert {RELEASE, other["release"] or "0.1.0"} <= set(failure.message.replace(",", "").split())
        assert failure.hint


def test_strangers_are_turned_away_and_the_update_goes_on() -> None:
    with ends() as (sender, hubs):
        session = sender.session
        odd = [
            Stranger(sender.address).says(Hello("another-session", 0, 1)),
            Stranger(sender.address).says(Hello(session, 1, 1)),
            Stranger(sender.address).says(b"\xff\xfe not JSON"),
            Stranger(sender.address).says(Ack(0)),
            Stranger(sender.address),
        ]
        good(Transfer(sender, hubs, tensors()).run())
        codes = [[failure.code for each in one.hears() for failure in getattr(each, "failures", ())] for one in odd]
        assert codes == [["peer_lost"], ["peer_lost"], ["stream_mismatch"], [], []]


def test_a_seat_is_taken_once() -> None:
    with ends() as (sender, hubs):
        first = Stranger(sender.address).says(Hello(sender.session, 0, 1, release=RELEASE))
        update = Transfer(sender, hubs, tensors(), deadline_s=1.0).run()
        assert isinstance(update.receivers[0].error, Aborted)
        assert update.receivers[0].error.code == "peer_lost"
        assert isinstance(update.sender_error, Aborted)
        assert [(f.code, f.replica, f.rank) for f in update.sender_error.failures] == [("peer_timeout", "r0", 0)]
        first.channel.close()
        good(Transfer(sender, hubs, tensors(2)).run())


def memory_files(process: int | str) -> set[int]:
    """Inodes of the shared buffers that a process has open."""
    found = set()
    for link in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile, or that of the listing itself
            if memfd.NAME in os.readlink(link):
                found.add(os.stat(link).st_ino)
    return found


@pytest.mark.case("B206")
def test_a_forked_worker_holds_nothing_of_a_stream() -> None:
    """A receiver that waits for the trainer's end does not wait for its data loaders too."""
    here, there = (Line(each, 1 << 10) for each in socket.socketpair(socket.AF_UNIX))
    held = memory_files("self")
    listener, file = Listener(f"{NAME}-forked"), memfd.SealedFile(1 << 16)
    (resume, go), (started, forked) = os.pipe(), os.pipe()
    worker = os.fork()
    if worker == 0:
        os.close(go)
        os.write(forked, b"x")  # what is done at a fork has been done
        told = os.read(resume, 1)
        os._exit(0 if told and not mappings() else 1)
    try:
        os.read(started, 1)
        here.close()
        wait([there], HANG_S)
        with pytest.raises(Gone):
            there.messages()
        listener.close()
        with refused("peer_lost"):
            connect(listener.address, 1.0, never)
        assert memory_files(worker) <= held
        assert memory_files("self") - held
        os.write(go, b"x")
    finally:
        for end in (go, resume, started, forked):
            os.close(end)
        status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    assert status == 0
    there.close()
    file.close()


# messages that are none


@pytest.mark.parametrize(
    "frame",
    [
        b"[]",
        b"null",
        b'{"kind": "eval", "bucket": 0}',
        b'{"kind": "ack"}',
        b'{"kind": "ack", "bucket": "0"}',
        b'{"kind": "ack", "bucket": -1}',
        b'{"kind": "ack", "bucket": 0, "more": 1}',
        b'{"kind": "ack", "bucket": 0',
        encode(Announce(0, 0, 0, 1)),
    ],
)
def test_a_receiver_that_says_what_it_should_not_is_named(frame: bytes) -> None:
    with ends() as (sender, _hubs):
        odd = (
            Stranger(sender.address)
            .says(Hello(sender.session, 0, 1, release=RELEASE))
            .says(b'{"kind": "answer"}')
            .says(frame)
        )
        held = tensors()
        offer, plan = offer_of(sender, seats_for(1)), StreamPlan(specs_of(held), 1024)
        with pytest.raises(Aborted) as caught:
            send_all(sender, offer, plan, held, HANG_S)
        assert [(f.code, f.replica, f.rank) for f in caught.value.failures] == [("stream_mismatch", "r0", 0)]
        assert isinstance(odd.hears()[-1], Goodbye)


def test_an_acknowledgement_of_what_was_not_sent_ends_the_update() -> None:
    with ends() as (sender, _hubs):
        odd = (
            Stranger(sender.address)
            .says(Hello(sender.session, 0, 1, release=RELEASE))
            .says(b'{"kind": "answer"}')
            .says(Ack(1))
        )
        offer, plan = offer_of(sender, seats_for(1)), StreamPlan(specs_of(tensors()), 1024)
        with refused("stream_mismatch"):
            send_all(sender, offer, plan, tensors(), HANG_S)
        assert isinstance(odd.hears()[-1], Goodbye)


def test_a_frame_longer_than_is_taken() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    channel = Line(ours, 1000)
    theirs.send((1001).to_bytes(4, "big") + b"{}")
    with pytest.raises(wire.WireError):
        channel.messages()
    channel.close()
    theirs.close()


def test_frames_in_pieces_and_several_at_once() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    channel = Line(ours, 1 << 20)
    frames = b"".join(struct.pack(">I", len(body)) + body for body in (encode(Ack(at)) for at in range(3)))
    heard: list[Message] = []
    for cut in (frames[:2], frames[2:9], frames[9 : len(frames) - 1], frames[-1:]):
        theirs.send(cut)
        heard += channel.messages()
    assert heard == [Ack(0), Ack(1), Ack(2)]
    theirs.send(frames[:7])
    theirs.close()
    with pytest.raises(Gone):
        channel.messages()
    channel.close()


def test_a_message_longer_than_the_socket_holds_goes_out_in_pieces() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    here, there = Line(ours, RECEIVER_LIMIT), Line(theirs, SENDER_LIMIT)
    long = Hello("s", 0, 1, devices=("x" * 3_000_000,))
    here.post(long)
    assert here.unsent
    heard: list[Message] = []
    while not heard:
        wait([here, there], HANG_S)
        heard = there.messages()
    assert heard == [long]
    assert not here.unsent
    here.close()
    there.close()


# a sender that does wrong, message by message


class Scene:
    """A scripted sender and one receiver in a thread. The plan has buckets of 1 KiB."""

    def __init__(self) -> None:
        self.held = tensors()
        self.plan = StreamPlan(specs_of(self.held), 1024)
        self.sender, self.hub = ScriptedSender(), SharedMemoryHub(patience_s=HANG_S)
        self.receiver = Receiving(self.hub, manifest_of(self.plan.tensors))
        offer = StreamOffer("shared_memory", self.sender.address, self.sender.session, seats_for(1))
        self.thread = self.receiver.start(offer, 0)
        self.file = memfd.SealedFile(1024)

    def ends_with(self, code: str) -> None:
        goodbye = self.sender.hear(Goodbye)
        assert [failure.code for failure in goodbye.failures] == [code]
        self.thread.join(HANG_S)
        assert isinstance(self.receiver.error, LiveweightsError)
        assert self.receiver.error.code == code
        assert self.receiver.progress == []
        self.sender.close()
        self.hub.close()
        self.file.close()
        self.file.tensor = None
        self.receiver.error = None
        gc.collect()
        assert mappings() == []

    def buffers(self, count: int = 1) -> None:
        self.sender.say(Buffers((FileBuffer(1024),) * count), (self.file.number,) * count)


@pytest.mark.parametrize(
    ("announce", "code"),
    [
        (Announce(1, 0, 0, 1000), "stream_mismatch"),
        (Announce(0, 0, 0, 999), "stream_mismatch"),
        (Announce(0, 1, 0, 0), "stream_mismatch"),
        (Announce(0, 0, 1024, 0), "stream_mismatch"),
        (Announce(0, 0, 0, 0, "0123456789abcdef"), "tensor_digest"),
    ],
)
def test_a_bucket_that_is_not_the_next_or_not_there_is_refused(announce: Announce, code: str) -> None:
    scene = Scene()
    assert scene.sender.meet(scene.plan).failures == ()
    scene.buffers()
    size = announce.nbytes or scene.plan.buckets[0].nbytes
    scene.sender.say(Announce(announce.bucket, announce.buffer, announce.offset, size, announce.digest))
    scene.ends_with(code)


def test_buffers_without_their_files() -> None:
    scene = Scene()
    scene.sender.meet(scene.plan)
    scene.sender.say(Buffers((FileBuffer(1024),)))
    scene.ends_with("stream_mismatch")


def test_a_buffer_that_is_not_sealed_is_not_mapped() -> None:
    scene = Scene()
    number = os.memfd_create("open", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(number, 1024)
    scene.sender.meet(scene.plan)
    scene.sender.say(Buffers((FileBuffer(1024),)), (number,))
    scene.ends_with("stream_mismatch")
    os.close(number)


def test_a_plan_that_is_cut_in_another_way() -> None:
    scene = Scene()
    answer = scene.sender.meet(scene.plan, digest="0" * 64)
    assert [failure.code for failure in answer.failures] == ["stream_mismatch"]
    scene.ends_with("stream_mismatch")


def test_a_sender_that_dies_between_two_buckets() -> None:
    scene = Scene()
    scene.sender.meet(scene.plan)
    scene.buffers(2)
    bucket = scene.plan.buckets[0]
    scene.sender.say(Announce(0, 1, 0, bucket.nbytes))
    assert scene.sender.hear(Ack) == Ack(0)
    scene.sender.close()
    scene.thread.join(HANG_S)
    assert isinstance(scene.receiver.error, Aborted)
    assert scene.receiver.error.code == "peer_lost"
    assert scene.receiver.progress == [bucket.nbytes]
    scene.hub.close()


# both ends of an update


def test_with_digests_of_every_bucket() -> None:
    sender, hub = SharedMemorySender(digests=True), SharedMemoryHub()
    good(Transfer(sender, [hub], tensors(), bucket_bytes=2048).run())
    sender.close()
    hub.close()


def test_a_buffer_that_was_not_asked_for_is_not_sent() -> None:
    """The third bucket lies where the first may still be read."""
    with ends() as (sender, _hubs):
        held = Stranger(sender.address).says(Hello(sender.session, 0, 1, release=RELEASE)).says(b'{"kind": "answer"}')
        plan = StreamPlan(specs_of(tensors()), 1024)
        sender.open(offer_of(sender, seats_for(1)), plan, HANG_S)
        for bucket in plan.buckets[:2]:
            sender.buffer(bucket, HANG_S)
            sender.send(bucket, HANG_S)
        with refused("stream_mismatch"):
            sender.send(plan.buckets[2], HANG_S)
        assert isinstance(held.hears()[-1], Goodbye)


@pytest.mark.slow
def test_a_receiver_that_waits_for_another_one_is_not_the_one_to_blame() -> None:
    """Its patience is shorter than the sender's: it is told that the sender is the one who waits."""
    sender, hubs = SharedMemorySender(patience_s=3.0), [SharedMemoryHub(), SharedMemoryHub()]
    held, stuck = HeldSender(sender, 2, then_s=7.0), threading.Event()
    update = Transfer(held, hubs, tensors(), bucket_bytes=1024, seats=seats_for(1, 1))
    update.receivers[0].waiting(held.release, 2)
    update.receivers[1].take = lambda _chunk, _data: (stuck.wait(HANG_S), None)[1]
    update.start()
    update.join_sender()
    stuck.set()
    update.join()
    assert isinstance(update.sender_error, Aborted)
    assert [(f.code, f.replica, f.rank) for f in update.sender_error.failures] == [("peer_timeout", "r1", 0)]
    sender.close()
    for hub in hubs:
        hub.close()


def test_an_abort_wakes_a_sender_that_waits_for_receivers() -> None:
    with ends() as (sender, hubs):
        before = sender.session
        update = Transfer(sender, hubs, tensors())
        update.start(absent=(0,))
        until(lambda: sender._round is not None)
        sender.abort("enough")
        update.join()
        assert isinstance(update.sender_error, Aborted)
        assert (update.sender_error.code, sender.session != before) == ("client_abort", True)
        good(Transfer(sender, hubs, tensors(2)).run())


def test_who_comes_late_for_an_ended_session_knows_at_once() -> None:
    with ends() as (sender, hubs):
        offer = offer_of(sender, seats_for(1))
        sender.finish(1.0, normal=False)
        late = Receiving(hubs[0], manifest_of(specs_of(tensors())))
        late.start(offer, 0).join(HANG_S)
        assert isinstance(late.error, Aborted)
        assert late.error.code == "peer_lost"


def test_an_abort_between_updates_voids_the_offer_that_was_made() -> None:
    with ends() as (sender, hubs):
        offer = offer_of(sender, seats_for(1))
        sender.abort("the lease is over")
        with refused("client_abort"):
            sender.open(offer, StreamPlan(specs_of(tensors()), 1024), 5.0)
        good(Transfer(sender, hubs, tensors()).run())


def test_what_a_dead_sender_had_shared_is_given_back_without_another_update() -> None:
    with ends() as (sender, hubs):
        good(Transfer(sender, hubs, tensors()).run())
        assert "r--s" in mappings()
        sender.close()
        until(lambda: mappings() == [])


def test_an_update_that_ends_badly_leaves_no_mapping_on_either_side() -> None:
    with ends(2) as (sender, hubs):
        good(Transfer(sender, hubs, tensors()).run())
        update = Transfer(sender, hubs, tensors(2), bucket_bytes=1024)
        stopped = threading.Event()
        update.receivers[1].take = lambda _chunk, _data: stopped.set()
        update.receivers[1].should_stop = stopped.is_set
        update.run()
        assert isinstance(update.sender_error, Aborted)
        for receiver in update.receivers:
            receiver.error = None
        update.sender_error = None
        gc.collect()
        assert mappings() == []


@pytest.mark.slow
def test_two_hundred_updates_leave_nothing_behind() -> None:
    """Descriptors, threads, mappings, /dev/shm and resident memory stay what they were after the first few."""
    held = tensors(rows=400)
    with ends(2) as (sender, hubs):

        def levels() -> tuple[int, int, int, int]:
            named = Path("/proc/self/maps").read_text().count("/dev/shm/")
            return open_files(), threading.active_count(), len(mappings()), named

        for _ in range(5):
            good(Transfer(sender, hubs, held, bucket_bytes=1 << 16).run())
        before, resident = levels(), _resident()
        for _ in range(195):
            update = Transfer(sender, hubs, held, bucket_bytes=1 << 16).run()
            assert (update.sender_error, [each.error for each in update.receivers]) == (None, [None, None])
        good(Transfer(sender, hubs, held, bucket_bytes=1 << 16).run())
        # What other tests of this process left to end may have ended meanwhile.
        assert all(now <= then for now, then in zip(levels(), before, strict=True)), (levels(), before)
        assert _resident() - resident < 16 << 20
    assert mappings() == []


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


class Unwatched(SharedMemoryHub):
    """Its thread that watches kept links never comes to look, as on a machine that is busy with something else."""

    def _watch(self) -> None:
        pass


def test_a_link_that_was_hung_up_while_it_was_kept_is_not_used_again() -> None:
    """The second update leaves the first receiver out; the third has it again."""
    sender, hubs = SharedMemorySender(), [Unwatched(), Unwatched()]
    try:
        for seed, some in enumerate((hubs, hubs[1:], hubs)):
            update = Transfer(sender, some, tensors(seed), seats=seats_for(*[1] * len(some), life=f"life{seed}"))
            update.deadline_s = 5.0
            update.run()
            assert (update.sender_error, [receiver.error for receiver in update.receivers]) == (
                None,
                [None] * len(some),
            )
    finally:
        sender.close()
        for hub in hubs:
            hub.close()
