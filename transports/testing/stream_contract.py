"""The conformance suite of a pushed stream: subclass it in a test module, supply a sender and a hub, and be green."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from transports.base import Box, Cancelled, Read, Source
from transports.buckets import StreamPlan
from transports.registry import Hub
from transports.stream import StreamSender
from transports.stream.messages import SIGN_S
from transports.testing.source_contract import TransportContract, digests, noise, samples
from transports.testing.takes import Failing, Lagging, RankFault, Slow, Stopping, Streamed, Stuck, close_all, raise_at
from transports.testing.transfer import (
    SENDER_FAULTS,
    FaultySender,
    HeldSender,
    Receiving,
    Transfer,
    manifest_of,
    offer_of,
    seats_for,
    specs_of,
)
from updater.core.errors import Aborted, LiveweightsError
from updater.protocol.manifest import TensorSpec

#: A patience that is to end: a peer that does right has nothing to do within it.
SHORT_S = 0.7
#: One within which others have to do their part: long for a busy machine, short enough to wait for.
MOMENT_S = 4.0
#: One that no peer comes to the end of.
LONG_S = 30.0


class PatientHub(Hub, Protocol):
    """`patience_s`: how long its receivers wait for a sender that gives no sign, from their next wait on."""

    patience_s: float | None


class StreamContract(TransportContract):
    """`sender` and `hub` make the two ends. What they make is closed by the suite."""

    differs = ("flip", "stale")

    def sender(self) -> StreamSender:
        raise NotImplementedError

    def hub(self, stall_s: float) -> PatientHub:
        """Its receivers give up when nothing came from a sender for `stall_s`."""
        raise NotImplementedError

    # -- the suite of every transport, over a sender in a thread and a second receiver in another

    def send(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors, self._fault = tensors, ("", "")

    def connect(self, folder: Path) -> Source:
        return Streamed(self.sender(), (self.hub(LONG_S), self.hub(LONG_S)), self._tensors, lambda: self._fault)

    def damage(self, folder: Path, kind: str, name: str) -> None:
        self._fault = (kind, name)

    # -- what only a stream can do, and what only it can suffer

    def test_every_rank_of_every_replica_gets_everything(self) -> None:
        tensors = samples() | {"large": noise("BF16", (40, 300), 3)}
        with self._ends(3) as (sender, hubs):
            done = Transfer(sender, hubs, tensors, seats=seats_for(1, 2)).run()
            self._good(done)
            plan = done.plan
            assert plan is not None
            assert len(plan.buckets) > 5
            for receiver in done.receivers:
                assert receiver.progress == [bucket.nbytes for bucket in plan.buckets]

    def test_updates_follow_one_another(self) -> None:
        """B099: a slow reader finds in each update what was sent in it, whatever the sender does with its memory."""
        with self._ends(2) as (sender, hubs):
            sessions = set()
            for at in range(4):
                update = Transfer(sender, hubs, _model(at))
                update.receivers[1].take = Slow(every=3)
                sessions.add(sender.session)
                self._good(update.run())
            assert sessions == {sender.session}

    def test_other_members_in_the_next_update(self) -> None:
        with self._ends(3) as (sender, hubs):
            for at, some in enumerate((hubs[:2], hubs, hubs[1:], hubs[:1])):
                self._good(
                    Transfer(sender, some, _model(at), seats=seats_for(*[1] * len(some), life=f"life{at}")).run()
                )

    def test_nothing_to_send(self) -> None:
        with self._ends(2) as (sender, hubs):
            self._good(Transfer(sender, hubs, {}).run())
            self._good(Transfer(sender, hubs, {"empty": torch.empty(0, 3), "none": torch.empty(4, 0)}).run())

    def test_packed_and_unknown_types_travel_as_bytes(self) -> None:
        """Types with several elements in a byte, also of a width that torch has no type for."""
        specs = (TensorSpec("f4", "F4", (6, 32)), TensorSpec("f6", "F6_E2M3", (5, 4)), TensorSpec("odd", "F4", (3, 3)))
        data = {spec.name: noise("U8", (spec.nbytes,), at) for at, spec in enumerate(specs)}
        with self._ends(1) as (sender, hubs):
            update = Transfer(sender, hubs, data, plan=StreamPlan(specs, 1024))
            targets = {spec.name: torch.zeros(spec.nbytes, dtype=torch.uint8) for spec in specs}
            shapes = {"f4": (6, 16), "f6": (5, 3), "odd": (5,)}
            update.receivers[0].manifest = manifest_of(specs)
            update.receivers[0].reads = [
                Read(spec.name, Box.whole(spec.shape), targets[spec.name].view(shapes[spec.name])) for spec in specs
            ]
            update.run()
            assert (update.sender_error, update.receivers[0].error) == (None, None)
            assert digests(targets) == digests(data)

    def test_a_sender_that_does_wrong(self) -> None:
        """Every fault is refused by all, or shows in the digest; the next update of the same ends is good."""
        hubs = [self.hub(LONG_S), self.hub(LONG_S)]
        try:
            for fault in SENDER_FAULTS:
                self._one_fault(fault, hubs)
        finally:
            close_all(hubs)

    def _one_fault(self, fault: str, hubs: Sequence[PatientHub]) -> None:
        sender = self.sender()
        try:
            faulty = FaultySender(sender, fault, "t2")
            before = sender.session
            _patient(hubs, SHORT_S if fault == "slow" else LONG_S)
            update = Transfer(faulty, hubs, _model(1), bucket_bytes=1024)
            update.start()
            if fault == "slow":
                update.join_receivers()
                faulty.release.set()
            update.join()
            _patient(hubs, LONG_S)
            if fault in self.differs:
                assert update.sender_error is None, fault
                assert [_wrong(r, update.tensors) for r in update.receivers] == [["t2"], ["t2"]], fault
            else:
                wanted = {"dead": {"peer_lost"}, "slow": {"peer_timeout", "peer_lost"}}.get(
                    fault, {"stream_mismatch", "peer_lost"}
                )
                codes = {_code(receiver.error) for receiver in update.receivers}
                assert codes <= wanted, (fault, codes)
                assert isinstance(update.sender_error, Aborted) or fault == "dead", fault
                assert sender.session != before or fault == "dead", fault
            if fault != "dead":
                self._good(Transfer(sender, hubs, _model(2)).run())
        finally:
            sender.close()

    def test_a_receiver_that_fails_is_named(self) -> None:
        """B090: its reason reaches the sender and the other receivers, at once; the next update is good."""
        with self._ends(3) as (sender, hubs):
            update = Transfer(sender, hubs, _model(1), bucket_bytes=1024, seats=seats_for(1, 2))
            update.receivers[2].take = raise_at("t3")
            update.run()
            assert isinstance(update.receivers[2].error, RankFault)
            # First: a sender that looks late may hear others as well, who gave up because of this one.
            assert _places(update.sender_error)[0] == ("peer_lost", "r1", 1)
            assert "t3" in str(update.sender_error)  # what it said
            assert [_code(update.receivers[at].error) for at in (0, 1)] == ["peer_lost", "peer_lost"]
            self._good(Transfer(sender, hubs, _model(2)).run())

    def test_a_receiver_that_is_too_slow_is_named(self) -> None:
        with self._ends(2) as (sender, hubs):
            held = HeldSender(sender, _first(_model(1), "t3") + 2, then_s=SHORT_S)
            update = Transfer(held, hubs, _model(1), bucket_bytes=1024, seats=seats_for(1, 1))
            slow = Stuck("t3")
            update.receivers[1].take = slow
            # The other one has said all that it can, before the sender's patience becomes short.
            update.receivers[0].waiting(held.release, _first(_model(1), "t3") + 1)
            update.start()
            update.join_sender()
            slow.release.set()
            update.join()
            assert _places(update.sender_error) == [("peer_timeout", "r1", 0)]
            assert [_code(receiver.error) for receiver in update.receivers] == ["peer_lost", "peer_lost"]
            self._good(Transfer(sender, hubs, _model(2)).run())

    def test_the_last_receiver_may_take_its_time(self) -> None:
        """The others have everything and are done; what the sender says while it waits disturbs no receiver."""
        with self._ends(2) as (sender, hubs):
            update = Transfer(sender, hubs, _model(1), bucket_bytes=1024)
            assert update.plan is not None
            update.receivers[1].take = Lagging(update.plan.buckets[-1].chunks[0], 2.5 * SIGN_S)
            self._good(update.run())
            self._good(Transfer(sender, hubs, _model(2)).run())

    def test_a_receiver_that_never_comes_is_named(self) -> None:
        """B086, B088: the sender says who; the others end with it, and the next update is good."""
        with self._ends(3) as (sender, hubs):
            update = Transfer(sender, hubs, _model(1), seats=seats_for(1, 2), deadline_s=MOMENT_S)
            update.run(absent=(1,), gathered=True)
            assert _places(update.sender_error) == [("peer_timeout", "r1", 0)]
            assert [_code(update.receivers[at].error) for at in (0, 2)] == ["peer_lost", "peer_lost"]
            self._good(Transfer(sender, hubs, _model(2)).run())

    def test_a_sender_that_never_opens(self) -> None:
        """B086: receivers wait for it as long as they were told, and no longer."""
        sender, hub = self.sender(), self.hub(SHORT_S)
        try:
            alone = Receiving(hub, manifest_of(specs_of(_model(1))))
            alone.start(offer_of(sender, seats_for(1)), 0).join(60)
            assert _code(alone.error) == "peer_timeout"
            sender.abort("the update ended without it")
            _patient([hub], LONG_S)
            self._good(Transfer(sender, [hub], _model(2)).run())
        finally:
            hub.close()
            sender.close()

    def test_a_sender_that_is_gone(self) -> None:
        sender, hub = self.sender(), self.hub(LONG_S)
        offer = offer_of(sender, seats_for(1))
        sender.close()
        alone = Receiving(hub, manifest_of(specs_of(_model(1))))
        alone.start(offer, 0).join(60)
        hub.close()
        assert _code(alone.error) == "peer_lost"

    def test_a_session_that_is_over_is_not_joined(self) -> None:
        with self._ends(1) as (sender, hubs):
            old = offer_of(sender, seats_for(1))
            Transfer(sender, hubs, _model(1), deadline_s=SHORT_S).run(absent=(0,))
            stale, good = Receiving(hubs[0], manifest_of(specs_of(_model(1)))), Transfer(sender, hubs, _model(2))
            late = stale.start(old, 0)
            good.receivers[0].hub = fresh = self.hub(LONG_S)
            self._good(good.run())
            fresh.close()
            sender.close()  # it may have come when no thread looked any more
            late.join(60)
            assert _code(stale.error) == "peer_lost"
            assert stale.progress == []

    def test_a_plan_that_is_not_the_manifests_is_refused(self) -> None:
        """B098: another order is the sender's right; another name, dtype or shape is found before a byte moves."""
        tensors = _model(1)
        specs = specs_of(tensors)
        with self._ends(2) as (sender, hubs):
            for wrong in (
                specs[:-1],
                (*specs, TensorSpec("more", "BF16", (4,))),
                (TensorSpec("t0", "F16", specs[0].shape), *specs[1:]),
                (TensorSpec("t0", "BF16", specs[0].shape[::-1]), *specs[1:]),
            ):
                # Both are there when the plan comes: one that comes later may find no sender any more.
                update = Transfer(sender, hubs, tensors, plan=StreamPlan(wrong, 1024)).run(gathered=True)
                assert _code(update.sender_error) == "stream_mismatch"
                assert [_code(receiver.error) for receiver in update.receivers] == ["stream_mismatch"] * 2
                assert [receiver.progress for receiver in update.receivers] == [[], []]
            backwards = dict(reversed(tensors.items()))
            self._good(Transfer(sender, hubs, backwards, bucket_bytes=1024).run())

    def test_receivers_disagree_on_the_manifest(self) -> None:
        """One receiver was promised something else: all end, and none has taken a byte."""
        tensors = _model(1)
        with self._ends(2) as (sender, hubs):
            update = Transfer(sender, hubs, tensors)
            update.receivers[1].manifest = manifest_of(specs_of(tensors)[:-1])
            update.run()
            assert _code(update.sender_error) == "stream_mismatch"
            assert ("r0", 1) in {(replica, rank) for _code, replica, rank in _places(update.sender_error)}
            assert [receiver.progress for receiver in update.receivers] == [[], []]

    def test_a_stopped_receiver_ends_the_update(self) -> None:
        with self._ends(2) as (sender, hubs):
            update = Transfer(sender, hubs, _model(1), bucket_bytes=1024)
            stopping = Stopping("t3")
            update.receivers[0].take, update.receivers[0].should_stop = stopping, stopping.stopped.is_set
            update.run()
            assert isinstance(update.receivers[0].error, Cancelled)
            assert _code(update.receivers[1].error) == "peer_lost"
            assert _places(update.sender_error) == [("peer_lost", "r0", 0)]
            self._good(Transfer(sender, hubs, _model(2)).run())

    def test_the_cause_comes_before_what_followed(self) -> None:
        """One receiver finds a fault, the others are told to stop, and only then the sender looks: it names the fault,
        the one in the first seat, and also when it was told that the update has ended."""
        for failing, told in ((0, False), (1, False), (0, True), (1, True)):
            with self._ends(2) as (sender, hubs):
                held = HeldSender(sender, 4)
                update = Transfer(held, hubs, _model(1), bucket_bytes=1024)
                assert update.plan is not None
                stop = threading.Event()
                update.receivers[failing].take = Failing(update.plan.buckets[2].chunks[0], held.waiting)
                update.receivers[1 - failing].should_stop = stop.is_set
                update.start()
                update.join_receiver(failing)
                stop.set()
                update.join_receivers()
                if told:
                    sender.abort("the update ended")
                held.release.set()
                update.join()
                assert _code(update.receivers[failing].error) == "tensor_digest"
                assert isinstance(update.receivers[1 - failing].error, Cancelled)
                assert _places(update.sender_error)[0] == ("tensor_digest", "r0", failing)
                self._good(Transfer(sender, hubs, _model(2)).run())

    def test_an_abort_from_another_thread(self) -> None:
        with self._ends(2) as (sender, hubs):
            update = Transfer(sender, hubs, _model(1), bucket_bytes=1024)
            stuck = Stuck("t3", then=lambda: sender.abort("enough"))
            update.receivers[1].take = stuck
            update.start()
            update.join_sender()
            stuck.release.set()
            update.join()
            assert _code(update.sender_error) == "client_abort"
            assert [_code(receiver.error) for receiver in update.receivers] == ["peer_lost", "peer_lost"]
            self._good(Transfer(sender, hubs, _model(2)).run())

    def test_closing_twice(self) -> None:
        sender, hub = self.sender(), self.hub(LONG_S)
        for end in (sender, hub, sender, hub):
            end.close()

    def _good(self, update: Transfer) -> None:
        assert update.sender_error is None, update.sender_error
        wanted = digests(dict(update.tensors))
        for receiver in update.receivers:
            assert receiver.error is None, receiver.error
            assert digests(receiver.arrived) == wanted

    def _ends(self, count: int) -> _Ends:
        return _Ends(self.sender(), [self.hub(LONG_S) for _ in range(count)])


