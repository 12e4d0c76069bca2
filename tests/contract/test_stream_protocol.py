"""What lies below the suite, over each medium: who is let in, messages that are none, who is named, who dials."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from transports.broadcast import BroadcastHub, BroadcastSender
from transports.buckets import StreamPlan
from transports.media import memfd
from transports.media.sealed_memory import SealedMemoryReceiver
from transports.shared_memory import SharedMemoryHub, SharedMemorySender
from transports.stream import pack
from transports.stream.connection import RECEIVER_LIMIT, SENDER_LIMIT, Connection
from transports.stream.messages import Agreed, Buffers, Close, End, FileBuffer, Go, Key, Ready, encode
from transports.stream.receiver import MediumHub
from transports.stream.sender import MediumSender
from transports.stream.sender_session import Peer
from transports.testing import refused
from transports.testing.source_contract import digests, noise
from transports.testing.stream_ends import ScriptedReceiver, ScriptedSender
from transports.testing.transfer import (
    HeldSender,
    Receiving,
    Transfer,
    manifest_of,
    offer_of,
    seats_for,
    specs_of,
)
from updater.core.errors import Aborted, LiveweightsError
from updater.core.participant import StreamOffer
from updater.core.release import RELEASE
from updater.protocol.manifest import TensorSpec

HANG_S = 60.0


@dataclass(frozen=True)
class Medium:
    """How both ends are made."""

    kind: str
    sender: Callable[..., MediumSender]
    hub: Callable[..., MediumHub]


MEDIA = (
    Medium("shared_memory", SharedMemorySender, SharedMemoryHub),
    Medium("broadcast", BroadcastSender, BroadcastHub),
)
SHARED_MEMORY, BROADCAST = MEDIA


@pytest.fixture(params=MEDIA, ids=lambda each: each.kind)
def medium(request: pytest.FixtureRequest) -> Medium:
    found: Medium = request.param
    return found


def tensors(seed: int = 1) -> dict[str, torch.Tensor]:
    """A bucket of 1 KiB each."""
    return {f"t{at}": noise("BF16", (8, 64), 10 * seed + at) for at in range(8)}


@contextmanager
def ends(medium: Medium, count: int = 1, **options: Any) -> Iterator[tuple[MediumSender, list[MediumHub]]]:
    sender, hubs = medium.sender(**options), [medium.hub() for _ in range(count)]
    try:
        yield sender, hubs
    finally:
        sender.close()
        for hub in hubs:
            hub.close()


def good(update: Transfer) -> None:
    assert (update.sender_error, [each.error for each in update.receivers]) == (None, [None] * len(update.receivers))
    assert all(digests(each.arrived) == digests(dict(update.tensors)) for each in update.receivers)


def code(error: BaseException | None) -> str:
    return error.code if isinstance(error, LiveweightsError) else repr(error)


def places(error: BaseException | None) -> list[tuple[str, str, int | None]]:
    assert isinstance(error, LiveweightsError)
    return [(failure.code, failure.replica, failure.rank) for failure in error.failures]


def stranger(sender: MediumSender) -> ScriptedReceiver:
    """One that knows the offer of `sender` to a single rank."""
    return ScriptedReceiver(offer_of(sender, seats_for(1)))


# who is let in


def test_strangers_are_turned_away_and_the_update_goes_on(medium: Medium) -> None:
    with ends(medium) as (sender, hubs):
        odd = [
            stranger(sender).hello(session="another"),
            stranger(sender).hello(seats="others"),
            stranger(sender).hello(1),
            stranger(sender).says(b"\xff\xfe not JSON"),
            stranger(sender).says(b"{}"),
            stranger(sender).says(Ready(0)),
            stranger(sender).says(Close()),
            stranger(sender),
        ]
        huge = stranger(sender)
        os.write(huge.connection.fileno(), b"\xff\xff\xff\xff")
        good(Transfer(sender, hubs, tensors(), seats=seats_for(1)).run())
        for each in (*odd, huge):
            (told,) = each.hear_all()
            assert isinstance(told, Close)
            assert [failure.code for failure in told.failures] == ["peer_lost"]


@pytest.mark.case("F60")
@pytest.mark.parametrize("other", [{"release": ""}, {"release": "9.9.9"}, {"release": RELEASE, "protocol": 99}])
def test_a_receiver_of_another_release_is_named(medium: Medium, other: dict[str, Any]) -> None:
    with ends(medium, 0) as (sender, _):
        _named_as_other(sender, stranger(sender).hello(**other), other["release"] or "0.1.0")


#: As 0.1.0 and what came after it said hello, over either protocol.
HELLOS = (
    {"number": 0, "seats": "s", "held": "", "device": "", "protocol": 1},
    {"number": 0, "pid": 7, "devices": [], "handle_format": 0, "runtime": "torch 2.9", "protocol": 1},
    {"number": 0, "seats": "s", "held": "", "device": "", "release": "", "protocol": 2},
    {"number": 0, "pid": 7, "devices": [], "handle_format": 0, "runtime": "", "release": "", "protocol": 2},
)


@pytest.mark.case("F60")
@pytest.mark.parametrize("hello", HELLOS)
def test_a_receiver_of_an_older_protocol_is_named(medium: Medium, hello: dict[str, Any]) -> None:
    with ends(medium, 0) as (sender, _):
        said = json.dumps(hello | {"kind": "hello", "session": sender.session}).encode()
        _named_as_other(sender, stranger(sender).says(said), "0.1.0")


def _named_as_other(sender: MediumSender, odd: ScriptedReceiver, theirs: str) -> None:
    update = Transfer(sender, [], tensors(), seats=seats_for(1)).run()
    assert isinstance(odd.hear_all()[-1], Close)
    assert isinstance(update.sender_error, Aborted)
    (failure,) = update.sender_error.failures
    assert (failure.code, failure.replica) == ("release_mismatch", "r0")
    assert {RELEASE, theirs} <= set(failure.message.replace(",", "").split())
    assert failure.hint


def test_a_seat_is_taken_once(medium: Medium) -> None:
    with ends(medium) as (sender, hubs):
        first = stranger(sender).hello()
        update = Transfer(sender, hubs, tensors(), deadline_s=1.0).run()
        assert code(update.receivers[0].error) == "peer_lost"
        assert places(update.sender_error) == [("peer_timeout", "r0", 0)]
        first.close()
        good(Transfer(sender, hubs, tensors(2)).run())


# messages that are none


@pytest.mark.parametrize(
    "frame",
    [
        b"[]",
        b"{",
        b"null",
        b'{"kind": "eval", "taken": 0}',
        b'{"kind": "ready"}',
        b'{"kind": "ready", "taken": "0"}',
        b'{"kind": "ready", "taken": -1}',
        b'{"kind": "ready", "taken": 0, "more": 1}',
        encode(Go(0, 1)),
        encode(Ready(1)),
        encode(Agreed()),
    ],
)
@pytest.mark.parametrize("answered", [True, False])
def test_a_receiver_that_says_what_it_should_not_is_named(medium: Medium, frame: bytes, answered: bool) -> None:
    with ends(medium, 0) as (sender, _):
        odd = stranger(sender)
        talking = odd.joins(frame) if answered else None
        if talking is None:
            odd.hello().say(frame)
        update = Transfer(sender, [], tensors(), seats=seats_for(1)).run()
        if talking is not None:
            talking.join(HANG_S)
        assert places(update.sender_error) == [("stream_mismatch", "r0", 0)]
        assert isinstance(odd.hear_all()[-1], Close)


@pytest.mark.parametrize("message", [Ready(2), Key("store", "00")], ids=repr)
def test_a_bucket_cannot_be_left_out_and_memory_has_no_keys(message: Ready | Key) -> None:
    with ends(SHARED_MEMORY, 0) as (sender, _):
        odd = stranger(sender)
        talking = odd.joins(*[Ready(0)] * isinstance(message, Ready), message)
        update = Transfer(sender, [], tensors(), seats=seats_for(1)).run()
        talking.join(HANG_S)
        assert places(update.sender_error) == [("stream_mismatch", "r0", 0)]
        assert isinstance(odd.hear_all()[-1], Close)


def test_what_was_not_sent_is_not_put_away() -> None:
    with ends(SHARED_MEMORY, 0) as (sender, _):
        peer = Peer(stranger(sender).connection, answered=True)
        assert peer.note(Ready(0))
        assert not peer.note(Ready(1))
        peer.sent = 1
        assert peer.note(Ready(1))
        peer.connection.close()


def receiving(
    medium: Medium, patience_s: float | None = None
) -> tuple[ScriptedSender, Receiving, MediumHub, threading.Thread, StreamPlan]:
    plan, sender, hub = (
        StreamPlan(specs_of(tensors()), 1024),
        ScriptedSender(medium.kind),
        medium.hub(patience_s=patience_s),
    )
    receiver = Receiving(hub, manifest_of(plan.tensors))
    offer = StreamOffer(medium.kind, sender.address, sender.session, seats_for(1))  # type: ignore[arg-type]
    return sender, receiver, hub, receiver.start(offer, 0), plan


@pytest.mark.parametrize("saying", [b"[]", encode(Ready(0)), encode(End(0)), b'{"kind": "opening"}'])
def test_a_sender_that_talks_nonsense(medium: Medium, saying: bytes) -> None:
    sender, receiver, hub, thread, _ = receiving(medium)
    sender.admit()
    sender.say(saying)
    thread.join(HANG_S)
    assert code(receiver.error) == "stream_mismatch"
    sender.close()
    hub.close()


@pytest.mark.case("B098")
def test_a_sender_that_cuts_in_another_way_is_refused_before_the_first_byte(medium: Medium) -> None:
    sender, receiver, hub, thread, plan = receiving(medium)
    sender.opens(plan, digest="0" * 64)
    assert [failure.code for failure in sender.hear(Close).failures] == ["stream_mismatch"]
    thread.join(HANG_S)
    assert (code(receiver.error), receiver.progress) == ("stream_mismatch", [])
    sender.close()
    hub.close()


@pytest.mark.case("F45")
def test_a_plan_that_nothing_could_cut_is_refused_at_once(medium: Medium) -> None:
    """To cut this one would take for ever: it is judged before that."""
    sender, receiver, hub, thread, _ = receiving(medium)
    sender.opens(StreamPlan((TensorSpec("w", "F32", (1 << 60,)),), 1024), digest="0" * 64)
    assert {failure.code for failure in sender.hear(Close).failures} == {"stream_mismatch"}
    thread.join(HANG_S)
    assert code(receiver.error) == "stream_mismatch"
    sender.close()
    hub.close()


@pytest.mark.case("F45")
@pytest.mark.parametrize(("own_s", "told_s"), [(None, 0.3), (HANG_S, 0.3), (0.3, HANG_S)])
def test_a_receiver_waits_no_longer_than_the_shorter_patience(
    medium: Medium, own_s: float | None, told_s: float
) -> None:
    sender, receiver, hub, thread, plan = receiving(medium, own_s)
    began = time.monotonic()
    sender.opens(plan, patience_s=told_s)
    thread.join(HANG_S)
    assert code(receiver.error) == "peer_timeout"
    assert time.monotonic() - began < HANG_S / 2
    sender.close()
    hub.close()


# both ends of an update


def test_with_digests_of_every_bucket(medium: Medium) -> None:
    with ends(medium, digests=True) as (sender, hubs):
        good(Transfer(sender, hubs, tensors(), bucket_bytes=2048).run())


def test_a_bucket_for_which_no_room_was_asked_is_not_sent(medium: Medium) -> None:
    """Its buffer may still be read, or be on its way."""
    with ends(medium) as (sender, hubs):
        update = Transfer(sender, hubs, tensors(), bucket_bytes=1024)
        assert update.plan is not None
        offer = offer_of(sender, update.seats)
        thread = update.receivers[0].start(offer, 0)
        sender.open(offer, update.plan, HANG_S)
        sender.buffer(update.plan.buckets[0], HANG_S)
        sender.send(update.plan.buckets[0], HANG_S)
        with refused("stream_mismatch"):
            sender.send(update.plan.buckets[1], HANG_S)
        thread.join(HANG_S)
        assert code(update.receivers[0].error) in ("stream_mismatch", "peer_lost")


@pytest.mark.slow
def test_a_receiver_that_waits_for_another_one_is_not_the_one_to_blame(medium: Medium) -> None:
    """Its patience is shorter than the sender's: it is told that the sender is the one that waits."""
    with ends(medium, 2, patience_s=3.0) as (sender, hubs):
        held, stuck = HeldSender(sender, 4, then_s=7.0), threading.Event()
        update = Transfer(held, hubs, tensors(), bucket_bytes=1024, seats=seats_for(1, 1))
        update.receivers[0].waiting(held.release, 3)
        update.receivers[1].take = lambda chunk, _data: (chunk.name == "t2" and stuck.wait(HANG_S), None)[1]
        update.start()
        update.join_sender()
        stuck.set()
        update.join()
        assert places(update.sender_error) == [("peer_timeout", "r1", 0)]


