"""Why a member does not serve, in words of the core; and what another release is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from updater.core.errors import Failure
from updater.core.fleet.begin import refusals
from updater.core.fleet.effects import Denied, Label
from updater.core.fleet.events import Begin, Joined, Seen
from updater.core.fleet.machine import step
from updater.core.fleet.members import cure, left_behind, obstacle, shown
from updater.core.fleet.state import Fleet, Member, Published, Standing, Transaction
from updater.core.participant import Description, DiskOffer, FrontState, Kind, StreamOffer
from updater.core.policy import Capabilities, Policy
from updater.core.release import RELEASE, WIRE, mismatch, older_coordinator
from updater.core.replica.state import started, status
from updater.core.version import START, Version

LIVE = Published(Label(START, "live"))
OURS = status(started("a", "a1", "start", "other", 1), 0.0)
OLD = replace(OURS, release="0.1.0", wire=1)
WHY = Failure("source_changed", "other bytes", replica="a")


def member(standing: Standing = Standing.JOINING, live: str = "other", **more: object) -> Member:
    return replace(Member("a", "a1", standing, live), **more)  # type: ignore[arg-type]


def fleet(*members: Member, live: Published | None = LIVE, hold: Failure | None = None) -> Fleet:
    return Fleet("f", 1, members=members, live=live, hold=hold)


STREAM = StreamOffer("broadcast", "h:1", "s")


@pytest.mark.case("F24")
@pytest.mark.parametrize(
    ("state", "joiner", "code"),
    [
        (fleet(), member(Standing.OK), None),
        (fleet(hold=WHY), member(), "source_changed"),
        (fleet(), member(why=WHY), "source_changed"),
        (fleet(live=None), member(), None),
        (fleet(), member(live="live"), None),
        (fleet(live=replace(LIVE, offer=DiskOffer("/x"))), member(), None),
        (fleet(live=replace(LIVE, offer=STREAM)), member(), "no_source"),
        (fleet(), member(), "no_source"),
        (fleet(), member(Standing.LOST, foreign=mismatch(OLD)), "release_mismatch"),
    ],
)
def test_why_a_member_waits(state: Fleet, joiner: Member, code: str | None) -> None:
    found = obstacle(state, joiner)
    assert (found.code if found is not None else None) == code


@pytest.mark.case("F17")
def test_a_member_is_shown_under_its_own_state() -> None:
    broken, open_ = replace(OURS, state=FrontState.BROKEN), replace(OURS, state=FrontState.OPEN)
    assert shown(member(Standing.LOST), None, False) == "lost"
    assert shown(member(Standing.QUARANTINED), broken, True) == "broken"
    assert shown(member(Standing.QUARANTINED), open_, True) == "quarantined"
    assert shown(member(Standing.LOST, unled=True), open_, True) == "open"
    assert shown(member(Standing.LOST, unled=True), open_, False) == "lost"
    assert shown(member(Standing.OK), open_, True) == "open"
    assert cure("broken") != cure("quarantined")
    assert cure("open") == ""


@pytest.mark.case("F18")
def test_only_a_stream_leaves_somebody_behind() -> None:
    update = Transaction("u", "", Kind.UPDATE, 2, Version(0, 1), Policy(), STREAM, "", (("b", "b1"),))
    state = fleet(member(Standing.QUARANTINED), replace(member(Standing.OK), replica="b"))
    (warning,) = left_behind(state, update)
    assert warning.startswith("a ")
    assert left_behind(state, replace(update, offer=DiskOffer("/x"))) == ()


@pytest.mark.case("F60")
def test_another_release_is_not_spoken_to_and_blocks_publication() -> None:
    assert mismatch(OURS) is None
    assert mismatch(replace(OURS, wire=WIRE + 1)) is not None
    assert mismatch(replace(OURS, release=f"{RELEASE}.1")) is not None
    state, effects = step(fleet(member(Standing.LOST, unled=True)), Seen("a", OLD))
    assert effects == ()
    begin = Begin("u", "", step=1, offer=DiskOffer("/x"))
    assert [failure.code for failure in refusals(state, begin)] == ["release_mismatch"]
    joining = Description(OLD, "toy", "http://a", Capabilities(()), "", "m", ())
    _, answers = step(fleet(), Joined(joining))
    denied = [answer for answer in answers if isinstance(answer, Denied)]
    assert denied[0].failures[0].code == "release_mismatch"


@pytest.mark.case("F60")
def test_a_replica_names_a_coordinator_of_another_release() -> None:
    assert older_coordinator("a", RELEASE) is None
    for other in ("", "0.9.9"):
        found = older_coordinator("a", other)
        assert found is not None
        assert found.code == "release_mismatch"
