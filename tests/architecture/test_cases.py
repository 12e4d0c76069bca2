"""Every case of docs/bug-cases.md has a test, and every id that a test names is a case; what docs/hazards.md points to
exists, and every hazard that a comment cites is in its list.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.case_results import listed

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
HAZARDS = (ROOT / "docs" / "hazards.md").read_text()
PACKAGES = ("updater", "transports", "engine_adapter", "trainer_side")


def _tested() -> set[str]:
    """Ids in `mark.case(...)`, and those that stand first in a `Case(...)` of a parametrised test."""
    named = re.compile(r'mark\.case\(([^)]*)\)|\bCase\(\s*("[BF]\d+"),')
    marks = ("".join(found) for path in TESTS.rglob("*.py") for found in named.findall(path.read_text()))
    return {case for mark in marks for case in re.findall(r'"([^"]*)"', mark)}


def _names() -> set[str]:
    return set(re.findall(r"def (test_\w+)\(", "\n".join(path.read_text() for path in TESTS.rglob("*.py"))))


def test_every_case_has_a_test() -> None:
    assert listed() - _tested() == set()


def test_every_id_of_a_test_is_a_case() -> None:
    assert _tested() - listed() == set()


def test_every_mark_stands_on_a_test() -> None:
    """One on a helper is in no list of results. (The stories are tests by another file.)"""
    marked = {
        node.name
        for path in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and any("mark.case(" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
    assert len(marked) > 100
    assert {name for name in marked if not name.startswith(("test_", "Test"))} == set()


def test_ids_are_marks_and_no_part_of_names() -> None:
    """What stands in a name is in no list of results."""
    assert {name for name in _names() if re.search(r"_[BFbf]\d{2,3}(_|$)", name)} == set()


def test_what_the_hazards_point_to_exists() -> None:
    named = set(re.findall(r"`(\w+/[\w/]+\.\w+)`", HAZARDS))
    assert len(named) > 40
    assert {path for path in named if not (ROOT / path).is_file()} == set()


def test_every_hazard_that_is_cited_is_listed() -> None:
    listed_hazards = set(re.findall(r"^\| (\d+) \|", HAZARDS, re.MULTILINE))
    sources = (path.read_text() for name in (*PACKAGES, "tests") for path in (ROOT / name).rglob("*.py"))
    cited = {number for text in sources for number in re.findall(r"\b[Hh]azard (\d+)", text)}
    assert "12" in cited
    assert cited - listed_hazards == set()
