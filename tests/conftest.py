"""Property tests draw the same examples in every run; `make soak` draws new ones, and more of them.

`pytest -m case` ends with a table: id of the fault, result, time, test. Results of each run are kept beside those
of other environments (tests/case_results.py).
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import settings

from tests import case_results

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("soak", derandomize=False, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("LIVEWEIGHTS_EXAMPLES", "repeatable"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in item.iter_markers("case"):
            item.user_properties.extend(("case", case) for case in marker.args)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = case_results.of_run(terminalreporter.stats)
    case_results.record(rows)
    if "case" in (config.option.markexpr or "").split():
        terminalreporter.section("cases")
        for row in rows:
            terminalreporter.write_line(str(row))
