"""A toy engine that is real where it matters, its checkpoints, its oracle, and the contract of every engine.

`build_toy` is an `EngineFactory`; `make_toy_checkpoint` writes what it loads; `reference_generate` says what it must
answer and `expected_digests` what every rank must hold; `EngineContract` is the suite that any `RankEngine` has to
pass. May import torch, safetensors and the rest of `engine_adapter`; nothing here knows of fleets or transactions.
"""

from engine_adapter.model_files import write_shards
from engine_adapter.testing.toy.checkpoint import make_toy_checkpoint, toy_tensors
from engine_adapter.testing.toy.config import FIXTURES, ToyConfig, ToyOptions, fixture_config
from engine_adapter.testing.toy.engine import ToyEngine, build_toy
from engine_adapter.testing.toy.reference import NarrowMargin, ToyReference, reference_generate
from engine_adapter.testing.toy.slicer import expected_digests, expected_parameters

__all__ = [
    "FIXTURES",
    "NarrowMargin",
    "ToyConfig",
    "ToyEngine",
    "ToyOptions",
    "ToyReference",
    "build_toy",
    "expected_digests",
    "expected_parameters",
    "fixture_config",
    "make_toy_checkpoint",
    "reference_generate",
    "toy_tensors",
    "write_shards",
]
