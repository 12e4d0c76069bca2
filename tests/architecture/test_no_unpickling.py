"""I10: nothing that came over a socket is unpickled or evaluated. No module of ours has a call that could."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("updater", "transports", "engine_adapter", "trainer_side")

#: Modules whose import alone means that bytes become objects or code.
MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "jsonpickle",
    "yaml",
    "runpy",
    "code",
    "codeop",
    "multiprocessing.managers",
    "multiprocessing.connection",
    "multiprocessing.queues",
    "multiprocessing.reduction",
    "torch.multiprocessing",
}
#: Builtins that run text.
BUILTINS = {"eval", "exec", "compile", "__import__"}
#: Attribute calls that unpickle or run text, whatever they are called on, by their last two names.
CALLS = {
    "torch.load",
    "torch.package",
    "torch.hub",
    "jit.load",
    "np.load",
    "numpy.load",
    "pd.read_pickle",
    "multiprocessing.Pipe",
    "multiprocessing.Queue",
    "multiprocessing.Manager",
    "mp.Pipe",
    "mp.Queue",
    "mp.Manager",
    "dist.broadcast_object_list",
    "dist.all_gather_object",
    "dist.gather_object",
    "dist.scatter_object_list",
    "dist.send_object_list",
    "dist.recv_object_list",
    "distributed.broadcast_object_list",
    "distributed.all_gather_object",
    "distributed.gather_object",
    "distributed.scatter_object_list",
    "os.system",
    "os.popen",
    "builtins.eval",
    "builtins.exec",
}
#: Names that mean the same wherever they come from.
NAMES = {call.rsplit(".", 1)[1] for call in CALLS if call.endswith(("object", "object_list"))} | {"read_pickle"}


def offences(source: str) -> list[str]:
    """`line: what` for every forbidden import, name and call of a module's text."""
    return sorted({f"{line}: {what}" for line, what in _walk(ast.parse(source))})


def _walk(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if _forbidden_module(alias.name))
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            for alias in node.names:
                whole = f"{module}.{alias.name}"
                if _forbidden_module(module) or _forbidden_module(whole) or _forbidden_call(whole):
                    yield node.lineno, whole
        elif isinstance(node, ast.Name) and node.id in BUILTINS:
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if _forbidden_call(name) or node.attr in NAMES:
                yield node.lineno, name
        elif isinstance(node, ast.Call):
            yield from _keywords(node)


def _keywords(call: ast.Call) -> Iterator[tuple[int, str]]:
    for keyword in call.keywords:
        value = keyword.value
        if keyword.arg == "shell" and not (isinstance(value, ast.Constant) and value.value is False):
            yield call.lineno, "shell="
        if keyword.arg in ("weights_only", "allow_pickle", "trust_remote_code"):
            dangerous = keyword.arg != "weights_only"
            if not (isinstance(value, ast.Constant) and value.value is not dangerous):
                yield call.lineno, f"{keyword.arg}="


def _forbidden_module(name: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in MODULES)


def _forbidden_call(name: str) -> bool:
    return ".".join(name.split(".")[-2:]) in CALLS or _forbidden_module(name)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_unpickles_or_evaluates(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    found = {str(path.relative_to(ROOT)): offences(path.read_text(encoding="utf-8")) for path in files}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import yaml\nyaml.load('x')",
        "eval('1')",
        "run = exec",
        "__import__('os')",
        "import builtins\nbuiltins.eval('1')",
        "from multiprocessing import Pipe",
        "import multiprocessing\nmultiprocessing.Queue()",
        "import torch.distributed as dist\ndist.broadcast_object_list([1])",
        "from torch.distributed import all_gather_object",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
        "import os\nos.system('ls')",
    ],
)
def test_the_check_sees_each_of_them(source: str) -> None:
    assert offences(source) != []


def test_the_check_lets_ordinary_code_pass() -> None:
    assert offences("import json, re\nre.compile('x')\njson.loads('1')\nmodel.eval()\nasyncio.run(main())") == []
