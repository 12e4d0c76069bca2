"""What is declared of vLLM: releases that were tried, servers that can be members, names that the code touches."""

from __future__ import annotations

import ast
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import engine_adapter.vllm
from engine_adapter.vllm.private import CLIENT_CALLS, NAMES, SUPPORTED_MINORS, check_server, choose_mode, supported
from engine_adapter.vllm.settings import MODE, RELOAD_S, WAIT_S, Mode, read
from engine_adapter.vllm.twins.table import HOOKS, METHODS, OPAQUE
from updater.server.security import ConfigurationError

HERE = Path(engine_adapter.vllm.__file__).parent
SOURCES = {str(path.relative_to(HERE)): path.read_text() for path in HERE.rglob("*.py") if path.name != "private.py"}
EXTENSION = "engine_adapter.vllm.worker.LiveweightsWorker"


# --- releases and modes


@pytest.mark.parametrize(
    ("found", "tried"),
    [
        ("0.32", True),
        ("0.32.0", True),
        ("0.32.1rc2", True),
        ("0.32.0+cpu", True),
        ("0.3.2", False),
        ("0.320.0", False),
        ("0.31.0", False),
        ("0.33.0", False),
        ("1.32.0", False),
        ("", False),
    ],
)
def test_a_release_that_was_not_tried_is_served_in_reload_mode_and_that_is_said(found: str, tried: bool) -> None:
    assert supported(found) is tried
    mode, why = choose_mode(Mode.STAGED, found)
    assert mode is (Mode.STAGED if tried else Mode.RELOAD)
    assert len(why) == (0 if tried else 1)
    assert all((found or "unknown") in line and SUPPORTED_MINORS[0] in line for line in why)
    assert choose_mode(Mode.RELOAD, found) == (Mode.RELOAD, ())


def server(**changes: Any) -> Any:
    """An engine client of which one thing is changed; `absent` names a call that it lacks."""
    parallel = {"data_parallel_size": 1, "nnodes": 1, "worker_extension_cls": EXTENSION}
    parallel = {name: changes.get(name, value) for name, value in parallel.items()}
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        load_config=SimpleNamespace(load_format=changes.get("load_format", "auto")),
        model_config=SimpleNamespace(is_encoder_decoder=changes.get("is_encoder_decoder", False)),
    )
    calls = {name: None for name in CLIENT_CALLS if name != changes.get("absent")}
    return SimpleNamespace(vllm_config=config, **calls)


@pytest.mark.parametrize(
    ("changes", "modes"),
    [
        ({}, set(Mode)),
        ({"worker_extension_cls": ""}, {Mode.RELOAD}),
        ({"load_format": "dummy"}, {Mode.STAGED}),
        ({"load_format": "safetensors"}, set(Mode)),
        ({"data_parallel_size": 2}, set()),
        ({"nnodes": 2}, set()),
        ({"is_encoder_decoder": True}, set()),
        ({"api_server_count": 2}, set()),
        ({"absent": "update_weight_version"}, set()),
    ],
)
def test_servers_that_can_be_members(changes: dict[str, Any], modes: set[Mode]) -> None:
    args = Namespace(api_server_count=changes.get("api_server_count", 1))
    for mode in Mode:
        if mode in modes:
            check_server(server(**changes), args, mode)
        else:
            with pytest.raises(ConfigurationError):
                check_server(server(**changes), args, mode)


ARGS = Namespace(host="127.0.0.1", port=8000)


def test_the_mode_and_the_deadline_of_a_reload_are_read_from_the_environment() -> None:
    assert (read(ARGS, {}).mode, read(ARGS, {}).reload_s) == (Mode.STAGED, 600.0)
    asked = read(ARGS, {MODE: "reload", RELOAD_S: "12.5", WAIT_S: "0"})
    assert (asked.mode, asked.reload_s, asked.limits.wait_s) == (Mode.RELOAD, 12.5, 0.0)


@pytest.mark.parametrize("env", [{MODE: "fast"}, {RELOAD_S: "soon"}, {RELOAD_S: "-1"}, {WAIT_S: "nan"}])
def test_settings_that_mean_nothing_are_refused(env: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError):
        read(ARGS, env)


# --- names: the list and the code


#: How the code calls an object of vLLM's -> what the list calls it.
OBJECTS = {
    "worker": "Worker",
    "_worker": "Worker",
    "runner": "GPUModelRunner",
    "compilation": "vllm.config.CompilationConfig",
    "compilation_config": "vllm.config.CompilationConfig",
    "client": "EngineClient",
    "_client": "EngineClient",
    "engine_client": "EngineClient",
}
LISTED = {*NAMES, *(f"EngineClient.{name}" for name in CLIENT_CALLS), "EngineClient.vllm_config"}


def touched(source: str) -> Iterator[str]:
    """Every attribute of a module of vLLM's, or of one of `OBJECTS`, as the list would name it."""
    tree = ast.parse(source)
    modules = dict(_imported(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner, name = node.value, node.attr
        elif isinstance(node, ast.Call) and _called(node) in ("getattr", "hasattr") and len(node.args) > 1:
            owner, name = node.args[0], getattr(node.args[1], "value", "?")
        else:
            continue
        known = _module(owner) or modules.get(_last(owner)) or OBJECTS.get(_last(owner))
        if known:
            yield f"{known}.{name}"


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(variable, module of vLLM's that it holds)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and _module(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((_last(target), _module(node.value)) for target in targets)


def _module(node: ast.expr) -> str:
    """Of `import_module("vllm...")`."""
    if not isinstance(node, ast.Call) or _called(node) != "import_module" or not isinstance(node.args[0], ast.Constant):
        return ""
    module = str(node.args[0].value)
    return module if module.split(".")[0] == "vllm" else ""


def _called(node: ast.Call) -> str:
    return _last(node.func)


def _last(node: ast.expr) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def test_the_reader_of_the_code_sees_what_it_is_to_see() -> None:
    source = """
a: Any = import_module("vllm.a")
a.one()
import_module("vllm.b").two
self._worker.three
getattr(runner, "four", ())
compilation.five = {}
import_module("json").loads
self.worker_name.six
"""
    assert set(touched(source)) == {
        "vllm.a.one",
        "vllm.b.two",
        "Worker.three",
        "GPUModelRunner.four",
        "vllm.config.CompilationConfig.five",
    }


@pytest.mark.parametrize("file", sorted(SOURCES))
def test_every_name_that_the_code_touches_is_listed_with_its_reason(file: str) -> None:
    assert set(touched(SOURCES[file])) - LISTED == set()


def test_every_class_of_the_tested_table_is_listed() -> None:
    assert {*METHODS, *OPAQUE, *HOOKS} - set(NAMES) == set()


def test_every_listed_name_is_touched_by_the_code_and_has_a_reason() -> None:
    words = {word for source in SOURCES.values() for word in re.findall(r"\w+", source)}
    assert {name for name in NAMES if name.split(".")[-1] not in words} == set()
    assert all(NAMES.values())
    assert {name for name in CLIENT_CALLS if name not in words} == set()


@pytest.mark.parametrize("file", sorted(SOURCES))
def test_vllm_is_imported_only_when_it_is_needed(file: str) -> None:
    """A front, a test and a type checker do without it."""
    imported = [
        alias.name if isinstance(node, ast.Import) else str(node.module)
        for node in ast.walk(ast.parse(SOURCES[file]))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    assert [name for name in imported if name.split(".")[0] == "vllm"] == []
