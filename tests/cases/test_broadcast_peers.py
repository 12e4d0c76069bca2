"""Broadcast: the group, its buckets and its peers. What a push decides is in test_push_every_transport.py."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
import torch

from transports.broadcast import BroadcastHub, BroadcastSender
from transports.media.gloo import GlooGroup
from transports.stream import StreamSender
from transports.testing.source_contract import digests, noise
from transports.testing.transfer import Receiving, Transfer, manifest_of, offer_of, seats_for, specs_of
from updater.core.errors import LiveweightsError

pytestmark = pytest.mark.slow  # together, not each


def model(seed: int, tensors: int = 5) -> dict[str, torch.Tensor]:
    return {f"t{at}": noise("BF16", (16, 100), 100 * seed + at) for at in range(tensors)}


@contextmanager
def ends(receivers: int, patience_s: float = 30.0) -> Iterator[tuple[BroadcastSender, list[BroadcastHub]]]:
    sender, hubs = BroadcastSender(), [BroadcastHub(patience_s) for _ in range(receivers)]
    try:
        yield sender, hubs
    finally:
        for hub in hubs:
            hub.close()
        sender.close()


def good(sender: StreamSender, hubs: Sequence[BroadcastHub], seed: int = 9) -> None:
    done = Transfer(sender, hubs, model(seed)).run()
    assert done.sender_error is None
    assert [receiver.error for receiver in done.receivers] == [None] * len(hubs)
    assert all(digests(receiver.arrived) == digests(model(seed)) for receiver in done.receivers)


def code(error: BaseException | None) -> str:
    return error.code if isinstance(error, LiveweightsError) else repr(error)


def places(error: BaseException | None) -> list[tuple[str, str, int | None]]:
    assert isinstance(error, LiveweightsError)
    return [(failure.code, failure.replica, failure.rank) for failure in error.failures]


@pytest.mark.case("B086")
def test_a_sender_that_comes_late() -> None:
    """The receivers have waited for a good while before the sender opens; it still succeeds."""
    with ends(2) as (sender, hubs):
        late = Transfer(sender, hubs, model(1))
        waited = [receiver.waiting(threading.Event()) for receiver in late.receivers]
        offer = offer_of(sender, late.seats)
        threads = [receiver.start(offer, at) for at, receiver in enumerate(late.receivers)]
        assert all(event.wait(60) for event in waited)
        late.send(offer)
        for thread in threads:
            thread.join(60)
        assert late.sender_error is None
        assert [receiver.error for receiver in late.receivers] == [None, None]


@pytest.mark.case("B088")
def test_one_rank_is_given_an_address_where_nobody_is() -> None:
    """It says so at once, with the address; the sender and the other rank name it within their time."""
    unused = socket.socket()
    unused.bind(("127.0.0.1", 0))  # taken, so that no other process listens there, and not listening itself
    nowhere = f"127.0.0.1:{unused.getsockname()[1]}"
    with unused, ends(2) as (sender, hubs):
        update = Transfer(sender, hubs, model(1), seats=seats_for(1, 1), deadline_s=1.5)
        lost = Receiving(hubs[1], manifest_of(specs_of(model(1))))
        lost.start(replace(offer_of(sender, update.seats), address=nowhere), 1).join(60)
        assert isinstance(lost.error, LiveweightsError)
        assert lost.error.code == "peer_lost"
        assert nowhere in lost.error.failures[0].message
        update.run(absent=[1], gathered=True)
        assert places(update.sender_error) == [("peer_timeout", "r1", 0)]
        assert places(update.receivers[0].error) == [("peer_lost", "r1", 0)]
        good(sender, hubs)


@pytest.mark.case("B092")
def test_two_senders_whose_receivers_come_in_opposite_order() -> None:
    """Each receiver waits at another sender. The one whose time is over first says who is missing, lets its receiver
    go, and the other one succeeds. (A coordinator runs one update at a time, so that this does not come up.)
    """
    with ends(2) as (first, (one, two)), ends(0) as (second, _):
        early = Transfer(first, [one, two], model(1), seats=seats_for(1, 1), deadline_s=1.0)
        late = Transfer(second, [one, two], model(2), seats=seats_for(1, 1))
        offer = offer_of(second, late.seats)
        sending = threading.Thread(target=late.send, args=(offer,))
        sending.start()
        other = late.receivers[1].start(offer, 1)  # `two` begins at the second sender
        early.run(absent=[1], gathered=True)  # `one` at the first
        assert places(early.sender_error) == [("peer_timeout", "r1", 0)]
        assert places(early.receivers[0].error) == [("peer_lost", "r1", 0)]
        for thread in (late.receivers[0].start(offer, 0), other, sending):
            thread.join(60)
        assert late.sender_error is None
        assert all(digests(receiver.arrived) == digests(model(2)) for receiver in late.receivers)


class Spoilt(Exception):
    pass


class SpoiltSender(BroadcastSender):
    """Raises once, in one of its verbs."""

    def __init__(self, verb: str) -> None:
        super().__init__()
        self.verb = verb

    def _maybe(self, verb: str) -> None:
        if verb == self.verb:
            self.verb = ""
            raise Spoilt(verb)

    def open(self, *args, **options) -> None:  # type: ignore[no-untyped-def]
        self._maybe("open")
        super().open(*args, **options)
        self._maybe("opened")

    def buffer(self, *args, **options) -> torch.Tensor:  # type: ignore[no-untyped-def]
        self._maybe("buffer")
        return super().buffer(*args, **options)

    def send(self, *args, **options) -> None:  # type: ignore[no-untyped-def]
        super().send(*args, **options)
        self._maybe("send")

    def finish(self, *args, **options) -> None:  # type: ignore[no-untyped-def]
        self._maybe("finish")
        super().finish(*args, **options)


@pytest.mark.case("B095")
@pytest.mark.parametrize("verb", ["open", "opened", "buffer", "send", "finish"])
def test_after_a_failure_in_any_phase_the_next_update_is_good(verb: str) -> None:
    hubs, sender = [BroadcastHub(30.0), BroadcastHub(30.0)], SpoiltSender(verb)
    try:
        update = Transfer(sender, hubs, model(1), raises=Spoilt).run()
        assert isinstance(update.sender_error, Spoilt)
        assert [code(receiver.error) for receiver in update.receivers] == ["peer_lost"] * 2
        good(sender, hubs)
    finally:
        for end in (sender, *hubs):
            end.close()


@pytest.mark.case("B098")
def test_the_cuts_come_from_the_senders_plan() -> None:
    """A receiver has no bucket size of its own: what is kept from an update with other cuts does not matter."""
    with ends(1) as (sender, hubs):
        for bucket_bytes in (64 << 10, 48 << 10, 1 << 10, 64 << 10):
            update = Transfer(sender, hubs, model(3), bucket_bytes=bucket_bytes).run()
            assert update.sender_error is None
            assert digests(update.receivers[0].arrived) == digests(model(3))


@pytest.mark.case("B099")
def test_a_slow_reader_and_a_sender_that_spoils_its_memory_at_once() -> None:
    """Five updates over one line and one group: what was received is what was sent, though the tensors are gone."""
    with ends(2) as (sender, hubs):
        for at in range(5):
            tensors = model(at)
            wanted = digests(tensors)
            update = Transfer(sender, hubs, tensors)
            update.receivers[1].take = lambda _chunk, _data: heavy()
            sending = threading.Thread(target=lambda: spoil_after(update))  # noqa: B023
            offer = offer_of(sender, update.seats)
            threads = [receiver.start(offer, n) for n, receiver in enumerate(update.receivers)]
            sending.start()
            for thread in (*threads, sending):
                thread.join(60)
            assert update.sender_error is None
            assert [digests(receiver.arrived) for receiver in update.receivers] == [wanted, wanted]


def heavy() -> None:
    torch.ones(200, 200) @ torch.ones(200, 200)


def spoil_after(update: Transfer) -> None:
    update.send(offer_of(update.sender, update.seats))
    for tensor in update.tensors.values():
        tensor.view(torch.uint8).fill_(0xAB)


class Stubborn(GlooGroup):
    """Ends, and says that it did not."""

    ended = 0

    def close(self) -> None:
        super().close()
        type(self).ended += 1
        raise RuntimeError("cannot be destroyed")


@pytest.mark.case("B108")
def test_a_group_that_cannot_be_destroyed_is_left_alone() -> None:
    """Its name never comes back, so nothing meets it; closing again is quiet."""
    sender, hubs = BroadcastSender(make_group=Stubborn), [BroadcastHub(30.0)]
    try:
        for life in ("a", "b", "c"):
            update = Transfer(sender, hubs, model(1), seats=seats_for(1, life=life)).run()
            assert update.sender_error is None
            assert update.receivers[0].error is None
        assert Stubborn.ended == 2
        sender.close()
        sender.close()
        assert Stubborn.ended == 3
    finally:
        for end in (sender, *hubs):
            end.close()


@pytest.mark.case("B108")
def test_fifty_groups_leave_no_port_behind() -> None:
    with ends(1) as (sender, hubs):
        counts = []
        for at in range(50):
            update = Transfer(sender, hubs, model(1, 1), seats=seats_for(1, life=f"life{at}")).run()
            assert update.sender_error is None
            counts.append(len(os.listdir("/proc/self/fd")))
        assert counts[49] <= counts[2]


def test_bytes_that_change_on_the_way_are_found_there() -> None:
    """Digests of buckets name the rank on whose way it happened; without them the vote sees it, and not where."""
    for found in (True, False):
        sender = BroadcastSender(digests=found, make_group=Flipping)
        hubs = [BroadcastHub(30.0), BroadcastHub(30.0)]
        try:
            update = Transfer(sender, hubs, model(1), seats=seats_for(1, 1)).run()
            if found:
                assert {code(receiver.error) for receiver in update.receivers} <= {"tensor_digest", "peer_lost"}
                assert "tensor_digest" in code(update.sender_error)
            else:
                assert update.sender_error is None
                assert all(digests(receiver.arrived) != digests(model(1)) for receiver in update.receivers)
        finally:
            for end in (sender, *hubs):
                with suppress(LiveweightsError):
                    end.close()


class Flipping(GlooGroup):
    """Sends the third bucket with one bit changed."""

    count = 0

    def broadcast(self, data, notify):  # type: ignore[no-untyped-def]
        self.count += 1
        if self.count == 3:
            data[77] ^= 0x10
        return super().broadcast(data, notify)
