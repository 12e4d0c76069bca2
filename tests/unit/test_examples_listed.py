"""Every example is in the list, says how to run it, and is named by a test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(
    path.relative_to(ROOT / "examples").as_posix()
    for path in (*(ROOT / "examples").glob("[0-9]*"), ROOT / "examples/rl_loop/main.py")
)


def test_the_list_holds_every_example_and_no_other() -> None:
    listed = re.findall(r"\]\(([^)]+)\)", (ROOT / "examples/README.md").read_text())
    assert sorted(listed) == EXAMPLES


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_says_how_to_run_it_and_a_test_does(example: str) -> None:
    head = "\n".join((ROOT / "examples" / example).read_text().splitlines()[:15])
    assert f"examples/{example}" in head
    tests = "\n".join(path.read_text() for path in (ROOT / "tests/integration").glob("*.py"))
    assert Path(example).name in tests
