"""Property tests draw the same examples in every run; `make soak` draws new ones, and more of them.

`pytest -m case` ends with a table: id of the fault, test, result.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("soak", derandomize=False, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("LIVEWEIGHTS_EXAMPLES", "repeatable"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in item.iter_markers("case"):
            item.user_properties.extend(("case", case) for case in marker.args)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if "case" not in (config.option.markexpr or "").split():
        return
    rows = {
        (case, report.nodeid, outcome)
        for outcome in ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
        for report in terminalreporter.stats.get(outcome, [])
        for name, case in report.user_properties
        if name == "case"
    }
    terminalreporter.section("cases")
    for case, test, outcome in sorted(rows):
        terminalreporter.write_line(f"{case:6} {outcome:8} {test}")
