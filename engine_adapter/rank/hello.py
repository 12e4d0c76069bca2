"""How a rank introduces its engine to its front."""

from __future__ import annotations

import os
from copy import deepcopy
from dataclasses import replace

from engine_adapter.base import EngineSpec, KnowsConfig, RankEngine
from engine_adapter.rank.messages import Hello
from transports.disk.hashes import folder_document
from updater.core.errors import Rejected, refuse
from updater.core.participant import RankInfo
from updater.protocol.model_config import config_part, quantisation_part
from updater.protocol.model_document import ModelDocument, config_hash, whole
from updater.protocol.model_tokenizer import TokenizerData


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
    if isinstance(engine, KnowsConfig):
        model = told_otherwise(model, engine)
    return completed(model, engine)


def told_otherwise(model: ModelDocument, engine: KnowsConfig) -> ModelDocument:
    """`model` as the engine reads it. Raises Rejected `config_mismatch` for what cannot be compared."""
    model = replace(model, tokenizer=_tokenizer(model.tokenizer, engine))
    read = {**(model.config or {}), **({"quantization_config": model.quantization} if model.quantization else {})}
    try:
        runs = dict(engine.running_config(deepcopy(read)))
        if runs == read:
            return model
        return replace(model, config=config_part(runs), quantization=quantisation_part(runs))
    except Exception as error:  # the boundary to a library; also what it says may be too much, or no JSON
        why = f"what the engine's options make of the config cannot be compared: {type(error).__name__}: {error}"
        raise refuse("config_mismatch", why) from None


def _tokenizer(started: TokenizerData | None, engine: KnowsConfig) -> TokenizerData | None:
    """`started`: of the start folder."""
    try:
        folder = engine.tokenizer_folder()
        return folder_document(folder, ("/",)).tokenizer if folder else started
    except Exception:  # the boundary to a library, or files that cannot be read: then it is not known
        return None


def completed(model: ModelDocument, engine: object) -> ModelDocument:
    """With what the engine's own config class makes of the config."""
    if model.config is None or not isinstance(engine, KnowsConfig):
        return model
    try:
        full = dict(engine.completed_config(deepcopy(model.config)))  # a library fills in what it is handed
    except Exception:  # the boundary to a library: what its class cannot read is compared as it is written
        return model
    return replace(model, completed=whole(full))