class _Ends:
    def __init__(self, sender: StreamSender, hubs: list[PatientHub]) -> None:
        self._sender, self._hubs = sender, hubs

    def __enter__(self) -> tuple[StreamSender, list[PatientHub]]:
        return self._sender, self._hubs

    def __exit__(self, *_exc: object) -> None:
        close_all(self._hubs)
        self._sender.close()


def _model(seed: int) -> dict[str, torch.Tensor]:
    """Some forty buckets of a kilobyte."""
    return {f"t{at}": noise("BF16", (24 + at, 100), 100 * seed + at) for at in range(7)}


def _first(tensors: Mapping[str, torch.Tensor], name: str) -> int:
    """The bucket of a kilobyte in which a tensor begins."""
    plan = StreamPlan(specs_of(tensors), 1024)
    return next(bucket.index for bucket in plan.buckets if any(chunk.name == name for chunk in bucket.chunks))


def _patient(hubs: Sequence[PatientHub], patience_s: float) -> None:
    for hub in hubs:
        hub.patience_s = patience_s


def _wrong(receiver: Receiving, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    arrived = digests(receiver.arrived)
    return [name for name, digest in digests(dict(tensors)).items() if arrived.get(name) != digest]


def _code(error: BaseException | None) -> str:
    return error.code if isinstance(error, LiveweightsError) else repr(error)


def _places(error: BaseException | None) -> list[tuple[str, str, int | None]]:
    assert isinstance(error, LiveweightsError), error
    return [(failure.code, failure.replica, failure.rank) for failure in error.failures]
