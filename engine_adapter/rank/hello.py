"""How a rank introduces its engine to its front."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from engine_adapter.base import EngineSpec, KnowsConfig, RankEngine
from engine_adapter.rank.messages import Hello
from transports.hashes import folder_document
from updater.core.errors import Rejected, refuse
from updater.core.participant import RankInfo
from updater.model_config import ConfigRefused, bounded, config_part, overlaid, quantisation_part
from updater.model_document import ModelDocument, config_hash, whole


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
    model = running_document(spec.model, engine)
    # Rank 0 says what it is; the others only that it is the same.
    said = model if spec.rank == 0 else None
    return Hello(info, spec.size, engine.name, engine.capabilities, config_hash(model), said)


def running_document(folder: str, engine: object) -> ModelDocument:
    """What the engine runs on: the documents of its start folder, and what it was told to read otherwise. Nothing is
    known of a folder whose files cannot be read: the engine has loaded it all the same.
    """
    try:
        model = folder_document(folder, ("/",))
    except Rejected:
        return ModelDocument()
    overrides = dict(engine.config_overrides()) if isinstance(engine, KnowsConfig) else {}
    return completed(overridden(model, overrides), engine)


def overridden(model: ModelDocument, overrides: dict[str, Any]) -> ModelDocument:
    """Raises Rejected `config_mismatch` for overrides that cannot be compared."""
    if not overrides or model.config is None:
        return model
    try:
        config = bounded(overlaid(model.config, config_part(overrides)))
        quantization = bounded(
            overlaid(model.quantization or {}, quantisation_part({"quantization_config": {}} | overrides))
        )
    except ConfigRefused as error:
        raise refuse("config_mismatch", f"what the engine's options say of the config: {error}") from None
    return replace(model, config=config, quantization=quantization)


def completed(model: ModelDocument, engine: object) -> ModelDocument:
    """With what the engine's own config class makes of the config."""
    if model.config is None or not isinstance(engine, KnowsConfig):
        return model
    try:
        full = dict(engine.completed_config(model.config))
    except Exception:  # the boundary to a library: what its class cannot read is compared as it is written
        return model
    return replace(model, completed=whole(full))
