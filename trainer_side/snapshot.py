"""A copy of a trainer's weights, so that training may go on while they are published."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from trainer_side.lockstep import Lockstep
from trainer_side.walk import digests_of, walk
from trainer_side.weights import WeightSource, model_of
from updater.manifest import TensorSpec


class Snapshot:
    """A `WeightSource` of what `source` held when this was made. The sending rank keeps whole tensors, the others none.

    `copy`: one tensor, to where it is kept. Making it is collective for the ranks of `team`; raises the same on all.
    """

    def __init__(self, source: WeightSource, copy: Callable[[torch.Tensor], torch.Tensor], team: Lockstep) -> None:
        self.is_sender, self.group = source.is_sender, source.group
        self.specs: Mapping[str, TensorSpec] = dict(source.specs)
        self.ties = source.ties
        self.model = model_of(source)
        self._digests = dict(digests_of(source, team))
        self._kept: dict[str, torch.Tensor] = {}
        self._copy = copy
        failed = walk(source, self if self.is_sender else None, team)
        if failed is not None:
            raise failed

    def put(self, name: str, tensor: torch.Tensor) -> None:
        self._kept[name] = self._copy(tensor.detach())

    def digests(self) -> Mapping[str, str]:
        return self._digests

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Once: what was sent is not kept."""
        for name in self.specs:
            yield name, self._kept.pop(name, None)

    def check_untouched(self) -> None:
        """No other code has it."""
