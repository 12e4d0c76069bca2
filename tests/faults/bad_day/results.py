"""What rounds came to, added up over runs: `docs/reliability.json` holds the numbers, `docs/reliability.md` the table.
A run that had findings is given `mended` by hand: what they were, and what the same seeds came to afterwards.

`python -m tests.faults.bad_day.results` writes the page anew from the numbers.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.bad_day.course import Report

FOLDER = Path(__file__).parents[3] / "docs"
_COLUMNS = ("rounds", "committed", "aborted", "rolled_back", "rejected", "not_told", "faults")


@dataclass
class Run:
    """`rows`: action -> column -> count. A round of two bad things counts in the row of each."""

    engine: str
    release: str
    date: str
    first_seed: int
    totals: Counter[str] = field(default_factory=Counter)
    rows: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, report: Report) -> None:
        mixed = sum(check in ("replies", "names") for check, _ in report.verdict.faults)
        self.totals.update(
            {
                "rounds": 1,
                "replies": report.verdict.replies,
                "compared": report.verdict.compared,
                "mixed": mixed,
                "faults": len(report.verdict.faults),
                "operator": sum(report.operator.values()),
            }
        )
        for name in report.plan.actions:
            row = self.rows.setdefault(name, Counter())
            row.update({"rounds": 1, report.outcome or "not_told": 1, "faults": len(report.verdict.faults)})

    def plain(self) -> dict[str, Any]:
        told = {"engine": self.engine, "release": self.release, "date": self.date, "first_seed": self.first_seed}
        rows = {name: dict(sorted(row.items())) for name, row in sorted(self.rows.items())}
        return {**told, "totals": dict(self.totals), "rows": rows}


def record(run: Run, folder: Path = FOLDER) -> None:
    """Add a run to the numbers, and write the page."""
    file = folder / "reliability.json"
    runs = json.loads(file.read_text()) if file.exists() else []
    runs.append(run.plain())
    file.write_text(json.dumps(runs, indent=1) + "\n")
    (folder / "reliability.md").write_text(page(runs))


def page(runs: Sequence[Mapping[str, Any]]) -> str:
    """The whole of `docs/reliability.md`."""
    engines = sorted({str(run["engine"]) for run in runs})
    parts = [_HEAD]
    for engine in engines:
        mine = [run for run in runs if run["engine"] == engine]
        parts.append(f"## {engine}\n\n{_sum(mine)}\n\n{_table(mine)}")
    parts.append(_runs(runs))
    return "\n\n".join(parts) + "\n"


_HEAD = """# Reliability

A driver with a seed does bad things to a live fleet: a coordinator, a replica over two ranks and one over a single
rank, clients that stream from both, a trainer that publishes over disk, broadcast and shared memory. In every round one
or two things go wrong at a random moment of a random phase. Then what an operator would mend is mended, the fleet comes
to rest, and is judged:

- every token of every reply is compared with plain generation on the checkpoint of the version that the reply names;
- all open replicas serve one version, the one that the coordinator names;
- what the publisher was told agrees with the history and with what is served;
- a refused update was refused for a reason that the round gives;
- no process, temporary file, shared memory or socket is left behind;
- the next update commits over each transport, and after it all replicas are open;
- no fault of the coordinator alone shut a replica that served a published version.

`make test` plays fixed seeds on toy engines, and three rounds on two stock vLLM servers, one of them over two ranks:
no process of these is killed, their ranks stand still or are cut off. `make soak` plays new seeds, on embedded engines
and on vLLM too, with every bad thing. What a stock vLLM keeps in its temporary folder while it serves is not counted
as left behind; its processes wait for each other by sleeping instead of `sched_yield`, which on Linux 6.18 keeps a
process off its core for minutes; and its fleet has three times the deadlines. By hand, one round or many (`--engine
vllm` leaves out what ends a vLLM process, unless `--all` is given):

```console
$ python -m tests.faults.bad_day --seed 12 --rounds 1 --engine toy
```

A round is named by its seed, and prints what happened when. With `--record` its numbers are added to this page. A round
of two bad things counts in the row of each."""


def _sum(runs: Iterable[Mapping[str, Any]]) -> str:
    total = Counter[str]()
    for run in runs:
        total.update(run["totals"])
    return (
        f"{total['rounds']} rounds: {total['mixed']} mixed or wrongly named among {total['replies']:,} replies "
        f"({total['compared']:,} tokens compared), {total['faults']} findings in all. An operator had to act "
        f"{total['operator']} times: to start again what had been killed or had ended itself, or to readmit a replica."
    )


def _table(runs: Iterable[Mapping[str, Any]]) -> str:
    rows: dict[str, Counter[str]] = {}
    for run in runs:
        for name, row in run["rows"].items():
            rows.setdefault(name, Counter()).update(row)
    lines = ["| what | " + " | ".join(column.replace("_", " ") for column in _COLUMNS) + " |"]
    lines.append("|---|" + "---:|" * len(_COLUMNS))
    for name, row in sorted(rows.items()):
        lines.append(f"| {name.replace('_', ' ')} | " + " | ".join(str(row[column]) for column in _COLUMNS) + " |")
    return "\n".join(lines)


def _runs(runs: Sequence[Mapping[str, Any]]) -> str:
    lines = ["## Runs", "", "| date | release | engine | seeds | findings |", "|---|---|---|---|---:|"]
    for run in runs:
        first, rounds = run["first_seed"], run["totals"]["rounds"]
        seeds = f"{first} to {first + rounds - 1}"
        told = (run["date"], run["release"], run["engine"], seeds, str(run["totals"]["faults"]))
        lines.append(f"| {' | '.join(told)} |")
    lines += [f"\n{run['mended']}" for run in runs if "mended" in run]
    return "\n".join(lines)


def main() -> int:
    (FOLDER / "reliability.md").write_text(page(json.loads((FOLDER / "reliability.json").read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
