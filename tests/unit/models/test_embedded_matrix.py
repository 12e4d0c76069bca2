"""docs/embedded-engine.md says what the engine's capabilities say."""

from __future__ import annotations

from pathlib import Path

from engine_adapter.transformers.engine import CAPABILITIES
from engine_adapter.transformers.loading import Options
from updater.core.policy import CachePolicy, InFlight

PAGE = (Path(__file__).parents[3] / "docs" / "embedded-engine.md").read_text()


def rows(first: str) -> list[list[str]]:
    """Cells of the table whose header starts with `first`."""
    lines = PAGE.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    table = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return [table[0], *table[2:]]


def test_the_matrix_is_the_capabilities() -> None:
    header, *body = rows("in flight")
    written = {
        (InFlight(row[0]), CachePolicy(policy))
        for row in body
        for policy, cell in zip(header[1:], row[1:], strict=True)
        if cell.startswith("yes")
    }
    assert written == set(CAPABILITIES.cells)
    assert {row[0] for row in body} == {mode.value for mode in InFlight}


def test_the_options_are_the_options() -> None:
    _, *body = rows("option")
    written = {row[0].strip("`"): row[1].strip("`") for row in body}
    defaults = {name: getattr(Options(), name) for name in Options.__slots__}
    assert written == {
        name: str(value).lower()
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
        for name, value in defaults.items()
    }
