"""Whom a front obeys and what it makes of its coordinator's answers (I11), message by message."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.core.test_core_replica import BROKE, Front
from updater.core.errors import Failure
from updater.core.fleet import machine as fleet
from updater.core.fleet import members
from updater.core.fleet.effects import Denied, Send, Stop
from updater.core.fleet.events import Begin, Called, HoldEnded, Joined, Refused, Replied, Seen
from updater.core.fleet.requests import first_word
from updater.core.fleet.state import Fleet, Member, Phase, Standing
from updater.core.participant import (
    Call,
    Claim,
    Claimed,
    DiscardRequest,
    DiskOffer,
    FenceRequest,
    FrontState,
    JoinRequest,
    ReadmitRequest,
    Released,
    ReleaseRequest,
    ReleaseTo,
)
from updater.core.policy import CommitMode, Policy
from updater.core.replica.machine import status
from updater.core.replica.state import Answer, Cancel, Refuse, Rejoin, ShutDown, Told, Work
from updater.testing import Simulation


def told(front: Front, claim: Claim, fleet_id: str = "fleet", epoch: int = 1, incarnation: str = "life") -> None:
    front.feed(Told(claim, fleet_id, epoch, incarnation))


def orphan() -> Front:
    front = Front().join()
    told(front, Claim.REMOVED)
    assert front.state.state is FrontState.ORPHANED
    return front


# --- whom it obeys


@pytest.mark.case("F15")
def test_only_lead_raises_the_epoch_and_a_refused_verb_leaves_no_mark() -> None:
    front = Front().join()
    before = front.state
    front.ask("install", FenceRequest(front.fence(5000, 1)))
    assert (front.refused(), front.state.mark) == ("wrong_phase", before.mark)
    front.ask("discard", DiscardRequest(front.fence(5000, 0, epoch=2)))
    assert (front.refused(), front.state) == ("replica_fenced", before)
    front.vote(5)
    assert front.state.reached == "voted"
    front.lead(2)
    front.ask("discard", DiscardRequest(front.fence(5, 0, epoch=2)))
    assert (front.saw(Work).verb, front.state.mark) == ("discard", (2, 5, 0))


@pytest.mark.case("F09", "F61")
def test_another_fleet_an_older_epoch_and_the_higher_of_two_owners_do_not_lead() -> None:
    front = Front().join().lead(3)
    front.ask("lead", FenceRequest(replace(front.fence(0, 0, 9), fleet="other")))
    assert front.refused() == "replica_fenced"
    front.ask("lead", FenceRequest(front.fence(0, 0, 2)))
    assert front.refused() == "taken_over"
    front.ask("lead", FenceRequest(replace(front.fence(0, 0, 4), owner="b")))
    front.ask("lead", FenceRequest(replace(front.fence(0, 0, 4), owner="c")))
    assert (front.refused(), front.state.owner) == ("taken_over", "b")
    front.ask("lead", FenceRequest(replace(front.fence(0, 0, 4), owner="a")))
    assert (front.saw(Answer).reply.owner, front.state.owner, front.state.epoch) == ("a", "a", 4)


@pytest.mark.case("F61")
def test_a_front_says_which_other_owner_of_its_epoch_has_led_it_or_asked_to() -> None:
    front = Front().join().lead(3)
    front.ask("lead", FenceRequest(replace(front.fence(0, 0, 2), owner="z")))
    assert (front.refused(), front.state.rival) == ("taken_over", "")  # of an older epoch
    front.ask("lead", FenceRequest(replace(front.fence(0, 0, 4), owner="b")))
    assert front.saw(Answer).reply.rival == ""
    front.ask("lead", FenceRequest(replace(front.fence(0, 0, 4), owner="c")))
    assert (front.refused(), front.state.rival) == ("taken_over", "c")
    front.ask("lead", FenceRequest(replace(front.fence(0, 0, 4), owner="b")))
    assert front.saw(Answer).reply.rival == "c"
    front.ask("lead", FenceRequest(replace(front.fence(0, 0, 4), owner="a")))
    assert front.saw(Answer).reply.rival == "b"
    front.ask("lead", FenceRequest(replace(front.fence(0, 0, 5), owner="d")))
    assert front.saw(Answer).reply.rival == ""


@pytest.mark.case("F61")
def test_a_front_that_knows_no_owner_of_its_epoch_obeys_the_first_that_leads() -> None:
    front = Front().join().lead(4)
    front.state = replace(front.state, owner="")
    front.ask("lead", FenceRequest(replace(front.fence(0, 0, 4), owner="b")))
    assert (front.saw(Answer).reply.owner, front.state.owner, front.state.epoch) == ("b", "b", 4)


# --- what it is told


@pytest.mark.case("F10", "F12")
@pytest.mark.parametrize(
    ("said", "unclaimed"),
    [
        ((Claim.UNKNOWN, "", 9), True),
        ((Claim.UNKNOWN, "other", 9), True),
        ((Claim.REMOVED, "other", 9), False),
        ((Claim.REMOVED, "fleet", 0), False),
        ((Claim.MEMBER, "fleet", 1), False),
        ((Claim.REMOVED, "fleet", 1, "an earlier life"), False),
    ],
)
def test_it_stays_open_unless_its_own_fleet_says_that_it_was_removed(said: tuple[object, ...], unclaimed: bool) -> None:
    front = Front().join()
    told(front, *said)  # type: ignore[arg-type]
    assert (front.state.state, front.state.unclaimed, front.effects) == (FrontState.OPEN, unclaimed, ())
    assert status(front.state, 0.0).unclaimed is unclaimed
    assert not front.lead(2).state.unclaimed


@pytest.mark.case("F12")
def test_a_removal_while_ranks_are_at_work_waits_for_them() -> None:
    front = Front().join().vote().close()
    told(front, Claim.REMOVED)  # a quiesce may be cut off
    assert front.state.state is FrontState.ORPHANED
    assert front.saw(Cancel) == Cancel(5)
    front = Front().join().vote()
    front.ask("discard", DiscardRequest(front.fence(5, 0)))
    told(front, Claim.REMOVED)
    assert front.state.state is FrontState.OPEN


@pytest.mark.case("F12")
def test_an_orphan_proves_its_bytes_and_joins_again_as_another_incarnation() -> None:
    front = orphan()
    told(front, Claim.REMOVED)
    front.ask("plan", FenceRequest(front.fence(9, 0)))
    assert (front.refused(), front.state.state) == ("orphaned", FrontState.ORPHANED)
    fence = front.state.last_heard()
    front.ask("readmit", ReadmitRequest(fence, "next"))
    front.done("readmit", fence)
    assert front.saw(Rejoin) is not None
    state = front.state
    assert (state.state, state.incarnation, state.fleet, state.epoch) == (FrontState.JOINING, "next", "fleet", 1)


def test_an_orphan_that_cannot_prove_its_bytes_is_in_doubt() -> None:
    for verb, request in (
        ("readmit", ReadmitRequest(orphan().state.last_heard(), "next")),
        ("release", ReleaseRequest(orphan().state.last_heard(), ReleaseTo.LIVE)),
        ("join", JoinRequest(orphan().fence(9, 0), "start", "base")),
    ):
        front = orphan()
        front.ask(verb, request)
        front.fail(verb, request.fence)  # type: ignore[attr-defined]
        assert front.state.state is FrontState.QUARANTINED
        assert front.saw(ShutDown) == ShutDown(BROKE)
        assert front.refused() == "rank_failed"


def test_an_orphan_is_released_by_hand_to_the_one_thing_that_it_can_serve() -> None:
    front = orphan()
    front.ask("release", ReleaseRequest(front.state.last_heard(), ReleaseTo.PREVIOUS))
    assert front.refused() == "wrong_phase"
    fence = front.state.last_heard()
    front.ask("release", ReleaseRequest(fence, ReleaseTo.LIVE))
    front.done("release", fence)
    assert (front.state.state, front.state.live.version) == (FrontState.OPEN, "start")
    assert front.state.released == Released(ReleaseTo.LIVE, "start", 0, 0)


@pytest.mark.case("F09")
def test_an_orphan_is_adopted_as_what_it_holds_and_nothing_else() -> None:
    front = orphan().lead(2)
    front.ask("join", JoinRequest(front.fence(9, 0, 2), "0-9", "other"))
    assert front.refused() == "expected_mismatch"
    fence = front.fence(9, 0, 2)
    front.ask("join", JoinRequest(fence, "start", "base"))
    front.done("join", fence)
    assert (front.state.state, front.state.failure) == (FrontState.OPEN, None)


# --- the coordinator


def state(sim: Simulation) -> Fleet:
    assert sim.state is not None
    return sim.state


def member(sim: Simulation, name: str = "a") -> Member:
    found = state(sim).member(name)
    assert found is not None
    return found


@pytest.fixture
def sim() -> Simulation:
    sim = Simulation()
    for name in "ab":
        sim.start_replica(name)
        sim.join(name)
    sim.settle()
    return sim


def called(sim: Simulation, **change: object) -> tuple[Claim, str]:
    """The answer, and the code of what the coordinator holds for since."""
    process = sim.replicas["a"]
    said = process.describe(0.0).status
    call = Call("a", said.incarnation, said.fleet, said.epoch, said.serial, said.live_version, said.live_digest,
                said.state)  # fmt: skip
    after, effects = fleet.step(state(sim), Called(replace(call, **change)))  # type: ignore[arg-type]
    claimed = effects[-1]
    assert isinstance(claimed, Claimed)
    return claimed.claim, after.hold.code if after.hold else ""


@pytest.mark.case("F11", "F12")
def test_what_a_call_is_answered(sim: Simulation) -> None:
    assert called(sim) == (Claim.MEMBER, "")
    assert called(sim, fleet="") == (Claim.MEMBER, "")
    assert called(sim, fleet="other") == (Claim.UNKNOWN, "")
    assert called(sim, epoch=2) == (Claim.MEMBER, "behind")
    assert called(sim, version="0-7") == (Claim.MEMBER, "behind")
    assert called(sim, replica="x") == (Claim.UNKNOWN, "behind")
    assert called(sim, replica="x", state=FrontState.BROKEN) == (Claim.UNKNOWN, "")
    sim.do_remove("a")
    assert called(sim) == (Claim.REMOVED, "")
    assert called(sim, version="0-7") == (Claim.UNKNOWN, "behind")


@pytest.mark.case("F11")
def test_who_is_behind_gives_up_what_is_not_decided(sim: Simulation) -> None:
    sim.begin("u", 0, policy=Policy(commit=CommitMode.MANUAL))
    sim.run()
    assert state(sim).phase is Phase.READY
    seen = Seen("a", replace(sim.replicas["a"].describe(0.0).status, epoch=2))
    held, _ = fleet.step(replace(state(sim), members=tuple(replace(m, unled=True) for m in state(sim).members)), seen)
    assert held.hold is not None
    assert (held.hold.code, held.phase) == ("behind", Phase.DISCARDING)
    taken, effects = fleet.step(state(sim), seen)
    assert (taken.phase, [type(effect) for effect in effects]) == (Phase.STOPPED, [Stop])
    sim.run(until=Phase.DECIDING)
    stranger = Call("x", "i", "fleet", 1, 1, "start", "", FrontState.OPEN)
    past, _ = fleet.step(replace(state(sim), phase=Phase.INSTALLING), Called(stranger))
    assert past.phase is Phase.INSTALLING
    _, effects = fleet.step(held, Begin("v", "v", step=3, offer=DiskOffer("/v")))
    assert isinstance(effects[0], Denied)


@pytest.mark.case("F61")
def test_of_two_owners_of_one_epoch_the_higher_stops_and_the_lower_says_its_first_word_again(sim: Simulation) -> None:
    seen = sim.replicas["a"].describe(0.0).status
    stopped, effects = fleet.step(state(sim), Seen("a", replace(seen, owner="c0")))
    assert (stopped.phase, [type(effect) for effect in effects]) == (Phase.STOPPED, [Stop])
    goes_on, effects = fleet.step(state(sim), Seen("a", replace(seen, owner="c9")))
    again = goes_on.member("a")
    assert again is not None
    assert (again.unled, effects) == (True, (first_word(goes_on, again),))


def test_a_first_word_that_was_heard_already_or_is_refused(sim: Simulation) -> None:
    word = first_word(state(sim), member(sim))
    reply = sim.replicas["a"].describe(0.0).status
    assert fleet.step(state(sim), Replied("a", "lead", word.fence, reply)) == (state(sim), ())
    no = (Failure("replica_fenced", "of another fleet"),)
    assert fleet.step(state(sim), Refused("a", "lead", word.fence, no)) == (state(sim), ())
    unled = state(sim).with_member(replace(member(sim), unled=True, owed=word))
    after, _ = fleet.step(replace(unled, hold=Failure("behind", "x")), Refused("a", "lead", word.fence, no))
    refused = after.member("a")
    assert refused is not None
    assert (refused.unled, refused.owed) == (True, word)  # asked again when it is seen


def test_a_silent_member_that_was_adopted_is_known_by_its_first_answer(sim: Simulation) -> None:
    unknown = replace(member(sim), incarnation="", unled=True, standing=Standing.LOST)
    after, effects = fleet.step(state(sim).with_member(unknown), Seen("a", sim.replicas["a"].describe(0.0).status))
    found = after.member("a")
    assert found is not None
    assert effects == (first_word(after, found),)
    assert found.incarnation == "a1"


@pytest.mark.case("F13")
def test_ranks_of_a_member_that_was_silent_are_filled_in_when_it_answers(sim: Simulation) -> None:
    silent = state(sim).with_member(replace(member(sim), ranks=0))
    after, _ = fleet.step(silent, Seen("a", sim.replicas["a"].describe(0.0).status))
    found = after.member("a")
    assert found is not None
    assert found.ranks == 2


def test_a_member_that_hears_its_first_word_in_a_phase_is_asked_at_once_for_that(sim: Simulation) -> None:
    """Of a recovery: it was silent when the phase began."""
    sim.begin("u", 0)
    sim.run(until=Phase.STAGING)
    word = first_word(state(sim), member(sim))
    unled = state(sim).with_member(replace(member(sim), unled=True))
    after, effects = fleet.step(unled, Replied("a", "lead", word.fence, sim.replicas["a"].describe(0.0).status))
    assert [getattr(effect, "verb", "") for effect in effects] == ["stage"]
    assert after.phase is Phase.STAGING


@pytest.mark.case("F10")
def test_joiners_with_and_without_a_history_before_an_empty_journal() -> None:
    sim = Simulation()
    sim.start_replica("a")
    unheard = Call("a", "a1", "", 0, 0, "start", "base", FrontState.JOINING)
    after, effects = fleet.step(state(sim), Called(unheard))
    assert (after.hold, effects) == (None, (Claimed(Claim.UNKNOWN, "", 1),))
    veteran = sim.replicas["a"].describe(0.0)
    veteran = replace(veteran, status=replace(veteran.status, fleet="old"))
    after, effects = fleet.step(state(sim), Joined(veteran))
    assert after.hold is not None
    assert (after.hold.code, type(effects[0])) == ("adopt_needed", Denied)


def test_a_joiner_that_took_part_before_lets_go_of_what_it_staged_first(sim: Simulation) -> None:
    """I6: it was removed in the middle of something, and joins again."""
    again = sim.replicas["a"].describe(0.0)
    again = replace(again, status=replace(again.status, incarnation="a7", state=FrontState.JOINING, serial=4))
    after, effects = fleet.step(state(sim), Joined(again, old_gone=True))
    (word,) = [effect for effect in effects if isinstance(effect, Send)]
    _, effects = fleet.step(after, Replied("a", word.verb, word.fence, again.status))
    assert [word.verb, *(effect.verb for effect in effects if isinstance(effect, Send))] == ["lead", "discard"]


def test_a_leaving_member_that_was_never_there(sim: Simulation) -> None:
    assert members.removed(state(sim), "nobody", BROKE)[0] == state(sim)


def test_what_a_member_of_another_incarnation_says_is_not_heard(sim: Simulation) -> None:
    said = replace(sim.replicas["a"].describe(0.0).status, incarnation="a7")
    assert fleet.step(state(sim), Seen("a", said)) == (state(sim), ())
    assert fleet.step(state(sim), Seen("nobody", said)) == (state(sim), ())


def test_listening_ends_and_other_holds_do_not(sim: Simulation) -> None:
    for code, left in (("listening", None), ("behind", Failure("behind", "x"))):
        after, _ = fleet.step(replace(state(sim), hold=Failure(code, "x")), HoldEnded())
        assert after.hold == left


def test_an_orphan_that_is_a_member_is_taken_in_like_a_joiner(sim: Simulation) -> None:
    said = replace(sim.replicas["a"].describe(0.0).status, state=FrontState.ORPHANED)
    assert fleet.step(state(sim), Seen("a", said)) == (state(sim), ())  # old news
    lost = state(sim).with_member(replace(member(sim), standing=Standing.LOST))
    after, effects = fleet.step(lost, Seen("a", said))
    found = after.member("a")
    assert found is not None
    assert (found.standing, found.shut, [effect.verb for effect in effects if hasattr(effect, "verb")]) == (
        Standing.JOINING, False, ["join"],
    )  # fmt: skip


def test_refusals_are_to_those_who_asked() -> None:
    front = orphan()
    front.ask("stage", FenceRequest(front.fence(9, 0)))
    assert [effect.fence for effect in front.effects if isinstance(effect, Refuse)] == [front.fence(9, 0)]
