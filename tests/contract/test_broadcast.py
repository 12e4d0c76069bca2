"""The stream suite over a broadcast."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from transports.broadcast import BroadcastHub, BroadcastSender
from transports.broadcast.groups import GlooGroup
from transports.broadcast.line import Line, accepted, join_address, listen, seats_digest, split_address
from transports.broadcast.messages import Done, Hello, Message, Ready, encode
from transports.broadcast.pending import Pending
from transports.broadcast.sender import refuse_shared_devices
from transports.buckets import Chunk
from transports.contract import digests, noise
from transports.control.channel import SENDER_LIMIT, wait
from transports.control.messages import Goodbye
from transports.stream_contract import StreamContract
from transports.stream_testing import HeldSender, Receiving, Transfer, manifest_of, offer_of, seats_for
from transports.testing import refused
from updater.core.errors import Aborted
from updater.core.participant import StreamOffer
from updater.core.release import RELEASE

pytestmark = pytest.mark.slow  # together, not each


class TestBroadcast(StreamContract):
    def sender(self) -> BroadcastSender:
        return BroadcastSender()

    def hub(self, stall_s: float) -> BroadcastHub:
        return BroadcastHub(patience_s=stall_s)


def call(sender: BroadcastSender) -> Line:
    host, port = split_address(sender.address)
    return Line(socket.create_connection((host, port)), SENDER_LIMIT)


def hear(line: Line) -> list[Message]:
    assert wait([line], 60)
    return line.messages()


def test_strangers_do_not_disturb_a_meeting() -> None:
    """Who says nothing, nonsense, or hello to something else is turned away, and the update goes on."""
    sender, hub = BroadcastSender(), BroadcastHub(30.0)
    seats = seats_for(1)
    offer = offer_of(sender, seats)
    right = Hello(sender.session, 0, seats_digest(offer), release=RELEASE)
    sayings = [
        b"{}",
        b"\x80\x04",
        encode(replace(right, session="another")),
        encode(replace(right, seats="another")),
        encode(replace(right, number=1)),
        encode(Ready(0)),
    ]
    strangers = [call(sender) for _ in sayings]
    for line, saying in zip(strangers, sayings, strict=True):
        line.post(saying)
    silent, huge = call(sender), socket.create_connection(split_address(sender.address))
    huge.sendall(b"\xff\xff\xff\xff")
    tensors = {"t": noise("BF16", (8, 8), 1)}
    try:
        update = Transfer(sender, [hub], tensors, seats=seats).run()
        assert (update.sender_error, update.receivers[0].error) == (None, None)
        assert digests(update.receivers[0].arrived) == digests(tensors)
        for line in strangers:
            (goodbye,) = hear(line)
            assert isinstance(goodbye, Goodbye)
            assert [failure.code for failure in goodbye.failures] == ["peer_lost"]
    finally:
        for end in (*strangers, silent, huge, hub, sender):
            end.close()


@pytest.mark.case("F60")
@pytest.mark.parametrize("other", [{"release": ""}, {"release": "9.9.9"}, {"release": RELEASE, "protocol": 99}])
def test_a_receiver_of_another_release_is_named(other: dict[str, Any]) -> None:
    sender, seats = BroadcastSender(), seats_for(1)
    line = call(sender)
    try:
        line.post(Hello(sender.session, 0, seats_digest(offer_of(sender, seats)), **other))
        update = Transfer(sender, [], {"t": noise("BF16", (8, 8), 1)}, seats=seats).run()
        assert isinstance(update.sender_error, Aborted)
        (failure,) = update.sender_error.failures
        assert (failure.code, failure.replica) == ("release_mismatch", "r0")
        assert {RELEASE, other["release"] or "0.1.0"} <= set(failure.message.replace(",", "").split())
        assert failure.hint
    finally:
        line.close()
        sender.close()


def test_a_receiver_that_talks_nonsense_after_hello_is_named() -> None:
    for saying in (b"{", encode(Ready(0)), encode(Done())):
        sender = BroadcastSender()
        seats = seats_for(1)
        offer = offer_of(sender, seats)
        line = call(sender)
        line.post(Hello(sender.session, 0, seats_digest(offer), release=RELEASE))
        line.post(saying)
        update = Transfer(sender, [], {"t": noise("BF16", (8, 8), 1)}, seats=seats).run()
        assert isinstance(update.sender_error, Aborted)
        assert [(each.code, each.replica) for each in update.sender_error.failures] == [("stream_mismatch", "r0")]
        line.close()
        sender.close()


def test_a_sender_that_talks_nonsense() -> None:
    for saying in (b"[]", encode(Done()), b'{"kind": "opening"}'):
        listener, hub = listen("127.0.0.1", 0), BroadcastHub(10.0)
        offer = StreamOffer("broadcast", f"127.0.0.1:{listener.getsockname()[1]}", "session", seats_for(1))
        receiver = Receiving(hub, manifest_of(()))
        thread = receiver.start(offer, 0)
        assert wait([listener], 60)
        (line,) = accepted(listener, SENDER_LIMIT)
        line.post(saying)
        thread.join(60)
        assert isinstance(receiver.error, Aborted)
        assert receiver.error.code == "stream_mismatch"
        for end in (line, listener, hub):
            end.close()


def test_a_backend_that_cannot_be_had_is_refused() -> None:
    with refused("transport_unsupported"):
        BroadcastSender(backend="carrier pigeon")
    if not torch.cuda.is_available():
        with refused("transport_unsupported"):
            BroadcastSender(backend="nccl")


@pytest.mark.case("F27")
def test_two_ranks_on_one_device_are_refused_for_nccl() -> None:
    offer = StreamOffer("broadcast", "127.0.0.1:1", "session", seats_for(2, 1))
    refuse_shared_devices(offer, "GPU-0", {0: "GPU-1", 1: "GPU-2", 2: "GPU-3"})
    with refused("transport_unsupported") as caught:
        refuse_shared_devices(offer, "GPU-0", {0: "GPU-1", 1: "GPU-0", 2: "GPU-1"})
    assert [(each.replica, each.rank) for each in caught[0].failures] == [("r0", 0), ("r0", 1), ("r1", 0)]
    assert "cuda_ipc" in caught[0].hint
    with refused("transport_unsupported"):
        refuse_shared_devices(offer, "GPU-0", {0: "GPU-1", 1: "", 2: "GPU-2"})


@pytest.mark.case("B204")
def test_addresses() -> None:
    for host in ("127.0.0.1", "::1", "trainer.example"):
        assert split_address(join_address(host, 70)) == (host, 70)
    for bad in ("", "x", ":1", "host:", "host:port"):
        with refused("peer_lost"):
            split_address(bad)


def model_of(buckets: int) -> dict[str, torch.Tensor]:
    """Tensors that fill a bucket of a kilobyte each."""
    return {f"t{at}": noise("BF16", (8, 64), at) for at in range(buckets)}


class Counting(GlooGroup):
    posted = 0

    def broadcast(self, data: torch.Tensor, notify: Callable[[], None]) -> Pending:
        type(self).posted += 1
        return super().broadcast(data, notify)


def test_nothing_is_posted_before_everybody_has_room() -> None:
    """One receiver stands still at the third bucket: the next one is under way, and no more are posted."""
    sender, hubs = BroadcastSender(make_group=Counting), [BroadcastHub(30.0), BroadcastHub(30.0)]
    held = HeldSender(sender, 4, then_s=0.5)  # patient until only the one that stands still has anything to do
    still, go_on, seen = threading.Event(), threading.Event(), []

    def stand_still(chunk: Chunk, _data: torch.Tensor) -> None:
        if chunk.name == "t2":
            still.set()
            go_on.wait(60)

    try:
        update = Transfer(held, hubs, model_of(8), bucket_bytes=1024)
        update.receivers[1].take = stand_still
        update.start()
        assert still.wait(60)
        held.release.set()
        update.join_sender()  # until its deadline
        seen.append(Counting.posted)
        go_on.set()
        update.join()
        assert seen == [4]
    finally:
        for end in (sender, *hubs):
            end.close()


def test_a_receiver_that_waits_for_another_one_is_not_the_one_to_blame() -> None:
    """Its patience is shorter than the sender's: it is told that the sender is the one who waits."""
    sender, hubs = BroadcastSender(patience_s=3.0), [BroadcastHub(), BroadcastHub()]
    held, stuck = HeldSender(sender, 4, then_s=7.0), threading.Event()
    update = Transfer(held, hubs, model_of(8), bucket_bytes=1024, seats=seats_for(1, 1))
    update.receivers[0].waiting(held.release, 3)
    update.receivers[1].take = lambda chunk, _data: (chunk.name == "t2" and stuck.wait(60), None)[1]
    try:
        update.start()
        update.join_sender()
        stuck.set()
        update.join()
        assert isinstance(update.sender_error, Aborted)
        assert [(f.code, f.replica, f.rank) for f in update.sender_error.failures] == [("peer_timeout", "r1", 0)]
    finally:
        for end in (sender, *hubs):
            end.close()
