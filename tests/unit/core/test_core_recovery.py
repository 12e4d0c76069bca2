"""Recovery where the stories and the sweep do not go."""

from __future__ import annotations

from dataclasses import replace

from updater.core.effects import Append, Record, RecordKind
from updater.core.participant import FrontState, FrontStatus, Kind, Spare, SpareState
from updater.core.recovery import Journal, KnownMember, recover
from updater.core.state import Phase, Standing
from updater.core.version import START, Version

MEMBERS = (("a", "a1"), ("b", "b1"))
KNOWN = tuple(KnownMember(*pair) for pair in MEMBERS)
BEGUN = Record(RecordKind.PUBLISHED, 1, 1, 0, "", "", Kind.UPDATE, START, "base", "", MEMBERS)
DECIDED = replace(BEGUN, kind=RecordKind.DECIDED, serial=4, attempt=1, update="u", version=Version(0, 1), digest="new")


def status(name: str, state: FrontState, version: str = "0-1", digest: str = "new", **change: object) -> FrontStatus:
    spare = Spare(SpareState.PREVIOUS, 0, "start", "base")
    found = FrontStatus(name, f"{name}1", "fleet", 1, 4, 1, state, version, digest, spare)
    return replace(found, **change)  # type: ignore[arg-type]


def journal(*records: Record) -> Journal:
    return Journal(records, KNOWN, 3, 9)


def test_a_fleet_that_was_never_joined_just_starts() -> None:
    found = recover("fleet", Journal(), {})
    assert (found.refusal, found.effects, found.state.epoch, found.state.phase) == (None, (), 1, Phase.IDLE)


def test_epoch_and_serial_exceed_everything_that_was_ever_used() -> None:
    reports = {"a": status("a", FrontState.OPEN, "start", "base", epoch=7, serial=30), "b": None}
    found = recover("fleet", journal(BEGUN), reports)
    assert (found.state.epoch, found.state.serial) == (8, 31)
    assert found.state.update is not None
    assert (found.state.update.serial, found.state.update.update) == (31, "")


def test_who_serves_an_undecided_version_settles_it() -> None:
    """Impossible by I8 unless a record was lost; even then nobody who was answered is contradicted."""
    reports = {"a": status("a", FrontState.OPEN), "b": status("b", FrontState.INVALIDATED)}
    found = recover("fleet", journal(BEGUN, DECIDED), reports)
    assert found.state.phase is Phase.PUBLISHING
    assert [effect.record.kind for effect in found.effects if isinstance(effect, Append)] == [RecordKind.PUBLISHED]
    assert {member.standing for member in found.state.members} == {Standing.OK}


def test_another_incarnation_did_not_install() -> None:
    reports = {
        "a": status("a", FrontState.INSTALLED),
        "b": status("b", FrontState.INSTALLED, incarnation="b2"),
    }
    assert recover("fleet", journal(BEGUN, DECIDED), reports).state.phase is Phase.RESTORING


def test_other_bytes_or_another_attempt_are_not_what_was_decided() -> None:
    for change in ({"live_digest": "other"}, {"attempt": 2}, {"serial": 5}):
        reports = {"a": status("a", FrontState.INSTALLED), "b": status("b", FrontState.INSTALLED, **change)}
        assert recover("fleet", journal(BEGUN, DECIDED), reports).state.phase is Phase.RESTORING


def test_a_member_that_serves_something_else_is_quarantined_and_blocks() -> None:
    reports = {"a": status("a", FrontState.OPEN, "0-9", "what"), "b": status("b", FrontState.BROKEN)}
    members = recover("fleet", journal(BEGUN), reports).state.members
    assert [(member.standing, member.shut) for member in members] == [
        (Standing.QUARANTINED, False),
        (Standing.QUARANTINED, True),
    ]


def test_nobody_to_clean_up_after() -> None:
    found = recover("fleet", journal(BEGUN), {"a": None, "b": status("b", FrontState.BROKEN)})
    assert (found.state.phase, found.effects) == (Phase.IDLE, ())


def test_a_fleet_that_does_not_agree_is_not_adopted() -> None:
    empty = Journal((), KNOWN)
    serving = status("a", FrontState.OPEN)
    for other in (status("b", FrontState.OPEN, "0-2", "x"), status("b", FrontState.INSTALLED)):
        found = recover("fleet", empty, {"a": serving, "b": other}, adopt=True)
        assert found.refusal is not None
        assert found.refusal.code == "adopt_needed"
    found = recover("fleet", empty, {"a": serving, "b": status("b", FrontState.OPEN)}, adopt=True)
    assert found.refusal is None
    assert found.state.highest == Version(0, 1)
    assert found.state.starting is not None


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
