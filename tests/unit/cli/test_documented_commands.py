"""Every `liveweights` command line that README and docs show is one that the CLI takes."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from updater.cli.main import app

ROOT = Path(__file__).parents[3]
#: Of the click that typer brings along.
UsageError: Any = typer.BadParameter.__base__
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def shown(text: str) -> list[list[str]]:
    """The arguments of each command line in a fenced block, continued lines joined, without prompt and comment."""
    found, fenced = [], False
    for line in text.replace("\\\n", " ").splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        words = shlex.split(line.strip().removeprefix("$ "), comments=True) if fenced else []
        if words[:1] == ["liveweights"]:
            found.append([word for word in words[1:] if word != "&"])
    return found


COMMANDS = [(path.name, line) for path in FILES for line in shown(path.read_text())]


def parse(line: list[str]) -> None:
    """As the CLI would, without running anything. Raises UsageError."""
    group: Any = typer.main.get_command(app)
    with group.make_context("liveweights", line[:1]) as context:
        name, command, _ = group.resolve_command(context, line[:1])
        command.make_context(name, line[1:], parent=context).close()


@pytest.mark.parametrize(("file", "line"), COMMANDS, ids=lambda value: value if isinstance(value, str) else value[0])
def test_a_documented_command_is_one_that_the_cli_takes(
    file: str, line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for word in line:
        if word.startswith("./"):  # some folder of the reader's
            Path(word).mkdir(parents=True, exist_ok=True)
    parse(line)


def test_there_are_such_commands_and_others_are_refused() -> None:
    assert len({line[0] for _, line in COMMANDS}) >= 6
    assert shown("```sh\n$ liveweights push a \\\n    7 --manifest &   # why\n```\nliveweights x") == [
        ["push", "a", "7", "--manifest"]
    ]
    for wrong in (["rollback", "start"], ["fleet"], ["status", "--no-such-option"]):
        with pytest.raises(UsageError):
            parse(wrong)