def test_an_abort_wakes_a_sender_that_waits_for_receivers(medium: Medium) -> None:
    with ends(medium) as (sender, hubs):
        before = sender.session
        update = Transfer(sender, hubs, tensors())
        update.start(absent=(0,))
        limit = time.monotonic() + HANG_S
        while not sender.sending:
            assert time.monotonic() < limit
            threading.Event().wait(0.005)
        sender.abort("enough")
        update.join()
        assert (code(update.sender_error), sender.session != before) == ("client_abort", True)
        good(Transfer(sender, hubs, tensors(2)).run())


def test_a_receiver_that_is_late_for_an_ended_session_knows_at_once(medium: Medium) -> None:
    with ends(medium) as (sender, hubs):
        offer = offer_of(sender, seats_for(1))
        sender.finish(1.0, normal=False)
        late = Receiving(hubs[0], manifest_of(specs_of(tensors())))
        late.start(offer, 0).join(HANG_S)
        assert code(late.error) == "peer_lost"


def test_an_abort_between_updates_voids_the_offer_that_was_made(medium: Medium) -> None:
    with ends(medium) as (sender, hubs):
        offer = offer_of(sender, seats_for(1))
        sender.abort("the lease is over")
        with refused("client_abort"):
            sender.open(offer, StreamPlan(specs_of(tensors()), 1024), 5.0)
        good(Transfer(sender, hubs, tensors()).run())


