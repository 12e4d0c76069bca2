"""Codes, hints, and many failures as one text."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from updater.core import codes
from updater.core.errors import (
    CODES,
    EXAMPLES,
    RETRYABLE,
    Aborted,
    Failure,
    Group,
    Rejected,
    Unavailable,
    grouped,
    told,
    worth_a_retry,
)

PAGE = Path(__file__).parents[3] / "docs" / "errors.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == codes.page()


def test_every_code_has_a_status_and_one_sentence() -> None:
    for name, row in codes.TABLE.items():
        assert 400 <= row.status < 600, name
        assert row.meaning.endswith("."), name
        assert "|" not in row.meaning + row.hint, name
        assert not row.hint.endswith("."), name
    assert set(codes.TABLE) == set(CODES)


def test_a_server_that_cannot_answer_now_may_later() -> None:
    assert {name for name, status in CODES.items() if status == 503} <= RETRYABLE
    assert not {name for name in RETRYABLE if CODES[name] in (400, 401, 403, 404, 412, 422)}


@pytest.mark.case("F27")
def test_a_failure_without_a_hint_has_that_of_its_code() -> None:
    assert Failure("stale_version", "").hint == codes.TABLE["stale_version"].hint != ""
    assert Failure("stale_version", "", hint="closer").hint == "closer"
    assert Failure("internal", "").hint == ""
    error = Rejected(Failure("stale_version", "x"))
    assert error.hint == Failure("stale_version", "").hint
    assert error.hint in str(error)


def many(count: int) -> list[Failure]:
    return [
        Failure("tensor_narrowing", "F32 into BF16", replica="a", rank=number % 2, tensor=f"t{number // 2}")
        for number in range(count)
    ]


@pytest.mark.case("F26")
def test_one_sentence_that_is_said_many_times_is_one_sentence_with_a_count() -> None:
    error = Rejected(*many(42))
    assert str(error).count("F32 into BF16") == 1
    assert "42" in str(error)
    assert len(str(error)) < 500
    (group,) = error.groups
    assert (group.count, group.tensors, group.ranks, group.replicas, group.files) == (42, 21, 2, 1, 0)
    assert group.examples == (error.failures[0],)
    assert group.hint == error.failures[0].hint


def test_different_sentences_of_a_code_are_shown_up_to_a_number() -> None:
    failures = [Failure("tensor_shape", f"shape {number}", tensor=f"t{number}") for number in range(10)]
    (group,) = grouped(failures)
    assert group.examples == tuple(failures[:EXAMPLES])
    text = told((group,))
    assert all(each.message in text and f"tensor {each.tensor}" in text for each in group.examples)
    assert failures[EXAMPLES].message not in text
    (few,) = grouped(failures[:2])
    assert all(each.message in told((few,)) for each in failures[:2])


def test_groups_keep_the_order_of_the_causes_and_the_closer_hint() -> None:
    groups = grouped(
        [
            Failure("tensor_shape", "x"),
            Failure("client_abort", "y"),
            Failure("tensor_shape", "z", hint="closer"),
            Failure("tensor_shape", "z", hint="later"),
        ]
    )
    assert [(group.code, group.count, group.hint) for group in groups] == [
        ("tensor_shape", 3, "closer"),
        ("client_abort", 1, ""),
    ]


def test_one_hint_is_given_once() -> None:
    error = Aborted(Failure("tensor_shape", "x", hint="do this"), Failure("tensor_dtype", "y", hint="do this"))
    assert str(error).count("do this") == 1


def test_one_sentence_without_a_place() -> None:
    assert "2 times" in str(Unavailable(Failure("unreachable", "x"), Failure("unreachable", "x")))


def test_an_error_may_stand_for_more_failures_than_it_lists() -> None:
    group = Group("tensor_shape", 5000, (Failure("tensor_shape", "x"),), tensors=5000)
    error = Rejected(Failure("tensor_shape", "x"), groups=(group,), retryable=True)
    assert "5000" in str(error)
    assert error.retryable
    assert not Rejected(Failure("tensor_shape", "x")).retryable


@pytest.mark.case("F22")
def test_what_another_one_reads_whole_is_worth_a_retry() -> None:
    short = Failure("file_truncated", "x", replica="one", file="f")
    assert worth_a_retry([short], ["two"])
    assert not worth_a_retry([short], ["one"])
    assert not worth_a_retry([short])
    assert not worth_a_retry([Failure("tensor_shape", "x", replica="one"), short], ["two"])
    assert worth_a_retry([Failure("busy", "x")])
    assert not worth_a_retry([])


@pytest.mark.case("F27")
@pytest.mark.parametrize(
    ("code", "way"),
    [
        ("stale_version", "new_run"),
        ("tensor_narrowing", "allow_narrowing"),
        ("tensor_narrowing", "dtypes"),
        ("tensor_nonfinite", "--allow-nonfinite"),
        ("adapter_unsupported", "merge_and_unload"),
        ("manifest_required", "liveweights manifest"),
        ("busy", "on_busy"),
        ("quiesce_timeout", "--in-flight"),
        ("source_outside_roots", "--root"),
        ("member_blocked", "readmit"),
        ("adopt_needed", "adopt"),
        ("no_members", "liveweights engine"),
        ("replica_id_taken", "--replica"),
        ("replica_lost", "confirm_dead"),
        ("tensor_digest", "liveweights manifest"),
    ],
)
def test_a_refusal_with_a_way_out_names_it(code: str, way: str) -> None:
    assert way in Failure(code, "").hint


@pytest.mark.case("F27")
def test_every_refusal_by_a_precondition_has_a_way_out() -> None:
    assert not [name for name, row in codes.TABLE.items() if row.status == 412 and not row.hint]


@pytest.mark.case("F14")
def test_a_copy_of_an_error_is_whole() -> None:
    error = Aborted(Failure("busy", "it is busy", rank=1), live_version="0-1", receipt={"a": 1}, retryable=False)
    again = copy.copy(error)
    assert type(again) is Aborted
    assert (vars(again), again.args) == (vars(error), error.args)
