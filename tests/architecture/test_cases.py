"""Every case of docs/bug-cases.md has a test, and every id that a test names is a case."""

from __future__ import annotations

import re
from pathlib import Path

from tests.case_results import listed

TESTS = Path(__file__).parents[1]


def _tested() -> set[str]:
    marks = (mark for path in TESTS.rglob("*.py") for mark in re.findall(r"mark\.case\(([^)]*)\)", path.read_text()))
    return {case for mark in marks for case in re.findall(r'"([BF]\d+)"', mark)}


def test_every_case_has_a_test() -> None:
    assert listed() - _tested() == set()


def test_every_id_of_a_test_is_a_case() -> None:
    assert _tested() - listed() == set()