class _Unwatched:
    """Its thread that watches kept links never comes to look, as on a machine that is busy with something else."""

    def _watch(self) -> None:
        pass


class UnwatchedMemory(_Unwatched, SharedMemoryHub):
    pass


class UnwatchedBroadcast(_Unwatched, BroadcastHub):
    pass


@pytest.mark.parametrize("unwatched", [UnwatchedMemory, UnwatchedBroadcast])
def test_a_link_that_was_hung_up_while_it_was_kept_is_not_used_again(unwatched: Callable[[], MediumHub]) -> None:
    """The second update leaves the first receiver out; the third has it again."""
    medium = SHARED_MEMORY if unwatched is UnwatchedMemory else BROADCAST
    with ends(medium, 0) as (sender, _):
        hubs = [unwatched(), unwatched()]
        for seed, some in enumerate((hubs, hubs[1:], hubs)):
            seats = seats_for(*[1] * len(some), life=f"life{seed}")
            good(Transfer(sender, some, tensors(seed), seats=seats, deadline_s=5.0).run())
        for hub in hubs:
            hub.close()


# what the next media need


def test_every_receiver_may_have_a_plan_of_its_own() -> None:
    """Over memory that is lent: two plans in turns, of other tensors and of other lengths, through two buffers."""
    held = tensors()
    specs = specs_of(held)
    plans = {0: StreamPlan(specs[:3], 1024), 1: StreamPlan(specs[3:], 1024)}
    by_name = {spec.name: spec for spec in specs}
    with ends(SHARED_MEMORY, 2) as (sender, hubs):
        offer = offer_of(sender, seats_for(2))
        receivers = [Receiving(hub, manifest_of(plans[at].tensors)) for at, hub in enumerate(hubs)]
        threads = [receiver.start(offer, at) for at, receiver in enumerate(receivers)]
        sender.open(offer, plans, HANG_S)
        turns = [plans[1].buckets[0], *plans[0].buckets, *plans[1].buckets[1:]]
        for bucket in turns:
            pack(bucket, sender.buffer(bucket, HANG_S), held, by_name)
            sender.send(bucket, HANG_S)
        sender.finish(HANG_S, normal=True)
        for thread in threads:
            thread.join(HANG_S)
        assert [receiver.error for receiver in receivers] == [None, None]
        for at, receiver in enumerate(receivers):
            assert digests(receiver.arrived) == digests({s.name: held[s.name] for s in plans[at].tensors})


