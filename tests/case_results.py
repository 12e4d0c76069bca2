"""Results of the tests that stand for a case, kept over runs: an environment of its own runs those against vLLM.

`make cases` prints id, result, time and test of the last run of each. It ends with 1 if no test passed for a case of
docs/bug-cases.md, or if one failed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "bug-cases.md"
RECORD = ROOT / ".pytest_cache" / "cases.json"
OUTCOMES = ("passed", "skipped", "xfailed", "xpassed", "failed", "error")  # what comes later counts


class Row(NamedTuple):
    """One test of one case. `at`: when it ran, UTC, to the second."""

    case: str
    outcome: str
    at: str
    test: str

    def __str__(self) -> str:
        return f"{self.case:6} {self.outcome:8} {self.at:20} {self.test}"


def listed() -> set[str]:
    """The ids of docs/bug-cases.md."""
    return set(re.findall(r"^\| ([BF]\d+) \|", PAGE.read_text(), re.MULTILINE))


def of_run(stats: Mapping[str, Iterable[Any]]) -> list[Row]:
    """The rows of a run, out of what pytest's terminal reporter counted."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    found = {
        (case, report.nodeid): outcome
        for outcome in OUTCOMES
        for report in stats.get(outcome, ())
        for name, case in getattr(report, "user_properties", ())
        if name == "case"
    }
    return sorted(Row(case, outcome, now, test) for (case, test), outcome in found.items())


def record(rows: Iterable[Row]) -> None:
    """Keep these beside what other runs left. A skipped test takes no result away that another environment had."""
    kept = {(row.case, row.test): row for row in recorded()}
    for row in rows:
        if row.outcome != "skipped" or (row.case, row.test) not in kept:
            kept[row.case, row.test] = row
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps(sorted(kept.values()), indent=0) + "\n")


def recorded() -> list[Row]:
    """The last result of each test that still exists."""
    if not RECORD.exists():
        return []
    return [row for row in (Row(*entry) for entry in json.loads(RECORD.read_text())) if _exists(row.test)]


def _exists(test: str) -> bool:
    path, _, names = test.partition("::")
    name = names.rpartition("::")[2].partition("[")[0]
    return (ROOT / path).is_file() and f"def {name}(" in (ROOT / path).read_text()


def main() -> int:
    rows = recorded()
    print(*rows, sep="\n")
    silent = sorted(listed() - {row.case for row in rows if row.outcome == "passed"})
    wrong = [row for row in rows if row.outcome not in ("passed", "skipped", "xfailed")]
    print(f"{len(rows)} results of {len({row.case for row in rows})} cases")
    if silent:
        print("no test passed for", *silent)
    return 1 if silent or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
