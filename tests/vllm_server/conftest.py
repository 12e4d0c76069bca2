"""Tests against stock vLLM. They run in an environment that has it (`make vllm`) and are skipped elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_server.fleet import Fleet, coordinator, member
from tests.vllm_server.models import Checkpoints, Dtype, make_checkpoints
from tests.vllm_server.server import STARTS

_HERE = Path(__file__).parent
_TIMEOUT_S = 900.0


def has_vllm() -> bool:
    """A folder of that name would be found as a namespace package, which has no origin."""
    spec = find_spec("vllm")
    return spec is not None and spec.origin is not None


class _Absent(pytest.Module):
    """A test file that is not imported."""

    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip("vLLM is not installed in this environment: make vllm", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if has_vllm():
        return None
    absent: _Absent = _Absent.from_parent(parent, path=module_path)
    return absent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All that lies here carries the marker, so that `-m vllm` forgets no file. First: `-m` is applied by this hook.

    A test that takes too long is interrupted by a signal: a timeout of the thread method would end this process and
    leave the server.
    """
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.vllm)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(_TIMEOUT_S, method="signal"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if STARTS.count:
        terminalreporter.write_line(str(STARTS))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Checkpoints]:
    """(name, dtype) -> two versions of that model, made once per session."""

    @cache
    def made(name: str, dtype: Dtype = "bfloat16") -> Checkpoints:
        return make_checkpoints(tmp_path_factory.mktemp(f"{name}-{dtype}"), name, dtype)

    return made


@pytest.fixture(scope="session")
def llama_fleet(checkpoints: Callable[..., Checkpoints], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A Llama at TP=1 in bfloat16, guarded by an API key per scope. Tests leave it on either checkpoint."""
    from tests.vllm_server.slow import ARGUMENTS, SLOW  # imports vLLM

    made, home = checkpoints("llama"), tmp_path_factory.mktemp("llama-fleet")
    admin, inference = "admin-of-the-fleet", "inference-only"
    roots = [made.first.parent, home]
    with coordinator(home / "coordinator", roots, admin) as at:
        options = ("--api-key", admin, inference, *ARGUMENTS)
        slow = home / "slow-steps"
        environment = {SLOW: str(slow)}
        with member(
            made.first, home / "server.log", at, roots=roots, arguments=options, environment=environment
        ) as server:
            server.client.headers["Authorization"] = f"Bearer {inference}"
            yield Fleet(at, server, made.first, made.second, made.first, inference, home, slow)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One rank by itself, as far as vLLM's layers ask; on one thread, so that equal sums are equal bits."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    distributed: Any = import_module("vllm.distributed")
    configs: Any = import_module("vllm.config")
    meeting = tmp_path_factory.mktemp("meeting") / "store"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_CI_ENV"):
            patch.setenv(name, "1")
        with configs.set_current_vllm_config(configs.VllmConfig()):
            distributed.init_distributed_environment(1, 0, f"file://{meeting}", 0, backend="gloo")
            distributed.ensure_model_parallel_initialized(1, 1)
        yield
        distributed.cleanup_dist_env_and_memory()
    torch.set_num_threads(threads)