def test_plans_that_differ_are_refused_where_every_receiver_gets_the_same() -> None:
    plans = {at: StreamPlan(specs_of(tensors())[at:], 1024) for at in range(2)}
    with ends(BROADCAST, 0) as (sender, _), refused("stream_mismatch"):
        sender.open(offer_of(sender, seats_for(2)), plans, 5.0)


def test_a_receiver_that_was_dialled_is_fed_without_our_sender() -> None:
    """Over a connection that neither side asked for, by a few messages and one file."""
    held = {"t": noise("BF16", (8, 64), 1)}
    plan, file = StreamPlan(specs_of(held), 1024), memfd.SealedFile(1024)
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    feed = ScriptedSender(connection=Connection(theirs, RECEIVER_LIMIT))
    hub = MediumHub(SealedMemoryReceiver, lambda *_: Connection(ours, SENDER_LIMIT), HANG_S)
    receiver = Receiving(hub, manifest_of(plan.tensors))
    thread = receiver.start(StreamOffer("shared_memory", "@", "s", seats_for(1)), 0)
    feed.meet(plan)
    feed.say(Buffers((FileBuffer(1024),)), (file.number,))
    assert feed.hear(Ready) == Ready(0)
    assert file.tensor is not None
    file.tensor[:1024] = held["t"].view(torch.uint8).flatten()
    feed.say(Go(0, 1024))
    assert feed.hear(Ready) == Ready(1)
    feed.say(End(1))
    thread.join(HANG_S)
    assert receiver.error is None
    assert digests(receiver.arrived) == digests(held)
    for each in (feed, hub, file):
        each.close()
