"""What the command line prints: tables for people, JSON for programs, bars for long work."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from updater.core.errors import Failure, LiveweightsError
from updater.protocol.answers import FleetState, MemberState, Receipt, VersionState
from updater.protocol.problems import problem_body

out = Console(width=None if sys.stdout.isatty() else 160)
err = Console(stderr=True, width=None if sys.stderr.isatty() else 160)

_COLOURS = {"committed": "green", "planned": "green", "rejected": "yellow", "aborted": "yellow", "rolled_back": "red"}


def print_json(value: Any) -> None:
    """One JSON document on stdout and nothing else."""
    sys.stdout.write(json.dumps(value, indent=2, sort_keys=True) + "\n")


def size(count: int | float) -> str:
    """Bytes in decimal units."""
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"


def ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def when(seconds: float | None) -> str:
    return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, right: str = "") -> Table:
    """`right`: names of right-aligned columns, separated by commas."""
    made = Table(title=title, title_justify="left", title_style="bold")
    numbers = set(right.split(","))
    for column in columns:
        made.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        made.add_row(*(cell if isinstance(cell, str) and cell.startswith("[") else escape(str(cell)) for cell in row))
    return made


def outcome(name: str) -> str:
    colour = _COLOURS.get(name, "white")
    return f"[{colour}]{escape(name)}[/{colour}]"


def receipt(one: Receipt) -> None:
    """A finished update: what happened, how long it took, and what is live."""
    out.print(
        table(
            f"update {one.id} ({one.kind})",
            ("version", "outcome", "proof", "read", "tensors changed", "update ms", "pause ms", "live"),
            [
                (
                    one.version,
                    outcome(one.outcome),
                    one.proof or "-",
                    size(one.bytes_read),
                    f"{one.tensors_changed} of {one.tensors}",
                    ms(one.update_ms),
                    ms(one.pause.pause_ms if one.pause else None),
                    one.live_version or "-",
                )
            ],
            right="read,tensors changed,update ms,pause ms",
        )
    )
    if one.pause:
        out.print(breakdown(one))
    for warning in one.warnings:
        err.print(f"[yellow]warning[/yellow] {escape(warning)}")


def finished(one: Receipt, *, as_json: bool) -> None:
    """A receipt for a program or for people."""
    if as_json:
        print_json(one.model_dump(mode="json"))
    else:
        receipt(one)


def passed_over(folder: Path, why: str) -> None:
    """A checkpoint that is there and is not published."""
    err.print(f"{escape(folder.name)}: {escape(why)}", soft_wrap=True, highlight=False)


def breakdown(one: Receipt) -> str:
    """The phases and the parts of the pause, in milliseconds."""
    phases = " ".join(f"{name.lower()} {value:.1f}" for name, value in one.phases_ms.items())
    return f"phases ms: {phases}\n{pause_parts(one)}"


def pause_parts(one: Receipt) -> str:
    """One line, or nothing for an update that never paused."""
    p = one.pause
    if p is None:
        return ""
    parts = (
        f"decide {p.decide_ms:.1f} + install {p.install_ms:.1f} + invalidate {p.invalidate_ms:.1f} + "
        f"publish {p.publish_ms:.1f} + resume {p.resume_ms:.1f}"
    )
    return f"pause {p.pause_ms:.1f} ms = {parts}; quiesce before it {p.quiesce_ms:.1f}"


def status(version: VersionState, fleet: FleetState) -> None:
    out.print(f"[bold]live[/bold] {version.version or '-'}   since {when(version.since) or '-'}")
    out.print(f"[bold]rollback to[/bold] {version.rollback_to or '-'}   digest {version.digest[:16] or '-'}")
    out.print(f"[bold]phase[/bold] {fleet.phase}   epoch {fleet.epoch}   update {fleet.update or '-'}")
    rows = [_member(member) for member in fleet.members]
    columns = ("replica", "state", "live", "spare", "engine", "ranks", "weights", "url")
    out.print(table(f"fleet {fleet.fleet} {fleet.identity}".strip(), columns, rows, right="ranks,weights"))
    if fleet.hold is not None:
        err.print(f"[red]{fleet.hold.code}[/red] {escape(fleet.hold.message)}; {escape(fleet.hold.hint)}")
    for stranger in fleet.strangers:
        whose = f"{stranger.state} on {stranger.live_version}, obeys fleet {stranger.fleet or 'none'}"
        err.print(f"no member: {escape(stranger.replica)} at {escape(stranger.url)}: {escape(whose)}")
    for member in fleet.members:
        for failure in member.failures:
            _why(member.replica, failure)
        if member.state != "open" and member.hint:
            err.print(f"{escape(member.replica)} is {member.state}: {escape(member.hint)}")
    for failure in fleet.refused:
        _why(f"{failure.replica} may not join", failure)


def _why(who: str, failure: Failure) -> None:
    hint = f". Hint: {failure.hint}" if failure.hint else ""
    err.print(f"{escape(who)}: [red]{failure.code}[/red] {escape(failure.message + hint)}")


def _member(member: MemberState) -> tuple[object, ...]:
    weights = sum(int(rank.get("weight_bytes", 0)) for rank in member.ranks)
    spare = f"{member.spare} {member.spare_version}".strip()
    return (
        member.replica,
        member.state,
        member.live_version,
        spare,
        member.engine,
        len(member.ranks),
        size(weights),
        member.url,
    )


def history(receipts: Sequence[Receipt]) -> None:
    rows = [
        (
            when(one.ended_at),
            one.id,
            one.kind,
            one.version,
            outcome(one.outcome),
            one.reason or "",
            ms(one.update_ms),
            ms(one.pause.pause_ms if one.pause else None),
        )
        for one in receipts
    ]
    columns = ("ended", "id", "kind", "version", "outcome", "reason", "update ms", "pause ms")
    out.print(table("history", columns, rows, right="update ms,pause ms"))


def error(problem: LiveweightsError, *, as_json: bool) -> None:
    """An error: its text, as over HTTP and in Python, and what is live. As JSON: the problem document on stdout."""
    if as_json:
        extra = {"receipt": problem.receipt} if problem.receipt is not None else {}
        print_json(problem_body(problem, **extra))
        return
    # Not wrapped: what is printed can be searched for, and pasted.
    err.print(f"[bold]{type(problem).__name__.lower()}[/bold]: {escape(str(problem))}", soft_wrap=True, highlight=False)
    retry = "a retry makes sense" if problem.retryable else "a retry would end the same way"
    err.print(f"live: {problem.live_version or 'unknown'}; {retry}")


@contextmanager
def byte_bar(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr that is told of bytes as they pass; silent where stderr is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.update(task, advance=count)


@contextmanager
def phase_bar(what: str) -> Iterator[Callable[[str, Mapping[str, Any]], None]]:
    """A spinner on stderr that shows the phase, and bytes where an event tells of them (`done`, `total`)."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(what, total=None)

        def show(name: str, data: Mapping[str, Any]) -> None:
            phase = str(data.get("phase", "")).lower()
            description = f"{what} {phase}".strip()
            done, total = data.get("done"), data.get("total")
            if isinstance(done, int) and isinstance(total, int) and total:
                description += f" {size(done)} of {size(total)}"
                progress.update(task, description=description, completed=done, total=total)
            elif name == "phase":
                progress.reset(task, total=None, description=description)

        yield show
