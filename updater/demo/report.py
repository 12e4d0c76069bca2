"""The demo's rows, as a table for people and as `demo-report.json`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from updater.cli import views
from updater.demo.clients import Load, Verdict
from updater.protocol.answers import Receipt


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One transaction as the table and the report show it. `expected`: whether it ended as the story says."""

    what: str
    version: str
    outcome: str
    expected: bool
    code: str = ""
    receipt: Receipt | None = None


def table(rows: Sequence[ReportRow]) -> Any:
    columns = ("version", "what", "outcome", "code", "proof", "read", "stage ms", "verify ms", "pause ms", "share")
    lines = []
    for row in rows:
        one = row.receipt
        pause = one.pause.pause_ms if one and one.pause else None
        share = f"{one.pause_share:.2%}" if one and one.pause_share is not None else ""
        phases = one.phases_ms if one else {}
        lines.append(
            (
                row.version,
                row.what,
                row.outcome,
                row.code,
                one.proof if one else "",
                views.size(one.bytes_read) if one and one.bytes_read else "",
                views.ms(phases.get("staging")),
                views.ms(phases.get("verifying")),
                views.ms(pause),
                share,
            )
        )
    return views.table("updates", columns, lines, right="read,stage ms,verify ms,pause ms,share")


def report_of(rows: Sequence[ReportRow], load: Load, verdict: Verdict) -> dict[str, Any]:
    return {
        "replies": verdict.replies,
        "mixed": len(verdict.mixed),
        "tokens_compared": verdict.compared,
        "tokens_left_out": verdict.left_out,
        "turned_away": dict(load.turned_away),
        "updates": [_report_row(row) for row in rows],
    }


def _report_row(row: ReportRow) -> dict[str, Any]:
    one = row.receipt
    return {
        "version": row.version,
        "what": row.what,
        "outcome": row.outcome,
        "code": row.code,
        "as_expected": row.expected,
        "kind": one.kind if one else None,
        "proof": one.proof if one else None,
        "bytes": one.bytes_read if one else 0,
        "update_ms": one.update_ms if one else None,
        "pause_ms": one.pause.pause_ms if one and one.pause else None,
        "pause": one.pause.model_dump(mode="json") if one and one.pause else None,
        "phases": one.phases_ms if one else {},
    }
