"""What lies below the suite for shared memory: sealed buffers, and what is left over of them."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from transports.buckets import StreamPlan
from transports.media import memfd
from transports.shared_memory import SharedMemoryHub, SharedMemorySender
from transports.stream.addresses import UnixListener, dial_unix
from transports.stream.connection import Connection, ConnectionClosed, wait
from transports.stream.messages import Buffers, Close, FileBuffer, Go, Ready
from transports.testing import refused
from transports.testing.source_contract import digests, noise
from transports.testing.stream_ends import ScriptedSender
from transports.testing.transfer import Receiving, Transfer, manifest_of, seats_for, specs_of
from updater.core.errors import Aborted, LiveweightsError
from updater.core.participant import StreamOffer

HANG_S = 60.0
#: Abstract names are the machine's: another run of these tests has others.
NAME = f"@liveweights-{os.getpid()}"


def tensors(seed: int = 1, rows: int = 40) -> dict[str, torch.Tensor]:
    return {f"t{at}": noise("BF16", (rows, 100), 10 * seed + at) for at in range(4)}


def mapped_lines() -> set[str]:
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if memfd.NAME in line}


_EARLIER: set[str] = set()


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
    with refused("transport_unsupported"):
        UnixListener(sender.address)
    good(Transfer(sender, [hub], tensors()).run())
    sender.finish(1.0, normal=False)
    assert list(tmp_path.iterdir()) == []
    good(Transfer(sender, [hub], tensors()).run())
    assert (sender.address != str(path), len(list(tmp_path.iterdir()))) == (True, 1)
    sender.close()
    hub.close()
    assert list(tmp_path.iterdir()) == []


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
    here, there = (Connection(each, 1 << 10) for each in socket.socketpair(socket.AF_UNIX))
    held = memory_files("self")
    listener, file = UnixListener(f"{NAME}-forked"), memfd.SealedFile(1 << 16)
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
        with pytest.raises(ConnectionClosed):
            there.messages()
        listener.close()
        with refused("peer_lost"):
            dial_unix(listener.address, time.monotonic() + 1.0, lambda: None)
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
        goodbye = self.sender.hear(Close)
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
    ("go", "code"),
    [
        (Go(1, 1000), "stream_mismatch"),
        (Go(0, 999), "stream_mismatch"),
        (Go(0, 0, buffer=1), "stream_mismatch"),
        (Go(0, 0, offset=1024), "stream_mismatch"),
        (Go(0, 0, "0123456789abcdef"), "tensor_digest"),
    ],
)
def test_a_bucket_that_is_not_the_next_or_not_there_is_refused(go: Go, code: str) -> None:
    scene = Scene()
    scene.sender.meet(scene.plan)
    scene.buffers()
    assert scene.sender.hear(Ready) == Ready(0)
    scene.sender.say(replace(go, nbytes=go.nbytes or scene.plan.buckets[0].nbytes))
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


def test_a_sender_that_dies_between_two_buckets() -> None:
    scene = Scene()
    scene.sender.meet(scene.plan)
    scene.buffers(2)
    bucket = scene.plan.buckets[0]
    scene.sender.say(Go(0, bucket.nbytes, buffer=1))
    assert [scene.sender.hear(Ready) for _ in range(2)] == [Ready(0), Ready(1)]
    scene.sender.close()
    scene.thread.join(HANG_S)
    assert isinstance(scene.receiver.error, Aborted)
    assert scene.receiver.error.code == "peer_lost"
    assert scene.receiver.progress == [bucket.nbytes]
    scene.hub.close()


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
