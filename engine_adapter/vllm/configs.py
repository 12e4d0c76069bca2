"""What vLLM runs on where it was told to read a config otherwise: `--hf-overrides`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def hf_overrides(model_config: Any) -> dict[str, Any]:
    """Of vLLM's `ModelConfig`. Where a function made them, the whole config that came of it."""
    given = getattr(model_config, "hf_overrides", None)
    if callable(given):
        return dict(model_config.hf_config.to_dict())
    return dict(given or {})


def hf_completed(model_config: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` as the class of the config that runs completes it."""
    full: dict[str, Any] = type(model_config.hf_config).from_dict(dict(config)).to_dict()
    return full


class ServerConfig:
    """`engine_adapter.base.KnowsConfig` where only the server is at hand, and no rank of ours."""

    def __init__(self, model_config: Any) -> None:
        self._model_config = model_config

    def config_overrides(self) -> Mapping[str, Any]:
        return hf_overrides(self._model_config)

    def completed_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return hf_completed(self._model_config, config)
