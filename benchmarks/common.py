"""What every benchmark shares: timing two things against each other, a table, rows for `bench-report.json`.

Both sides of a ratio are measured in turns, in one run and one process, so that a busy machine slows both. A missed
goal is a row with `holds: false`, never a failed command.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

REPORT = "bench-report.json"


@dataclass(frozen=True, slots=True)
class Row:
    """`goal` and `holds` are None for what is only printed."""

    name: str
    ratio: float
    goal: float | None
    holds: bool | None
    detail: str


class Report:
    """The rows of one benchmark."""

    def __init__(self, title: str, path: Path | None = None) -> None:
        self.title = title
        self.path = path if path is not None else Path(os.environ.get("LIVEWEIGHTS_BENCH_REPORT", REPORT))
        self.rows: list[Row] = []

    def add(
        self, name: str, ratio: float, *, goal: float | None = None, at_most: bool = False, detail: str = ""
    ) -> Row:
        """`at_most`: the goal is an upper bound; else a lower one."""
        holds = None if goal is None else (ratio <= goal if at_most else ratio >= goal)
        row = Row(name, round(ratio, 4), goal, holds, detail + (" (goal: at most)" if goal and at_most else ""))
        self.rows.append(row)
        return row

    def finish(self) -> None:
        """Print the table and add the rows to the report, in place of earlier rows of the same names."""
        table = Table("", "ratio", "goal", "holds", "detail", title=self.title)
        for row in self.rows:
            goal = "" if row.goal is None else f"{row.goal:g}"
            table.add_row(
                row.name, f"{row.ratio:.3f}", goal, {None: "", True: "yes", False: "NO"}[row.holds], row.detail
            )
        Console(width=160).print(table)
        names = {row.name for row in self.rows}
        earlier = json.loads(self.path.read_text()) if self.path.exists() else []
        rows = [row for row in earlier if row["name"] not in names] + [asdict(row) for row in self.rows]
        self.path.write_text(json.dumps(rows, indent=1) + "\n")


def best_of(rounds: int, *works: Callable[[], object]) -> list[float]:
    """Shortest wall time of each, in seconds; in turns, after one untimed round."""
    best = [float("inf")] * len(works)
    for turn in range(rounds + 1):
        for at, seconds in enumerate(_times(works)):
            if turn:
                best[at] = min(best[at], seconds)
    return best


def _times(works: tuple[Callable[[], object], ...]) -> Iterator[float]:
    for work in works:
        began = time.perf_counter()
        work()
        yield time.perf_counter() - began
