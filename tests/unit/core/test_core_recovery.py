"""Recovery where the stories and the sweep do not go."""

from __future__ import annotations

from dataclasses import replace

import pytest

from updater.core.fleet.effects import Append, Record, RecordKind
from updater.core.fleet.lineage import ADOPTION, KnownJournal, KnownMember, Survey, nobody_led, survey
from updater.core.fleet.recovery import adopt, may_adopt, recover
from updater.core.fleet.state import Phase, Standing
from updater.core.participant import FrontState, FrontStatus, Kind, Released, ReleaseTo, Spare, SpareState
from updater.core.release import RELEASE, WIRE
from updater.core.version import START, Version

MEMBERS = (("a", "a1"), ("b", "b1"))
KNOWN = tuple(KnownMember(*pair) for pair in MEMBERS)
BEGUN = Record(RecordKind.PUBLISHED, 1, 1, 0, "", "", Kind.UPDATE, START, "base", "", MEMBERS)
DECIDED = replace(BEGUN, kind=RecordKind.DECIDED, serial=4, attempt=1, update="u", version=Version(0, 1), digest="new")


def status(name: str, state: FrontState, version: str = "0-1", digest: str = "new", **change: object) -> FrontStatus:
    spare = Spare(SpareState.PREVIOUS, 0, "start", "base")
    found = FrontStatus(name, f"{name}1", "fleet", 1, 4, 1, state, version, digest, spare, release=RELEASE, wire=WIRE)
    return replace(found, **change)  # type: ignore[arg-type]


def journal(*records: Record) -> KnownJournal:
    return KnownJournal(records, KNOWN, 3, 9)


def test_a_fleet_that_was_never_joined_just_starts() -> None:
    found = recover("fleet", KnownJournal(), {})
    assert (found.effects, found.state.epoch, found.state.phase) == ((), 1, Phase.IDLE)
    assert found.state.hold is not None
    assert found.state.hold.code == "listening"
    assert recover("fleet", KnownJournal(), {}, new_fleet=True).state.hold is None


def test_epoch_and_serial_exceed_everything_that_was_ever_used() -> None:
    reports = {"a": status("a", FrontState.OPEN, "start", "base", epoch=7, serial=30), "b": None}
    found = recover("fleet", journal(BEGUN), reports)
    assert (found.state.epoch, found.state.serial) == (8, 31)
    assert found.state.update is not None
    assert (found.state.update.serial, found.state.update.update) == (31, "")


def test_who_serves_an_undecided_version_settles_it() -> None:
    """Impossible by I8 unless a record was lost; even then no client that was answered is contradicted."""
    reports = {"a": status("a", FrontState.OPEN), "b": status("b", FrontState.INVALIDATED)}
    found = recover("fleet", journal(BEGUN, DECIDED), reports)
    assert found.state.phase is Phase.PUBLISHING
    assert [effect.record.kind for effect in found.effects if isinstance(effect, Append)] == [RecordKind.PUBLISHED]
    assert {member.standing for member in found.state.members} == {Standing.OK}


def test_another_incarnation_did_not_install() -> None:
    reports = {
        "a": status("a", FrontState.INSTALLED),
        "b": status("b", FrontState.JOINING, incarnation="b2"),
    }
    assert recover("fleet", journal(BEGUN, DECIDED), reports).state.phase is Phase.RESTORING


def test_other_bytes_or_another_attempt_are_not_what_was_decided() -> None:
    for change in ({"live_digest": "other"}, {"attempt": 2}, {"serial": 5}):
        reports = {"a": status("a", FrontState.INSTALLED), "b": status("b", FrontState.INSTALLED, **change)}
        assert recover("fleet", journal(BEGUN, DECIDED), reports).state.phase is Phase.RESTORING


@pytest.mark.case("F11")
def test_what_all_that_serve_hold_is_followed_by_an_older_journal() -> None:
    reports = {"a": status("a", FrontState.OPEN, "0-9", "what"), "b": status("b", FrontState.BROKEN)}
    found = recover("fleet", journal(BEGUN), reports).state
    assert [(member.standing, member.shut) for member in found.members] == [
        (Standing.OK, False),
        (Standing.QUARANTINED, True),
    ]
    assert found.live is not None
    assert (found.live.label.version, found.highest) == (Version(0, 9), Version(0, 9))
    assert found.starting is not None


def test_a_member_that_was_released_to_something_else_is_quarantined_and_blocks() -> None:
    by_hand = Released(ReleaseTo.LIVE, "0-9", 4, 1)
    served = status("a", FrontState.OPEN, "0-9", "what", released=by_hand)
    reports = {"a": served, "b": status("b", FrontState.BROKEN, "start", "base")}
    members = recover("fleet", journal(BEGUN), reports).state.members
    assert [(member.standing, member.shut) for member in members] == [
        (Standing.QUARANTINED, False),
        (Standing.QUARANTINED, True),
    ]


