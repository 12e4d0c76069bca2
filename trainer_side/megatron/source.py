"""`MegatronSource`: the local chunks of a `GPTModel` as a source of checkpoint tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from trainer_side.megatron.coordinates import Coordinates, Geometry
from trainer_side.megatron.parameters import Fragment, fragments, local_state
from trainer_side.megatron.parts import Here, MegatronPart
from trainer_side.megatron.plan import agree
from trainer_side.megatron.rules import IGNORED, TIE, Rule, rules_of
from trainer_side.ranks.agreement import RankAgreement
from trainer_side.sources.casts import Casts, Dtypes
from trainer_side.sources.parts import PartsSource
from transports.base import Box
from updater.core.errors import Failure, LiveweightsError, Rejected, refuse
from updater.protocol.manifest import TensorSpec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Model = torch.nn.Module | Sequence[torch.nn.Module]


class MegatronSource(PartsSource):
    """A `trainer_side.sources.WeightSource`. Made on every rank of `group` at the same time: making it is collective.

    `model`: the local `GPTModel`, or the list of its chunks (virtual pipeline stages); wrappers (`Float16Module`,
    `DistributedDataParallel`) may be around them.
    `naming`: a name of `rules.NAMINGS`, or rules of your own. `vocabulary`: rows of the real one, which cuts the
    padding off the embedding and the output layer; 0 keeps all rows.
    `group`: the ranks that hold one model, at least; default all. `sender_rank`: within it.
    `dtypes`: {glob pattern of checkpoint names: dtype} of tensors that travel rounded. `ignored`: glob patterns of
    Megatron's names that are not published. `coordinates`, `geometry`: for models that `parallel_state` and the
    config do not describe.

    Raises Rejected on every rank alike: `tensor_unexpected` for parameters that no rule names, `mode_unsupported` for
    settings that change what parameters mean, `placement_refused`, `tensor_missing`.
    """

    def __init__(
        self,
        model: Model,
        *,
        naming: str | Sequence[Rule] = "llama",
        vocabulary: int = 0,
        group: ProcessGroup | None = None,
        sender_rank: int = 0,
        dtypes: Dtypes | None = None,
        ignored: Sequence[str] = (),
        coordinates: Coordinates | None = None,
        geometry: Geometry | None = None,
    ) -> None:
        chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
        group = group or _world()
        casts, rules = Casts.of(dtypes), rules_of(naming)
        shape = geometry or geometry_of(chunks, vocabulary)
        held = _held(chunks, rules, coordinates, shape, (*IGNORED, *ignored))
        plans = agree(RankAgreement(group), held, shape, sender_rank)
        casts.check(plan.spec.name for plan in plans)
        here = Here(group, group.rank() if group else 0, sender_rank, _device(chunks, group))
        by_name = _by_name(held)
        parts = []
        for plan in plans:
            spec = plan.spec
            wire = TensorSpec(spec.name, casts.wire(spec.name, spec.dtype), spec.shape)
            parts.append(MegatronPart(wire, plan, by_name.get(spec.name, {}), here))
        self._tensors, self._here = tuple(parts), here
        super().__init__(parts, (TIE,) if shape.tied else (), group=group, sender_rank=sender_rank)

    @property
    def parts(self) -> Sequence[MegatronPart]:
        return self._tensors

    @torch.no_grad()
    def digests(self) -> Mapping[str, str]:
        """Of all tensors. Raises Rejected `copies_differ` where ranks hold different values of one region: a norm that
        drifted apart, a tied embedding of two stages whose gradients were not added up.
        """
        known = super().digests()
        self._compare_copies()
        return known

    def _compare_copies(self) -> None:
        """One all-reduce: each holder of a region that others hold too puts its own digest into a slot of its own."""
        copied = [
            (part, region) for part in self._tensors for region in part.planned.regions if len(region.holders) > 1
        ]
        if self._here.group is None or not copied:
            return
        mine = [
            part.region_share(region) if rank == self._here.rank else 0
            for part, region in copied
            for rank in region.holders
        ]
        digests = iter(self._added(self._here.group, mine))
        apart = []
        for part, region in copied:
            seen = {rank: next(digests) for rank in region.holders}
            for rank, digest in seen.items():
                if digest != seen[region.owner]:
                    text = f"not what rank {region.owner} holds"
                    apart.append(Failure("copies_differ", text, tensor=part.spec.name, rank=rank))
        if apart:
            raise Rejected(*apart)


def is_megatron(model: object) -> bool:
    """Whether it is a Megatron-core model, without importing megatron: a plain module's state would be one shard."""
    if isinstance(model, (list, tuple)):
        return bool(model) and all(is_megatron(chunk) for chunk in model)
    if not isinstance(model, torch.nn.Module):
        return False
    return any(home.__module__.startswith("megatron.core.") for home in type(model).__mro__)


def geometry_of(chunks: Sequence[torch.nn.Module], vocabulary: int = 0) -> Geometry:
    """Of the config that every `GPTModel` carries. Raises Rejected without one, or with one foreign to the rules."""
    for chunk in chunks:
        inner = _unwrapped(chunk)
        config = getattr(inner, "config", None)
        if config is not None and hasattr(inner, "share_embeddings_and_output_weights"):
            return Geometry.of(config, vocabulary=vocabulary, tied=bool(inner.share_embeddings_and_output_weights))
    raise refuse("bad_request", "no GPTModel with a config: give geometry")


def _held(
    chunks: Sequence[torch.nn.Module],
    rules: Sequence[Rule],
    coordinates: Coordinates | None,
    geometry: Geometry,
    ignored: Sequence[str],
) -> list[Fragment] | LiveweightsError:
    """A fault is not raised before all ranks know of it: the others would wait in the exchange."""
    try:
        where = coordinates or Coordinates.here()
        renamed = dict([TIE]) if geometry.tied else {}
        return fragments(local_state(chunks), rules, where, geometry, ignored=ignored, renamed=renamed)
    except LiveweightsError as error:
        return error


def _by_name(held: list[Fragment] | LiveweightsError) -> dict[str, dict[Box, Fragment]]:
    found: dict[str, dict[Box, Fragment]] = {}
    for fragment in held if isinstance(held, list) else ():
        found.setdefault(fragment.name, {})[fragment.box] = fragment
    return found


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    while isinstance(inner := module._modules.get("module"), torch.nn.Module):
        module = inner
    return module


def _world() -> ProcessGroup | None:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return torch.distributed.group.WORLD


def _device(chunks: Sequence[torch.nn.Module], group: ProcessGroup | None) -> torch.device:
    """Where the group's backend takes tensors from."""
    if group is not None and "gloo" in str(torch.distributed.get_backend(group)):
        return torch.device("cpu")
    first = next((parameter for chunk in chunks for parameter in chunk.parameters()), None)
    return torch.device("cpu") if first is None else first.device
