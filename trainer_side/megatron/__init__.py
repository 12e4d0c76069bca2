"""A Megatron-core model as a `trainer_side.sources.WeightSource`, under the names that engines load.

What a parameter becomes is data (`rules`): a name, a way in which it lies in checkpoint tensors (`layouts`), and
their names. Every rank cuts its own parameters to fragments, the ranks exchange what they hold once (`plan`), and from
then on specs, digests and whole tensors follow from fragments alone. Only `coordinates` asks megatron anything, on
first use; nothing here knows of engines or of updates.
"""

from __future__ import annotations

from trainer_side.megatron.coordinates import Coordinates, Geometry, Seat
from trainer_side.megatron.rules import NAMINGS, Rule
from trainer_side.megatron.source import MegatronSource, is_megatron

__all__ = [
    "NAMINGS",
    "Coordinates",
    "Geometry",
    "MegatronSource",
    "Rule",
    "Seat",
    "is_megatron",
]
