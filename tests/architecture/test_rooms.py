"""Rooms: how many modules a folder holds, how long a module is, which one is too small to stand
alone, and names of classes that occur twice.

Class names that occur twice are listed. The list may only become shorter: what is mended must be struck out.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.test_imports import PACKAGES, ROOT, imports, modules

FOLDER_LIMIT = 12  # modules besides `__init__`
LINES_LIMIT = 400
SMALL = 60  # lines; a shorter module with one importer moves in with it, unless it is a seam

#: Small modules with one importer that stay: each is a seam, a page of values, or the only place of a heavy import.
SEAMS = {
    "engine_adapter.hosted.rank",
    "transports.media.sealed_memory",
    "updater.cli.replica",
}
#: Public class names that occur more than once.
TWICE = set()


@cache
def lines() -> dict[str, int]:
    return {module: len(path.read_text().splitlines()) for module, path in modules()}


@cache
def importers() -> dict[str, set[str]]:
    """module of ours -> modules of the four packages that name it in an import."""
    known, found = set(lines()), defaultdict[str, set[str]](set)
    for module, path in modules():
        for _line, target in imports(path):
            home = target if target in known else target.rpartition(".")[0]
            if home in known and home != module:
                found[home].add(module)
    return found


def is_package(path: Path) -> bool:
    return path.name == "__init__.py"


def crowded() -> dict[str, int]:
    held = Counter(str(path.parent.relative_to(ROOT)) for _module, path in modules() if not is_package(path))
    return {folder: count - FOLDER_LIMIT for folder, count in held.items() if count > FOLDER_LIMIT}


def lonely() -> set[str]:
    """`__main__`-like modules, which no module imports, are not meant: they are run."""
    packages = {module for module, path in modules() if is_package(path)}
    return {
        module
        for module, length in lines().items()
        if module not in packages and length < SMALL and len(importers()[module]) == 1
    }


def public_classes() -> Counter[str]:
    trees = [ast.parse(path.read_text()) for _module, path in modules()]
    return Counter(
        node.name
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )


def test_no_folder_holds_more_modules_than_a_reader_keeps_in_mind() -> None:
    assert crowded() == {}


def test_no_module_is_longer_than_the_limit() -> None:
    assert {module for module, length in lines().items() if length > LINES_LIMIT} == set()


def test_a_small_module_with_one_importer_moves_in_with_it() -> None:
    assert lonely() == SEAMS


def test_a_public_class_name_occurs_once() -> None:
    assert {name for name, count in public_classes().items() if count > 1} == TWICE


@pytest.mark.parametrize("package", PACKAGES)
def test_the_checks_look_at_every_package(package: str) -> None:
    assert any(module.startswith(f"{package}.") for module in lines())
    assert any(module.startswith(f"{package}.") for module in importers())
