"""Every kind of trainer as a `trainer_side.sources.WeightSource`: `as_source` finds the right one.

A source is a list of parts (`parts.Part`), one per tensor of the checkpoint: whole ones (`whole`), shards of a device
mesh (`sharded`, `fsdp1`), merged adapters (`lora`), or a folder (`folder`). Frameworks are imported only where a
model of theirs is given. Knows nothing of transports' streams, of updates or of engines.
"""

from __future__ import annotations

from trainer_side.sources.choose import as_source
from trainer_side.sources.parts import Part, PartsSource
from trainer_side.sources.source import WeightSource

__all__ = ["Part", "PartsSource", "WeightSource", "as_source"]