@pytest.mark.case("F11")
@pytest.mark.parametrize(
    "reports",
    [
        {"a": status("a", FrontState.OPEN, "0-9", "what"), "b": None},
        {"a": status("a", FrontState.OPEN, "0-9", "what"), "b": status("b", FrontState.OPEN, "start", "base")},
        {"a": status("a", FrontState.OPEN, "0-9", "what"), "b": status("b", FrontState.PAUSED, "0-9", "what")},
        {"a": status("a", FrontState.OPEN, "start", "base"), "b": status("b", FrontState.OPEN, incarnation="b7")},
        {"a": status("a", FrontState.JOINING, epoch=9), "b": status("b", FrontState.BROKEN, epoch=9)},
        {"a": status("a", FrontState.ORPHANED, "0-9", "what"), "b": status("b", FrontState.BROKEN)},
        {"a": status("a", FrontState.INVALIDATED, "0-9", "what"), "b": status("b", FrontState.OPEN, "start", "base")},
    ],
)
def test_an_older_journal_leads_nobody_where_nothing_is_proved(reports: dict[str, FrontStatus | None]) -> None:
    found = survey("fleet", journal(BEGUN), reports)
    assert (found.older, found.hold is not None and found.hold.code) == (True, "behind")
    state = nobody_led("fleet", journal(BEGUN), found)
    assert state.hold == found.hold
    assert {(member.standing, member.unled) for member in state.members} == {(Standing.LOST, True)}
    # The same if it is found only when they were led.
    assert recover("fleet", journal(BEGUN), reports, epoch=10, older=True).state.hold == found.hold


@pytest.mark.case("F09")
def test_a_fleet_that_was_adopted_by_another_journal_is_not_followed() -> None:
    reports = {name: status(name, FrontState.OPEN, "0-9", "what", epoch=ADOPTION) for name in "ab"}
    assert survey("fleet", journal(BEGUN), reports).hold is not None
    later = {name: status(name, FrontState.OPEN, "0-9", "what", epoch=9) for name in "ab"}
    assert survey("fleet", journal(BEGUN), later) == Survey(10, older=True)
    assert survey("fleet", replace(journal(BEGUN), taken_over=True), later).hold is not None


@pytest.mark.case("F10")
def test_members_with_a_fleet_and_a_journal_without_records() -> None:
    state = recover("fleet", KnownJournal((), KNOWN), {"a": status("a", FrontState.OPEN), "b": None}).state
    assert state.hold is not None
    assert (state.hold.code, state.hold.replica) == ("adopt_needed", "a")


def test_nobody_to_clean_up_after() -> None:
    found = recover("fleet", journal(BEGUN), {"a": None, "b": status("b", FrontState.BROKEN)})
    assert (found.state.phase, found.effects) == (Phase.IDLE, ())


@pytest.mark.case("F09")
@pytest.mark.parametrize(
    ("other", "code"),
    [
        (status("b", FrontState.OPEN, "0-2", "x"), "adopt_needed"),
        (status("b", FrontState.OPEN, fleet="another"), "adopt_needed"),
        (status("b", FrontState.INSTALLED), "wrong_phase"),
        (status("b", FrontState.PAUSED), "wrong_phase"),
    ],
)
def test_a_fleet_that_does_not_agree_is_not_adopted(other: FrontStatus, code: str) -> None:
    found = may_adopt(KnownJournal((), KNOWN), {"a": status("a", FrontState.OPEN), "b": other})
    assert found.refusal is not None
    assert found.refusal.code == code
    assert found.refusal.hint


@pytest.mark.case("F09")
def test_who_was_never_in_a_fleet_is_not_adopted() -> None:
    assert may_adopt(KnownJournal((), KNOWN), {"a": status("a", FrontState.JOINING, fleet=""), "b": None}).refusal


@pytest.mark.case("F09")
@pytest.mark.parametrize("state", [FrontState.OPEN, FrontState.ORPHANED, FrontState.JOINING])
def test_orphans_and_released_and_silent_ones_are_adopted(state: FrontState) -> None:
    empty, reports = KnownJournal((), KNOWN, epoch=1), {"a": status("a", state, unclaimed=True), "b": None}
    adoption = may_adopt(empty, reports)
    assert (adoption.refusal, adoption.fleet, adoption.epoch) == (None, "fleet", ADOPTION)
    led = {"a": status("a", state, epoch=ADOPTION, owner="me"), "b": None}
    found = adopt(adoption, empty, led, owner="me").state
    a, b = found.members
    assert found.highest == Version(0, 1)
    assert found.starting is not None
    assert (a.standing, a.unled) == (Standing.OK if state is FrontState.OPEN else Standing.JOINING, False)
    assert (b.standing, b.unled, b.shut) == (Standing.LOST, True, False)
    again = may_adopt(replace(empty, epoch=ADOPTION + 3), reports)
    assert again.epoch == 2 * ADOPTION


def test_the_source_of_a_version_that_was_rolled_back_to_is_known_again() -> None:
    first = replace(DECIDED, kind=RecordKind.PUBLISHED, manifest_digest="m1")
    second = replace(first, serial=5, update="v", version=Version(0, 2), digest="newer", manifest_digest="m2")
    back = replace(first, serial=6, update="r", op=Kind.ROLLBACK, manifest_digest="")
    found = recover("fleet", journal(BEGUN, first, second, back), {})
    assert found.state.live is not None
    assert (found.state.live.label.version, found.state.live.manifest_digest) == (Version(0, 1), "m1")
    assert found.state.highest == Version(0, 2)
    assert found.state.before is not None
    assert found.state.before.manifest_digest == "m2"


def test_the_publication_of_start_admits_nobody_by_itself() -> None:
    members = recover("fleet", journal(BEGUN), {"a": None, "b": None}).state.members
    assert [(member.standing, member.admitted) for member in members] == [(Standing.LOST, False)] * 2
    published = replace(DECIDED, kind=RecordKind.PUBLISHED)
    members = recover("fleet", journal(BEGUN, published), {"a": None, "b": None}).state.members
    assert all(member.admitted and member.owed for member in members)


def test_a_process_in_the_place_of_a_member_is_no_member_before_it_joins() -> None:
    reports = {
        "a": status("a", FrontState.OPEN, "start", "base"),
        "b": status("b", FrontState.JOINING, "start", "base", incarnation="b2"),
    }
    assert [member.replica for member in recover("fleet", journal(BEGUN), reports).state.members] == ["a"]
