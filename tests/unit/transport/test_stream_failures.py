"""Whom a sender names, and in which order."""

from __future__ import annotations

import pytest

from transports.stream.connection import ConnectionClosed
from transports.stream.failures import FailureAttribution, named
from transports.stream.messages import Agreed, Close, Message
from transports.testing.transfer import seats_for
from updater.core.errors import Aborted, Failure
from updater.core.participant import StreamOffer
from updater.protocol import wire

OFFER = StreamOffer("shared_memory", "@x", "s", seats_for(1, 2))
STOPPED = Failure("client_abort", "cancelled")
DIGEST = Failure("tensor_digest", "not what was promised", tensor="w")


def places(error: Aborted) -> list[tuple[str, str, int | None]]:
    return [(failure.code, failure.replica, failure.rank) for failure in error.failures]


def test_one_failure_per_receiver_in_their_order() -> None:
    assert places(named(OFFER, "peer_timeout", {2, 0}, "late")) == [
        ("peer_timeout", "r0", 0),
        ("peer_timeout", "r1", 1),
    ]


def test_a_cause_comes_before_a_loss_and_a_loss_before_its_consequences() -> None:
    failures = FailureAttribution(OFFER)
    assert not failures
    failures.left(0, [STOPPED])
    assert failures
    assert not failures.known
    failures.seen(1, "peer_lost", "closed its connection")
    assert failures.known
    failures.left(2, [DIGEST])
    error = failures.error()
    assert places(error) == [("tensor_digest", "r1", 1), ("peer_lost", "r1", 0), ("peer_lost", "r0", 0)]
    assert error.failures[0].tensor == "w"
    assert "client_abort: cancelled" in error.failures[2].message


def test_who_lost_somebody_comes_after_who_was_lost() -> None:
    """A killed receiver breaks the group for another one, whose word for it may be read first."""
    failures = FailureAttribution(OFFER)
    failures.left(0, [Failure("peer_lost", "the group broke")])
    assert not failures.known
    failures.seen(2, "peer_lost", "closed its connection")
    assert failures.known
    assert places(failures.error()) == [("peer_lost", "r1", 1), ("peer_lost", "r0", 0)]


def test_a_refusal_keeps_its_code_and_a_loss_does_not() -> None:
    odd = Failure("config_mismatch", "another model")
    refused, left = FailureAttribution(OFFER), FailureAttribution(OFFER)
    refused.refused(0, [odd])
    left.left(0, [odd])
    assert (refused.error().code, left.error().code) == ("config_mismatch", "peer_lost")
    assert "config_mismatch" in left.error().failures[0].message


def test_equals_stay_in_the_order_in_which_they_were_heard() -> None:
    failures = FailureAttribution(OFFER)
    for number in (2, 0, 1):
        failures.left(number, [])
    assert [failure.rank for failure in failures.error().failures] == [1, 0, 0]


def test_many_reasons_make_an_error_of_bounded_size() -> None:
    failures = FailureAttribution(OFFER)
    failures.left(0, [STOPPED] * 300)
    failures.left(1, [DIGEST])
    error = failures.error()
    assert len(error.failures) == 100
    assert error.code == "tensor_digest"


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ([Close((DIGEST,))], "tensor_digest"),
        ([Close((STOPPED, DIGEST))], "tensor_digest"),
        ([Agreed()], None),
        (ConnectionClosed(), "peer_lost"),
        (wire.WireError("frame", "length", "too long"), "stream_mismatch"),
    ],
)
def test_last_words(said: list[Message] | Exception, code: str | None) -> None:
    def messages() -> list[Message]:
        if isinstance(said, Exception):
            raise said
        return said

    failures = FailureAttribution(OFFER)
    failures.hear(0, messages)
    assert (failures.error().code if failures else None) == code
