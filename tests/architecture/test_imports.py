"""The arrows between the packages, and what importing a part may load."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("updater", "transports", "engine_adapter", "trainer_side")

#: What a front needs to serve over HTTP.
FRONT_SERVER = tuple(f"updater.server.{name}" for name in ("connections", "guard", "security"))
#: package -> what it may import of ours, besides itself. A prefix covers what lies under it.
ALLOWED = {
    "updater": (),
    "transports": ("updater.core", "updater.protocol"),
    "engine_adapter": ("transports", "updater.core", "updater.protocol", "updater.ray", *FRONT_SERVER),
    "trainer_side": ("transports", "updater.core", "updater.protocol", "updater.ray"),
}
#: Composition roots: they put the parts together and may import everything.
ROOTS = {
    "updater.cli.main",
    "updater.cli.inspect",
    "updater.cli.against",
    "updater.cli.steps",
    "updater.cli.watch",
    "updater.demo.main",
}


def modules() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, also inside functions. `from a import b` counts as `a.b`, which may be a name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def crossings(module: str, path: Path) -> list[str]:
    package = module.split(".")[0]
    found = []
    for line, target in imports(path):
        home = target.split(".")[0]
        if home not in PACKAGES or home == package:
            continue
        if not any(target == prefix or target.startswith(f"{prefix}.") for prefix in ALLOWED[package]):
            found.append(f"{path.relative_to(ROOT)}:{line} imports {target}")
    return found


def test_packages_import_only_along_the_arrows() -> None:
    found = [line for module, path in modules() if module not in ROOTS for line in crossings(module, path)]
    assert found == []


#: Inside a package: what a room must not know.
CLOSED = {
    "engine_adapter.placement": ("rank", "replica", "hosted", "transformers", "vllm", "testing"),
    "engine_adapter.rank": ("replica", "hosted", "transformers", "vllm", "testing"),
    "engine_adapter.replica": ("hosted", "transformers", "vllm", "testing"),
    "engine_adapter.hosted": ("transformers", "vllm", "testing"),
    "engine_adapter.transformers": ("rank", "replica", "hosted", "vllm", "testing"),
    "engine_adapter.vllm": ("transformers",),
    "trainer_side.client": ("publishing", "ranks", "testing"),
    "trainer_side.ranks": ("publishing", "testing"),
    "trainer_side.sources": ("publishing", "testing"),
    "trainer_side.publishing": ("testing",),
    "updater.protocol": ("server", "settings", "coordinator", "ray", "cli", "demo", "testing"),
    "updater.server": ("ray", "cli", "demo", "testing"),
    "updater.coordinator": ("server.routes", "server.serving", "server.guard", "ray", "cli", "demo", "testing"),
    "updater.coordinator.machine": ("coordinator.coordinator", "coordinator.update", "coordinator.members"),
    "updater.coordinator.journal": ("server", "coordinator.machine", "coordinator.update", "coordinator.members"),
    "updater.ray": ("cli", "demo", "testing"),
}


@pytest.mark.parametrize("room", CLOSED)
def test_rooms_of_one_package_keep_apart(room: str) -> None:
    closed = tuple(f"{room.partition('.')[0]}.{name}" for name in CLOSED[room])
    looked = [(module, path) for module, path in modules() if module.startswith(f"{room}.") or module == room]
    assert looked
    found = [
        f"{module}:{line} imports {target}"
        for module, path in looked
        for line, target in imports(path)
        if target.startswith(closed)
    ]
    assert found == []


def test_nothing_but_the_entry_point_imports_a_composition_root() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {target}"
        for module, path in modules()
        if module not in ROOTS
        for line, target in imports(path)
        if any(target == root or target.startswith(f"{root}.") for root in ROOTS)
    ]
    assert found == []


#: The modules that need Ray. Others may name the first of them inside a function.
RAY = {"updater.ray.calls", "updater.ray.participant", "updater.ray_actor", "engine_adapter.ray_replica"}


@pytest.mark.slow
def test_only_the_actors_and_what_reaches_them_import_ray() -> None:
    found = {module for module, path in modules() for _line, target in imports(path) if target.split(".")[0] == "ray"}
    assert found
    assert found - RAY == set()


def test_core_imports_the_standard_library_only() -> None:
    found = [
        f"{module}:{line} imports {target}"
        for module, path in modules()
        if module.startswith("updater.core")
        for line, target in imports(path)
        if not target.startswith("updater.core") and target.split(".")[0] not in sys.stdlib_module_names
    ]
    assert found == []


def test_the_check_sees_a_forbidden_import(tmp_path: Path) -> None:
    path, late = ROOT / "transports" / "base.py", "updater.coordinator.coordinator"
    spoiled = tmp_path / "base.py"
    spoiled.write_text(path.read_text() + "\ndef late() -> None:\n    from updater.coordinator import coordinator\n")
    assert [target for _line, target in imports(spoiled) if target == late] == [late]
    assert not any(late.startswith(prefix) for prefix in ALLOWED["transports"])


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("updater.core", ("torch", "asyncio", "pydantic")),
        ("updater.core.fleet.machine", ("torch", "asyncio", "pydantic")),
        ("updater.core.replica.machine", ("torch", "asyncio", "pydantic")),
        ("updater.cli.main", ("torch", "transformers", "ray", "fastapi", "uvicorn")),
        ("updater.server.serving", ("torch", "transformers", "ray")),
        ("trainer_side.client.client", ("torch", "transformers", "ray", "fastapi", "starlette")),
        ("engine_adapter.replica.launch", ("torch", "transformers", "ray")),
        ("trainer_side", ("torch", "transformers", "ray", "megatron", "peft", "trl")),
    ],
)
def test_importing_is_light(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(*(name for name in {absent!r} if name in sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == []


def test_no_folder_of_tests_is_taken_for_a_package() -> None:
    """pytest puts folders of tests on the import path: one named like an optional package would make it seem there."""
    optional = {"accelerate", "megatron", "peft", "ray", "sglang", "transformers", "trl", "vllm"}
    assert [path for path in (ROOT / "tests").rglob("*") if path.is_dir() and path.name in optional] == []
