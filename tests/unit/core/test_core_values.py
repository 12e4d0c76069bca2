"""Versions, policies, errors: what they accept, and what they refuse."""

from __future__ import annotations

import pytest

from updater.core.errors import CODES, RETRYABLE, Aborted, Failure, LiveweightsError, Rejected, refuse
from updater.core.policy import CachePolicy, Capabilities, InFlight, InstallMode, Policy, PreviousMode, conflict
from updater.core.version import START, Version


def test_labels_go_there_and_back() -> None:
    for version in (START, Version(0, 0), Version(3, 57)):
        assert Version.parse(str(version)) == version


def test_versions_are_ordered_by_run_then_step() -> None:
    assert START < Version(0, 0) < Version(0, 9) < Version(1, 0)


@pytest.mark.parametrize("label", ["", "1", "0-", "-1-0", "00-1", "0-1 ", "0--1", "1-1-1", "x-y", "0-" + "9" * 19])
def test_a_bad_label_is_refused(label: str) -> None:
    with pytest.raises(ValueError, match="version label"):
        Version.parse(label)


@pytest.mark.parametrize(("run", "step"), [(-1, 0), (0, -2), (1, -1)])
def test_a_bad_version_is_refused(run: int, step: int) -> None:
    with pytest.raises(ValueError, match="version"):
        Version(run, step)


@pytest.mark.parametrize(
    "policy",
    [
        Policy(in_flight=InFlight.KEEP, cache=CachePolicy.RESET),
        Policy(in_flight=InFlight.RECOMPUTE, cache=CachePolicy.KEEP),
        Policy(install=InstallMode.NONE),
        Policy(previous=PreviousMode.KEEP_HOST),
        Policy(partial=True),
        Policy(deadline_s=0),
        Policy(quiesce_s=-1),
        Policy(pause_lease_s=1e9),
        Policy(attempts=0),
        Policy(attempts=11),
    ],
)
def test_a_policy_that_nobody_could_honour(policy: Policy) -> None:
    assert conflict(policy)


def test_the_default_policy_is_fine() -> None:
    assert conflict(Policy()) is None


def test_an_engine_refuses_what_it_does_not_support() -> None:
    engine = Capabilities(cells=((InFlight.DRAIN, CachePolicy.RESET),), install=(InstallMode.FLIP,))
    assert engine.refuses(Policy(), "disk") is None
    assert engine.refuses(Policy(install=InstallMode.FLIP), "disk") is None
    assert engine.refuses(Policy(in_flight=InFlight.ABORT), "disk")
    assert engine.refuses(Policy(install=InstallMode.EXCHANGE), "disk")
    assert engine.refuses(Policy(), "pigeon")
    assert all(cell[0].value in engine.offers() and cell[1].value in engine.offers() for cell in engine.cells)
    assert all(transport in engine.offers() for transport in engine.transports)


def test_a_failure_needs_a_known_code() -> None:
    with pytest.raises(ValueError, match="code"):
        Failure("no such code", "")


def test_a_failure_keeps_the_place_that_it_names() -> None:
    named = Failure("rank_failed", "", replica="a", rank=1)
    assert named.at(replica="b", rank=2) == named
    assert (Failure("rank_failed", "").at(replica="b", rank=2).replica, named.rank) == ("b", 1)


def test_an_error_speaks_with_its_first_failure() -> None:
    error = Aborted(
        Failure("tensor_digest", "x", tensor="t", file="f"), Failure("rank_failed", "y", replica="a", rank=0)
    )
    assert (error.code, error.status, error.retryable) == ("tensor_digest", 422, False)
    for place in ("tensor t", "file f", "replica a", "rank 0"):
        assert place in str(error)
    assert Rejected(Failure("busy", "")).retryable
    assert refuse("file_header", "m", file="f").failures == (Failure("file_header", "m", file="f"),)


def test_an_error_without_a_failure_is_refused() -> None:
    with pytest.raises(ValueError, match="failure"):
        LiveweightsError()


def test_what_is_worth_a_retry() -> None:
    assert set(CODES) >= RETRYABLE
    assert "replica_id_taken" not in RETRYABLE
