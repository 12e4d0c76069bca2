"""How a rank introduces its engine to its front."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from engine_adapter.base import EngineSpec, RankEngine
from engine_adapter.rank.messages import Hello
from updater.core.participant import RankInfo


def hello_of(engine: RankEngine, spec: EngineSpec) -> Hello:
    """`spec`: what the engine was built from."""
    parameters = engine.parameters()
    info = RankInfo(
        rank=spec.rank,
        pid=os.getpid(),
        parameters=len(parameters),
        weight_bytes=sum(parameter.local.nbytes for parameter in parameters.values()),
        device=next((str(parameter.local.device) for parameter in parameters.values()), "cpu"),
    )
    return Hello(info, spec.size, engine.name, engine.capabilities, config_hash(spec.model))


def config_hash(model: str) -> str:
    """SHA-256 hex of the canonical `config.json`, or empty where there is none."""
    try:
        config = json.loads((Path(model) / "config.json").read_bytes())
    except (OSError, ValueError):
        return ""
    return hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
