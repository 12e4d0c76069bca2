"""What differs for the fleet machine when the bytes are pushed: seats, the seal, and no way to ask again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from updater.core.fleet.effects import Accepted, Denied, Outcome
from updater.core.fleet.events import LeaseExpired, Seal
from updater.core.fleet.state import Phase, Standing, Transaction
from updater.core.participant import Seats, StreamOffer
from updater.core.policy import CommitMode, Policy
from updater.testing import Simulation


@pytest.fixture
def sim() -> Simulation:
    """Two serving members of two ranks on version 0-3."""
    sim = Simulation()
    for name in "ab":
        sim.start_replica(name)
        sim.join(name)
    sim.settle()
    sim.begin("v3", 3)
    sim.settle()
    return sim


def update(sim: Simulation) -> Transaction:
    assert sim.state is not None
    assert sim.state.update is not None
    return sim.state.update


def phase(sim: Simulation) -> Phase:
    assert sim.state is not None
    return sim.state.phase


def requests(sim: Simulation, verb: str) -> list[Any]:
    return [packet.payload.request for name in "ab" for packet in sim.on_wire(verb, name)]


def test_receivers_are_numbered_over_the_frozen_participants(sim: Simulation) -> None:
    sim.begin("u", 4, stream=True)
    offers = [request.offer for request in requests(sim, "plan")]
    a, b = (sim.replicas[name].state.incarnation for name in "ab")
    assert offers == [StreamOffer("broadcast", "/u", "s", (Seats("a", a, 0, 2), Seats("b", b, 2, 2)))] * 2
    assert (offers[0].receivers, offers[0].first_of(b), offers[0].name_of(3)) == (4, 2, ("b", 1))


def test_an_offer_knows_its_own_receivers_only() -> None:
    offer = StreamOffer("broadcast", "x", "s", (Seats("a", "i", 0, 2),))
    with pytest.raises(LookupError):
        offer.first_of("j")
    with pytest.raises(LookupError):
        offer.name_of(2)


def test_staging_goes_on_until_the_stream_is_sealed(sim: Simulation) -> None:
    sim.begin("u", 4, stream=True)
    sim.run()
    assert (phase(sim), update(sim).waiting) == (Phase.STAGING, frozenset())
    assert isinstance(sim.ask(Seal("u")), Accepted)
    sim.settle()
    assert (sim.results[-1].update, sim.results[-1].outcome) == ("u", Outcome.COMMITTED)


def test_a_seal_before_the_last_rank_is_remembered(sim: Simulation) -> None:
    sim.begin("u", 4, stream=True)
    sim.run(until=Phase.STAGING)
    assert isinstance(sim.ask(Seal("u")), Accepted)
    assert isinstance(sim.ask(Seal("u")), Accepted)
    assert (phase(sim), update(sim).awaits_seal) == (Phase.STAGING, False)
    sim.settle()
    assert sim.results[-1].outcome is Outcome.COMMITTED


def test_nothing_can_be_sealed_before_it_was_sent(sim: Simulation) -> None:
    sim.begin("u", 4, stream=True)
    answer = sim.ask(Seal("u"))
    assert isinstance(answer, Denied)
    assert answer.failures[0].code == "wrong_phase"
    assert update(sim).awaits_seal


def test_what_the_seal_promises_reaches_the_vote_and_the_record(sim: Simulation) -> None:
    sim.begin("u", 4, stream=True, manifest="bytes-u")
    sim.run()
    promised = (("w", "0" * 16),)
    sim.ask(Seal("u", promised, "late", "digest of late"))
    assert [request.digests for request in requests(sim, "verify")] == [promised, promised]
    sim.settle()
    assert sim.results[-1].manifest_digest == "digest of late"
    assert sim.state is not None
    assert sim.state.live is not None
    assert (sim.state.live.manifest, sim.state.live.manifest_digest) == ("late", "digest of late")


def test_a_sender_that_is_gone_loses_its_update(sim: Simulation) -> None:
    sim.begin("u", 4, stream=True)
    sim.run()
    sim.feed(LeaseExpired("u"))
    sim.settle()
    assert (sim.results[-1].outcome, sim.results[-1].reason) == (Outcome.ABORTED, "lease_expired")


def test_the_deadline_of_staging_ends_a_stream_that_never_ends(sim: Simulation) -> None:
    sim.begin("u", 4, stream=True)
    sim.settle()
    assert (sim.results[-1].outcome, phase(sim)) == (Outcome.ABORTED, Phase.IDLE)


def test_a_late_joiner_waits_for_the_next_update(sim: Simulation) -> None:
    """A stream cannot be asked for again."""
    sim.begin("u", 4, stream=True)
    sim.run()
    sim.ask(Seal("u"))
    sim.settle()
    sim.start_replica("c")
    sim.join("c")
    sim.settle()
    assert sim.state is not None
    member = sim.state.member("c")
    assert member is not None
    assert (member.standing, member.shut) == (Standing.JOINING, True)
    sim.begin("w", 5, stream=True, policy=Policy(commit=CommitMode.AUTO))
    assert update(sim).offer == requests(sim, "plan")[0].offer
    sim.run()
    sim.ask(Seal("w"))
    sim.settle()
    member = sim.state.member("c")
    assert member is not None
    assert member.standing is Standing.OK


def test_who_does_not_say_how_many_ranks_it_has_cannot_be_streamed_to(sim: Simulation) -> None:
    assert sim.state is not None
    member = sim.state.member("b")
    assert member is not None
    sim.state = sim.state.with_member(replace(member, ranks=0))
    answer = sim.begin("u", 4, stream=True)
    assert isinstance(answer, Denied)
    assert (answer.failures[0].code, answer.failures[0].replica) == ("transport_unsupported", "b")
