"""Where a rank stands among those that hold one model, and the sizes that decide how its parameters are cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from updater.core.errors import Failure, Rejected, refuse

#: Settings of megatron core under which parameters mean something else than these rules say: refused unless falsy.
_FOREIGN = (
    "attention_output_gate",
    "experimental_attention_variant",
    "fp8_param",
    "glu_linear_offset",
    "layernorm_zero_centered_gamma",
    "moe_latent_size",
    "multi_latent_attention",
    "rotary_interleaved",
)


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place in one kind of parallelism."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True, slots=True)
class Coordinates:
    """`tensor`: of everything but experts; `expert_tensor`: within one expert; `expert`: which experts.

    `copy`, `expert_copy`: number of this rank among those that hold the same parameters (data and context parallel);
    copy 0 speaks for all of them.
    """

    tensor: Seat = Seat()
    expert_tensor: Seat = Seat()
    expert: Seat = Seat()
    copy: int = 0
    expert_copy: int = 0

    @classmethod
    def here(cls) -> Coordinates:
        """Of this process, as `megatron.core.parallel_state` has it. Raises Rejected where that is not initialised."""
        from megatron.core import parallel_state as state

        if not state.model_parallel_is_initialized():
            raise refuse("bad_request", "megatron.core.parallel_state is not initialised: give coordinates")
        return cls(
            Seat(state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()),
            Seat(state.get_expert_tensor_parallel_rank(), state.get_expert_tensor_parallel_world_size()),
            Seat(state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size()),
            state.get_data_parallel_rank(with_context_parallel=True),
            state.get_expert_data_parallel_rank(),
        )


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of the whole model. `vocabulary`: rows of the real one, without padding; 0: all rows are real.

    `gated`: whether `linear_fc1` holds a gate besides the up projection. `tied`: the output layer is the embedding.
    """

    layers: int
    heads: int
    groups: int
    head_size: int
    vocabulary: int = 0
    experts: int = 0
    gated: bool = True
    tied: bool = False

    @classmethod
    def of(cls, config: Any, *, vocabulary: int, tied: bool) -> Geometry:
        """From a TransformerConfig. Raises Rejected `mode_unsupported` for settings that the layouts do not know."""
        foreign = [name for name in _FOREIGN if getattr(config, name, None)]
        if foreign:
            raise Rejected(*(Failure("mode_unsupported", f"megatron models with {name}") for name in foreign))
        return cls(
            layers=config.num_layers,
            heads=config.num_attention_heads,
            groups=config.num_query_groups or config.num_attention_heads,
            head_size=config.kv_channels,
            vocabulary=vocabulary,
            experts=config.num_moe_experts or 0,
            gated=bool(config.gated_linear_unit),
            tied=tied,
        )
