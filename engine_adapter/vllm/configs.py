"""What vLLM runs on where it was told to read a config otherwise: `--hf-overrides`, `--hf-config-path`, `--tokenizer`.

Told is not done: an override of `rope_theta` does nothing to a config that has `rope_parameters`, one of a whole object
replaces it or is laid over it as its class decides. So an override says which keys to look at, and the config that
vLLM made of all says what their values are.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from updater.protocol.model_config import ROPE, ROPE_SPELLINGS


class ServerConfig:
    """Implements `engine_adapter.base.KnowsConfig`. `model_config`: vLLM's `ModelConfig`."""

    def __init__(self, model_config: Any) -> None:
        self.model_config = model_config

    def running_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """`config`, of the start folder, as vLLM reads it."""
        ours, hf_config = self.model_config, self.model_config.hf_config
        path, told = getattr(ours, "hf_config_path", None), getattr(ours, "hf_overrides", None)
        read = dict(config)
        if path and path != ours.model:
            read = {name: read[name] for name in ("quantization_config",) if name in read} | _read(hf_config, path)
        if not told:
            return read
        runs = hf_config.to_dict()
        if callable(told):  # it may have changed anything: what it changed is what differs
            told = _changed(self.completed_config(read), runs)
        return _taken(read, told, runs, hf_config)

    def completed_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """`config` as the class of the config that runs completes it."""
        full: dict[str, Any] = type(self.model_config.hf_config).from_dict(dict(config)).to_dict()
        return full

    def tokenizer_folder(self) -> str:
        """Where its tokenizer lies, empty for the folder of the model."""
        name = getattr(self.model_config, "tokenizer", None)
        if not name or name == self.model_config.model:
            return ""
        return str(local_folder(name, getattr(self.model_config, "tokenizer_revision", None)))


def local_folder(name: str, revision: str | None) -> Path:
    """As given, or the snapshot that the hub's cache holds."""
    given = Path(name)
    if given.is_dir():
        return given.resolve()
    hub: Any = import_module("huggingface_hub")
    return Path(hub.snapshot_download(name, revision=revision, local_files_only=True))


def _read(hf_config: Any, path: str) -> dict[str, Any]:
    found: dict[str, Any] = type(hf_config).get_config_dict(path, local_files_only=True)[0]
    return found


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The keys in which they differ, nested as they are."""
    found: dict[str, Any] = {}
    for key in before.keys() | after.keys():
        old, new = before.get(key), after.get(key)
        if old != new:
            nested = isinstance(old, Mapping) and isinstance(new, Mapping)
            found[key] = _changed(old, new) if nested else new  # type: ignore[arg-type]
    return found


def _taken(read: Mapping[str, Any], told: Mapping[str, Any], runs: Mapping[str, Any], hf_config: Any) -> dict[str, Any]:
    """`read` with the keys that `told` names as they are in `runs`, which is `hf_config` as values."""
    found = dict(read)
    for key, value in told.items():
        inner, part = getattr(hf_config, key, None), runs.get(key)
        if isinstance(value, Mapping) and isinstance(part, Mapping) and hasattr(inner, "to_dict"):
            found[key] = _taken(found.get(key) or {}, value, part, inner)
        else:
            found[key] = part
    if told.keys() & {ROPE, *ROPE_SPELLINGS}:
        found = {key: value for key, value in found.items() if key not in ROPE_SPELLINGS}
        found[ROPE] = runs.get(ROPE) or {name: runs[name] for name in ROPE_SPELLINGS if name in runs}
    return found
