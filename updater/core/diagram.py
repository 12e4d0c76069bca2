"""Draws the two state tables: `python -m updater.core.diagram > docs/state-machines.md`."""

from __future__ import annotations

from collections.abc import Iterable

from updater.core.fleet.state import Phase
from updater.core.fleet.table import ROWS, SKIPPED, Row
from updater.core.participant import Kind
from updater.core.replica.table import ROWS as REPLICA_ROWS

HEAD = """# State machines

Generated from the tables in `updater/core` by `python -m updater.core.diagram`; a test keeps this page current. Do not
edit it by hand.
"""


def fleet_edges() -> list[tuple[str, str, str]]:
    """(from, to, why) of the fleet table."""
    edges = [("[*]", Phase.IDLE.value, ""), (Phase.IDLE.value, Phase.PLANNING.value, "begin")]
    for row in ROWS:
        edges += _edges_of(row)
    edges += [
        (Phase.REOPENING.value, Phase.READY.value, "only time ran out, attempts left"),
        (Phase.REOPENING.value, Phase.DISCARDING.value, "given up"),
        (Phase.REOPENING.value, Phase.IDLE.value, "rolled back"),
    ]
    return edges


def _edges_of(row: Row) -> list[tuple[str, str, str]]:
    edges = []
    if row.done is not None:
        edges.append((row.phase.value, row.done.value, _done(row)))
    if row.trouble is not None:
        why = "refusal, loss, deadline" + (", abort" if row.undo is not None else "")
        edges.append((row.phase.value, row.trouble.value, why))
    elif row.record is not None and not row.tolerant and not row.verb and row.done is Phase.INSTALLING:
        edges.append((row.phase.value, Phase.RESTORING.value, "a participant was lost meanwhile"))
    return edges


def _done(row: Row) -> str:
    if row.record is not None and not row.verb:
        return f"{row.record.value} is durable"
    if not row.verb:
        return "commit"
    return f"all answered {row.verb}" + (" or dropped out" if row.tolerant else "")


def replica_edges() -> list[tuple[str, str, str]]:
    """(from, to, triggers) of the replica table, without the rows that stay where they are."""
    edges: dict[tuple[str, str], list[str]] = {}
    for row in REPLICA_ROWS:
        for source in row.sources:
            for target in row.targets:
                if source is not target and not (len(row.sources) > 1 and target in row.sources):
                    edges.setdefault((source.value, target.value), []).append(row.trigger)
    return [("[*]", "joining", "start"), *((a, b, ", ".join(why)) for (a, b), why in edges.items())]


def mermaid(edges: Iterable[tuple[str, str, str]]) -> str:
    lines = [f"    {a} --> {b}" + (f" : {why}" if why else "") for a, b, why in edges]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])


def fleet_table() -> str:
    lines = ["| phase | on entry | verb | record | all acknowledged | trouble | client gives up |", "|" + "---|" * 7]
    for row in ROWS:
        cells = (
            row.phase.value,
            row.entry,
            row.verb,
            row.record.value if row.record else "",
            row.done.value if row.done else "as the row that came here says",
            row.trouble.value if row.trouble else ("that member drops out" if row.tolerant else "stop"),
            row.undo.value if row.undo else "too late",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def replica_table() -> str:
    lines = ["| state | trigger | next |", "|---|---|---|"]
    for row in REPLICA_ROWS:
        sources = ", ".join(source.value for source in row.sources)
        stays = set(row.sources) <= set(row.targets)
        targets = [target.value for target in row.targets if not stays or target not in row.sources]
        lines.append(f"| {sources} | {row.trigger} | {' or '.join(['the same'] * stays + targets)} |")
    return "\n".join(lines)


def skipped() -> str:
    lines = []
    for kind in Kind:
        phases = ", ".join(sorted(phase.value for phase in SKIPPED[kind]))
        lines.append(f"- {kind.value}: {phases or 'none'}")
    return "\n".join(lines)


def page() -> str:
    """The whole page."""
    parts = (
        HEAD,
        "## The fleet: one update\n",
        mermaid(fleet_edges()),
        "",
        fleet_table(),
        "\nAn error of the journal stops the coordinator in any phase. Phases that a kind of transaction skips:\n",
        skipped(),
        "\n## A replica\n",
        mermaid(replica_edges()),
        "",
        replica_table(),
        "",
    )
    return "\n".join(parts)


if __name__ == "__main__":  # pragma: no cover
    print(page(), end="")
