"""Small `GPTModel`s of megatron core on a machine without CUDA, shaped like a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from trainer_side.megatron.source import MegatronSource


def without_cuda() -> None:
    """Let megatron core 0.16 run forward and backward on the CPU, in this process and for good.

    It asks for the CUDA device in places that no option switches off (docs/megatron.md lists them): the rotary table,
    the router's weights, a tied embedding of two stages. Here they get the CPU, the dropout generator becomes the one
    that keeps no CUDA state, and a name that only exists beside Transformer Engine is given. Weights are not touched.
    """
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer.moe import moe_utils

    if torch.cuda.is_available():
        return
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.Tensor.cuda = lambda self, *_args, **_more: self  # type: ignore[method-assign]
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)


def gpt_chunks(config: Mapping[str, Any], *, dtype: torch.dtype = torch.float32, **options: Any) -> list[Any]:
    """The local chunks of a model shaped like `config` (config.json of a Llama, Qwen or Mixtral), weights random.

    `megatron.core.parallel_state` is initialised; its sizes decide what this rank gets. `options`: further fields of
    TransformerConfig.
    """
    from megatron.core import parallel_state as state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    made = transformer_config(config, dtype, **options)
    virtual = state.get_virtual_pipeline_model_parallel_world_size()
    chunks = []
    for stage in range(virtual or 1):
        vp_stage = stage if virtual else None
        chunks.append(
            GPTModel(
                config=made,
                transformer_layer_spec=get_gpt_decoder_block_spec(
                    made, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
                ),
                vocab_size=padded(config["vocab_size"]),
                max_sequence_length=config["max_position_embeddings"],
                pre_process=state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
                post_process=state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
                share_embeddings_and_output_weights=bool(config.get("tie_word_embeddings")),
                position_embedding_type="rope",
                rotary_base=rope_theta(config),
                vp_stage=vp_stage,
            ).to(dtype)
        )
    return chunks


@torch.no_grad()
def load_folder(source: MegatronSource, folder: str | Path) -> None:
    """Fill the model behind `source` from a Hugging Face checkpoint: every rank reads its own regions, and only them.

    The source has seen its weights change then: make another one to publish.
    """
    from safetensors import safe_open

    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for part in source.parts:
                if part.spec.name in tensors.keys():  # noqa: SIM118  (no mapping)
                    part.fill(tensors.get_slice(part.spec.name))


def transformer_config(config: Mapping[str, Any], dtype: torch.dtype, **options: Any) -> Any:
    """A TransformerConfig with the sizes of `config` and of `parallel_state`."""
    from megatron.core import parallel_state as state
    from megatron.core.transformer.transformer_config import TransformerConfig

    model_type = config["model_type"]
    heads = config["num_attention_heads"]
    fields: dict[str, Any] = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": config["num_key_value_heads"],
        "kv_channels": config.get("head_dim") or config["hidden_size"] // heads,
        "layernorm_epsilon": config["rms_norm_eps"],
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": model_type == "qwen2",
        "qk_layernorm": model_type == "qwen3",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "use_cpu_initialization": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "tensor_model_parallel_size": state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": state.get_virtual_pipeline_model_parallel_world_size(),
        "expert_model_parallel_size": state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": state.get_expert_tensor_parallel_world_size(),
    }
    if experts := config.get("num_local_experts"):
        fields |= {
            "num_moe_experts": experts,
            "moe_router_topk": config["num_experts_per_tok"],
            "moe_ffn_hidden_size": config["intermediate_size"],
            "moe_token_dispatcher_type": "allgather",  # the others make a CUDA stream
            "moe_router_load_balancing_type": "none",
        }
    return TransformerConfig(**(fields | options))


def padded(vocabulary: int, multiple: int = 16) -> int:
    """Rows of the embedding as Megatron pads them, so that they split over the ranks."""
    return -(-vocabulary // multiple) * multiple


def rope_theta(config: Mapping[str, Any]) -> Any:
    """Where transformers 4 and 5 keep it."""
    return (config.get("rope_parameters") or config)["rope_theta"]
