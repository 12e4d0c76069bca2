"""What a trainer tells of why it gave an update up."""

from __future__ import annotations

import pytest

from trainer_side.client.causes import bodies, cause_of, claimable
from updater.core.errors import Aborted, Failure, Rejected
from updater.protocol.api import MAX_CAUSES, MAX_TEXT, AbortBody, CauseBody

pytestmark = pytest.mark.case("F20")

WHOLE = Failure("peer_lost", "gone", replica="a", rank=0, tensor="w", file="f", hint="look there")


def test_a_cause_travels_whole() -> None:
    (body,) = bodies([WHOLE])
    read = CauseBody.model_validate(body)
    assert Failure(**read.model_dump(exclude_none=True)) == WHOLE
    bare = Failure("tensor_nonfinite", "NaN")
    assert bodies([bare]) == [{"code": bare.code, "message": bare.message}]


def test_only_what_is_its_own_to_tell_is_told() -> None:
    own = Failure("rank_failed", "x")
    told = [
        WHOLE,
        own,
        Failure("rank_failed", "y", replica="a"),  # a replica's, for it to say
        Failure("client_abort", "stop"),
        Failure("wrong_phase", "late"),
        own,
    ]
    assert claimable(told) == (WHOLE, own)
    AbortBody.model_validate({"failures": bodies(claimable(told))})


def test_causes_fit_into_a_request() -> None:
    long = Failure("rank_failed", "a" * 600 + "b", tensor="t" * 600, file="x" * 600 + "end", hint="h" * 600)
    many = [long, *(Failure("rank_failed", str(number)) for number in range(50))]
    found = claimable(many)
    assert len(found) == MAX_CAUSES
    assert found[0].message == "a" * MAX_TEXT
    assert found[0].file.endswith("end")
    AbortBody.model_validate({"failures": bodies(found)})


def test_an_error_of_ours_is_its_own_cause_and_another_is_named_by_its_class() -> None:
    ours = Rejected(WHOLE)
    assert cause_of(ours) is ours
    theirs = ValueError("secret")
    made = cause_of(theirs, "w")
    assert isinstance(made, Aborted)
    assert (made.code, made.failures[0].tensor, made.__cause__) == ("rank_failed", "w", theirs)
    assert "ValueError" in str(made)
    assert "secret" not in str(made)
