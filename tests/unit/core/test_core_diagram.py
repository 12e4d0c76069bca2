"""The page of the state machines is what the tables say."""

from __future__ import annotations

from pathlib import Path

import pytest

from updater.core import diagram
from updater.core.fleet.state import Phase
from updater.core.fleet.table import ROWS
from updater.core.participant import MESSAGES, FrontState
from updater.core.replica.table import ROWS as REPLICA_ROWS

PAGE = Path(__file__).parents[3] / "docs" / "state-machines.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == diagram.page()


def test_every_phase_but_the_two_at_rest_has_a_row() -> None:
    assert {row.phase for row in ROWS} == set(Phase) - {Phase.IDLE, Phase.STOPPED}


def test_no_state_has_two_rows_for_one_trigger() -> None:
    pairs = [(source, row.trigger) for row in REPLICA_ROWS for source in row.sources]
    assert len(pairs) == len(set(pairs))


def test_every_front_state_and_every_verb_that_moves_one_is_in_the_table() -> None:
    states = {state for row in REPLICA_ROWS for state in (*row.sources, *row.targets)}
    assert states == set(FrontState)
    assert {row.trigger.split()[0] for row in REPLICA_ROWS} >= set(MESSAGES) - {"describe", "status"}


@pytest.mark.case("F45")
def test_every_verb_of_the_contract_is_sent() -> None:
    """By a phase, or beside the phases: a look, the first word of a coordinator, an admission."""
    assert {row.verb for row in ROWS if row.verb} | {"describe", "status", "lead", "join"} == set(MESSAGES)


def test_phases_that_wait_for_messages_have_a_deadline() -> None:
    """I9."""
    for row in ROWS:
        if row.verb:
            assert row.timer is not None
            assert row.seconds is not None or row.timer is not row.phase
