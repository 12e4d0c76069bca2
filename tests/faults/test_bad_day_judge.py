"""The judge of a bad day sees each fault that it is there for, and none where there is none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults.bad_day.actions import ACTIONS
from tests.faults.bad_day.catalogue import NAMES
from tests.faults.bad_day.course import PHASES, Plan, Report
from tests.faults.bad_day.engines import Said
from tests.faults.bad_day.judge import CHECKS, Evidence, FrontView, Next, Verdict, View, judge
from tests.faults.bad_day.load import Heard, heard_of
from tests.faults.bad_day.publisher import Answer
from tests.faults.bad_day.results import Run, page, record
from updater.demo.clients import ClientReply

OLD, NEW = Said((1, 2, 3), (1.0, 1.0, 1.0)), Said((1, 5, 6), (1.0, 1.0, 0.0))


def heard(version: str, tokens: tuple[int, ...], digest: str, reason: str = "length") -> Heard:
    return Heard(ClientReply("pair", 0, tokens, version, ((version, 0, len(tokens)),), reason), digest)


def broken_off(*tokens: int) -> Heard:
    return Heard(ClientReply("pair", 0, tokens, "", (), "abort"), "", named=False)


def front(replica: str, version: str, digest: str, **changes: str) -> FrontView:
    return replace(FrontView(replica, "open", version, digest, f"{replica}-1", "open"), **changes)


def view(version: str, digest: str) -> View:
    return View(version, digest, (front("pair", version, digest), front("single", version, digest)))


def receipt(outcome: str = "committed", **changes: Any) -> dict[str, Any]:
    return {
        "outcome": outcome,
        "version": "0-1",
        "manifest_digest": "m",
        "live_version": "0-1" if outcome == "committed" else "start",
        "observed": {"pair": "new", "single": "new"},
        "proof": "digests",
        "failures": [],
        "reason": None,
        **changes,
    }


def good() -> Evidence:
    """A round that published 0-1 and then 0-2."""
    return Evidence(
        expected={"start": (OLD,), "0-1": (NEW,), "0-2": (OLD,)},
        published={"start": "old", "0-1": "new", "0-2": "newer"},
        heard=[heard("start", (1, 2, 3), "old"), heard("0-1", (1, 5, 7), "new"), broken_off(1, 5)],
        margin=0.5,
        max_tokens=3,
        allowed=frozenset({"lease_expired"}),
        update="round",
        answer=Answer(receipt=receipt()),
        history={"round": receipt()},
        before=view("start", "old"),
        rest=view("0-1", "new"),
        end=view("0-2", "newer"),
        next=[Next("disk", "0-2", Answer(receipt=receipt(version="0-2")))],
        left=[],
        only_coordinator=True,
    )


def refused() -> Evidence:
    """A round whose update was aborted because its lease ended."""
    why = [{"code": "lease_expired"}]
    kept = receipt("aborted", failures=why, reason="lease_expired", observed={})
    return replace(
        good(),
        heard=[],
        answer=Answer(("lease_expired",), kept),
        history={"round": kept},
        rest=view("start", "old"),
    )


def checks(evidence: Evidence) -> list[str]:
    return sorted({check for check, _ in judge(evidence).faults})


@pytest.mark.parametrize("evidence", [good(), refused(), replace(refused(), answer=None)])
def test_nothing_is_found_where_nothing_is_wrong(evidence: Evidence) -> None:
    assert judge(evidence).faults == ()


def test_what_was_compared_is_counted() -> None:
    verdict = judge(good())
    assert (verdict.replies, verdict.compared) == (2, 5)  # the last step of 0-1 is too close to call


def changed(**changes: Any) -> Callable[[], Evidence]:
    return lambda: replace(good(), **changes)


BROKEN: dict[str, tuple[str, Callable[[], Evidence]]] = {
    "a token of another version": ("replies", changed(heard=[heard("0-1", (1, 2, 3), "new")])),
    "a reply of two versions": (
        "replies",
        changed(
            heard=[Heard(ClientReply("pair", 0, (1, 5, 7), "0-1", (("start", 0, 1), ("0-1", 1, 3)), "length"), "new")]
        ),
    ),
    "a version that was refused": ("names", lambda: replace(good(), published={"start": "old", "0-2": "newer"})),
    "a version under another digest": ("names", changed(heard=[heard("0-1", (1, 5, 6), "old")])),
    "the beginning of nothing": ("names", changed(heard=[broken_off(1, 9)])),
    "two versions at once": (
        "one version",
        changed(rest=View("0-1", "new", (front("pair", "0-1", "new"), front("single", "start", "old")))),
    ),
    "two digests of one version": (
        "one version",
        changed(end=View("0-2", "newer", (front("pair", "0-2", "newer"), front("single", "0-2", "other")))),
    ),
    "a coordinator that says something else": (
        "one version",
        lambda: replace(good(), end=replace(good().end, version="0-1")),
    ),
    "a replica that stays shut": (
        "one version",
        changed(end=View("0-2", "newer", (front("pair", "0-2", "newer"), front("single", "", "", state="joining")))),
    ),
    "a member that the coordinator lost": (
        "one version",
        changed(end=View("0-2", "newer", (front("pair", "0-2", "newer", seen_as="lost"),))),
    ),
    "a receipt that the history does not know": ("receipt", changed(history={})),
    "another outcome in the history": ("receipt", lambda: replace(good(), history={"round": receipt("aborted")})),
    "a committed version that does not serve": ("receipt", lambda: replace(good(), rest=view("start", "old"))),
    "an aborted one that does": ("receipt", lambda: replace(refused(), rest=view("0-1", "new"))),
    "served under another digest than its receipt's": ("receipt", lambda: replace(good(), rest=view("0-1", "other"))),
    "a new version that was not published": (
        "receipt",
        lambda: replace(refused(), answer=None, history={}, rest=view("0-1", "new")),
    ),
    "a refusal without a reason": ("reasons", lambda: replace(refused(), allowed=frozenset())),
    "a second reason that is none": (
        "reasons",
        lambda: replace(refused(), answer=Answer(("lease_expired", "transport_unsupported"), receipt("aborted"))),
    ),
    "a reason that only the history tells": (
        "reasons",
        lambda: replace(refused(), answer=None, allowed=frozenset({"peer_lost"})),
    ),
    "a process": ("nothing left", changed(left=["process 7"])),
    "a next update that is refused": ("next update", changed(next=[Next("disk", "0-2", Answer(("busy",)))])),
    "a next update without an answer": ("next update", changed(next=[Next("disk", "0-2", None)])),
    "a next update that proves less": (
        "next update",
        changed(next=[Next("disk", "0-2", Answer(receipt=receipt(proof="structure_only")))]),
    ),
    "a replica shut by the coordinator": (
        "not shut",
        changed(rest=View("0-1", "new", (front("pair", "0-1", "new"), front("single", "", "", state="installed")))),
    ),
    "a replica that had to start anew": (
        "not shut",
        changed(rest=View("0-1", "new", (front("pair", "0-1", "new"), front("single", "0-1", "new", incarnation="2")))),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_is_found(name: str) -> None:
    check, evidence = BROKEN[name]
    assert check in checks(evidence())


def test_every_check_is_seen_to_fail() -> None:
    assert {check for check, _ in BROKEN.values()} == {"replies", *CHECKS}


def test_a_replica_that_the_round_killed_may_start_anew() -> None:
    rest = View("0-1", "new", (front("pair", "0-1", "new"), front("single", "0-1", "new", incarnation="2")))
    assert checks(replace(good(), rest=rest, touched=frozenset({"single"}))) == []
    assert checks(replace(good(), rest=rest, only_coordinator=False)) == []


def test_what_a_lost_journal_forgot_is_not_asked_for() -> None:
    assert checks(replace(good(), history={}, forgotten=True)) == []


def test_a_stream_that_ends_in_an_error_is_compared_as_far_as_it_came() -> None:
    told = {"version": "0-1", "digest": "new", "spans": [{"version": "0-1", "start": 0, "end": 2}]}
    chunks = [
        {"choices": [{"token_ids": [1], "finish_reason": None}]},
        {
            "choices": [{"token_ids": [5], "finish_reason": "error"}],
            "error": {"code": "rank_died"},
            "liveweights": told,
        },
    ]
    assert heard_of("pair", 0, chunks) == heard("0-1", (1, 5), "new", "abort")
    assert heard_of("pair", 0, chunks[:1]) == broken_off(1)


def test_a_seed_makes_one_round_and_seeds_in_a_row_go_through_all_actions() -> None:
    plans = [Plan.of(seed, NAMES, 4.0) for seed in range(100, 100 + len(NAMES))]
    assert plans == [Plan.of(plan.seed, NAMES, 4.0) for plan in plans]
    assert {plan.actions[0] for plan in plans} == set(NAMES)
    assert all(plan.phase in PHASES and 0 < plan.hold_s <= 4.0 for plan in plans)
    assert all(plan.what == "disk" for plan in plans if any(ACTIONS[name].disk for name in plan.actions))


def test_runs_add_up(tmp_path: Path) -> None:
    plan = replace(Plan.of(7, NAMES, 4.0), actions=("kill_front", "cut_ranks"))
    verdict = Verdict((("names", "x"),), replies=5, compared=60)
    for seed in (7, 8):
        run = Run("toy", "0.1.0", "2026-01-01", seed)
        run.add(Report(plan, verdict, "aborted", "staging", 1.0, Counter({"start replica": 1}), ()))
        record(run, tmp_path)
    text = (tmp_path / "reliability.md").read_text()
    assert "2 rounds: 2 mixed or wrongly named among 10 replies (120 tokens compared)" in text
    assert "| kill front | 2 | 0 | 2 | 0 | 0 | 0 | 2 |" in text
    assert "| cut ranks | 2 | 0 | 2 | 0 | 0 | 0 | 2 |" in text
    assert page([]).startswith("# Reliability")
