"""Hashes of what lies beside the weights and must fit them: model config, tokenizer, quantisation."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

from transports.paths import read_bytes, read_text
from updater.core.errors import refuse

CONFIG = "config.json"
_TEXT_LIMIT = 64 << 20
_TOKENIZER_LIMIT = 256 << 20

#: Written anew by every save and without a say in what the weights mean; dtypes are the tensors' own.
_VOLATILE = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})

#: The files that map text to token ids. Chat templates and settings may change without touching weights.
_TOKENIZER_FILES = ("added_tokens.json", "merges.txt", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")

_QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json")


@dataclass(frozen=True, slots=True)
class FolderHashes:
    """SHA-256 hex, or empty where there is no such file."""

    config: str = ""
    tokenizer: str = ""
    quantization: str = ""
    tied: bool = False  # the config says that head and embedding are one


def folder_hashes(folder: str, roots: Sequence[str]) -> FolderHashes:
    """Of the files in `folder`. Raises Rejected `config_mismatch` where one of them is not JSON."""
    config = _json(folder, CONFIG, roots)
    quantization = config.get("quantization_config")
    for name in _QUANTIZATION_FILES:
        quantization = quantization or _json(folder, name, roots)
    return FolderHashes(
        config=config_hash(config),
        tokenizer=_tokenizer_hash(folder, roots),
        quantization=_hash(quantization) if quantization else "",
        tied=bool(config.get("tie_word_embeddings") or _text_config(config).get("tie_word_embeddings")),
    )


def config_hash(config: dict[str, object]) -> str:
    """SHA-256 hex of a model config as canonical JSON without what every save writes anew; empty for no config.

    The quantisation has a hash of its own.
    """
    return _hash(_stable(config)) if config else ""


def _stable(value: object) -> object:
    if not isinstance(value, dict):
        return value
    return {
        key: _stable(inner) for key, inner in value.items() if key not in _VOLATILE and key != "quantization_config"
    }


def _text_config(config: dict[str, object]) -> dict[str, object]:
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else {}


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _json(folder: str, name: str, roots: Sequence[str]) -> dict[str, object]:
    text = _text(folder, name, roots, _TEXT_LIMIT)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise refuse("config_mismatch", "is not a JSON object", file=name)
    return value


def _tokenizer_hash(folder: str, roots: Sequence[str]) -> str:
    total = hashlib.sha256()
    found = False
    for name in _TOKENIZER_FILES:
        data = _bytes(folder, name, roots, _TOKENIZER_LIMIT)
        if data is not None:
            found = True
            total.update(f"{name} {hashlib.sha256(data).hexdigest()}\n".encode())
    return total.hexdigest() if found else ""


def _text(folder: str, name: str, roots: Sequence[str], limit: int) -> str | None:
    path = os.path.join(folder, name)
    if not os.path.lexists(path):
        return None
    text, opened = read_text(path, roots, limit, name)
    os.close(opened.fd)
    return text


def _bytes(folder: str, name: str, roots: Sequence[str], limit: int) -> bytes | None:
    """Raises Rejected as `open_file`, for a link that leaves the roots."""
    path = os.path.join(folder, name)
    if not os.path.lexists(path):
        return None
    data, opened = read_bytes(path, roots, limit, name)
    os.close(opened.fd)
    return data
