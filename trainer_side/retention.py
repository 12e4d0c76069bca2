"""Folders of earlier pushes: what they are called, and when one may go.

A folder goes when newer ones enough exist *and* the coordinator no longer lists it as needed: deletion follows
consumption, never a clock (B022).
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

from trainer_side import flows
from trainer_side.flows import Flow
from updater.core.errors import LiveweightsError
from updater.core.version import Version
from updater.manifest import FILE_NAME

_NAME = re.compile(r"(?P<label>\d+-\d+)(\.(?P<copy>\d+))?")


def free_name(root: Path, label: str) -> Path:
    """`root/<label>`, or `<label>.2` and so on: a version that was refused may be pushed again, repaired, and what an
    earlier push left is never written over."""
    candidate, copy = root / label, 2
    while candidate.exists():
        candidate, copy = root / f"{label}.{copy}", copy + 1
    return candidate


def pushed(root: Path) -> list[Path]:
    """Folders that pushes wrote, oldest version first. Anything else in `root` is not ours to touch."""
    found = []
    for path in root.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink() and (path / FILE_NAME).is_file():
            found.append((Version.parse(match["label"]), int(match["copy"] or 1), path))
    return [path for _version, _copy, path in sorted(found)]


def surplus(root: Path, keep: int, needed: frozenset[str]) -> list[Path]:
    """What may go: all but the newest `keep` besides the newest one, less what is needed."""
    return [path for path in pushed(root)[: -(keep + 1)] if os.path.realpath(path) not in needed]


def tidy(root: Path, keep: int) -> Flow[list[Path]]:
    """Remove surplus folders and return them. A coordinator that cannot say what it needs keeps everything.

    The push has succeeded when this runs: nothing here makes it fail.
    """
    try:
        fleet = yield from flows.get("/v1/fleet")
    except LiveweightsError:
        return []
    needed = fleet.get("sources_needed")
    if not isinstance(needed, list):
        return []
    gone = surplus(root, keep, frozenset(os.path.realpath(str(path)) for path in needed))
    for path in gone:
        _remove(path)
    return gone


def _remove(path: Path) -> None:
    """Out of sight first, so that no reader finds half a folder under a version's name."""
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}.gone")
    try:
        os.rename(path, hidden)
    except OSError:
        return
    shutil.rmtree(hidden, ignore_errors=True)
