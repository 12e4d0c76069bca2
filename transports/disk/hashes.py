"""What lies beside the weights and must fit them: model config, tokenizer, quantisation, read and hashed.

Two things come of it. Hashes, which say that the files are those that a manifest was made with; and the document that
is compared with an engine's (`updater.protocol.model_document`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transports.disk.paths import read_bytes, read_text
from updater.core.errors import Rejected, refuse
from updater.protocol.model_config import (
    BOOKKEEPING,
    ConfigRefused,
    bounded,
    config_part,
    quantisation_part,
    quantiser_part,
)
from updater.protocol.model_document import ModelDocument
from updater.protocol.model_tokenizer import TokenizerData, of_files, of_tokenizer_json

CONFIG = "config.json"
_CONFIG_LIMIT = 4 << 20
_GENERATION_LIMIT = 64 << 10
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
    try:
        return FolderHashes(
            config=_hash(_stable(config)) if config else "",
            tokenizer=_tokenizer_hash(_tokenizer_files(folder, roots)),
            quantization=_hash(quantization) if quantization else "",
            tied=bool(config.get("tie_word_embeddings") or _text_config(config).get("tie_word_embeddings")),
        )
    except RecursionError:
        raise _nested(CONFIG) from None


def folder_document(folder: str, roots: Sequence[str]) -> ModelDocument:
    """What the files in `folder` say of the model. Raises Rejected `config_mismatch` where one of them is not JSON, is
    nested too deeply or too large.
    """
    config = _json(folder, CONFIG, roots)
    quantization = _part(CONFIG, lambda: quantisation_part(config))
    for name in _QUANTIZATION_FILES:
        quantization = quantization or _quantiser(folder, name, roots)
    return ModelDocument(
        config=_part(CONFIG, lambda: config_part(config)) if config else None,
        quantization=quantization if config or quantization else None,
        tokenizer=_tokenizer(folder, roots),
        generation=_generation(folder, roots),
        chat_template=_chat_template(folder, roots),
    )


def _quantiser(folder: str, name: str, roots: Sequence[str]) -> dict[str, object]:
    settings = _json(folder, name, roots)
    return _part(name, lambda: quantiser_part(settings))


def _part(file: str, make: Callable[[], dict[str, object]]) -> dict[str, object]:
    try:
        return make()
    except ConfigRefused as error:
        raise refuse("config_mismatch", f"cannot be compared: {error}", file=file) from None
    except RecursionError:
        raise _nested(file) from None


def _nested(file: str) -> Rejected:
    return refuse("config_mismatch", "is nested too deeply", file=file)


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


def _json(folder: str, name: str, roots: Sequence[str], limit: int = _CONFIG_LIMIT) -> dict[str, object]:
    text = _text(folder, name, roots, limit)
    return {} if text is None else _object(text, name)


def _object(text: str | bytes, name: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise refuse("config_mismatch", "is not a JSON object", file=name)
    return value


def _generation(folder: str, roots: Sequence[str]) -> dict[str, object] | None:
    """A file that changes no weight refuses nothing either."""
    text = _bytes(folder, "generation_config.json", roots, _CONFIG_LIMIT)
    if text is None:
        return None
    try:
        found = {key: value for key, value in _object(text, "generation_config.json").items() if not _written_anew(key)}
        return bounded(found, _GENERATION_LIMIT)
    except (ConfigRefused, RecursionError, Rejected):
        return None


def _written_anew(key: str) -> bool:
    return key.startswith("_") or key in BOOKKEEPING


def _chat_template(folder: str, roots: Sequence[str]) -> str:
    data = _bytes(folder, "chat_template.jinja", roots, _CONFIG_LIMIT)
    if data is None:
        settings = _bytes(folder, "tokenizer_config.json", roots, _TOKENIZER_LIMIT)
        data = _template_of(settings) if settings is not None else None
    return "" if data is None else hashlib.sha256(data.strip()).hexdigest()


def _template_of(settings: bytes) -> bytes | None:
    try:
        found = _object(settings, "tokenizer_config.json").get("chat_template")
    except Rejected:
        return None
    return found.encode("utf-8", "replace") if isinstance(found, str) else None


# --- the tokenizer


def _tokenizer_files(folder: str, roots: Sequence[str]) -> dict[str, bytes]:
    found = ((name, _bytes(folder, name, roots, _TOKENIZER_LIMIT)) for name in _TOKENIZER_FILES)
    return {name: data for name, data in found if data is not None}


def _tokenizer_hash(files: dict[str, bytes]) -> str:
    total = hashlib.sha256()
    for name, data in files.items():
        total.update(f"{name} {hashlib.sha256(data).hexdigest()}\n".encode())
    return total.hexdigest() if files else ""


#: By the hash of the files' bytes: a large vocabulary takes a second to read, and most versions have the same one.
_KNOWN: OrderedDict[str, TokenizerData] = OrderedDict()
_KEPT = 4


def _tokenizer(folder: str, roots: Sequence[str]) -> TokenizerData | None:
    files = _tokenizer_files(folder, roots)
    name = _tokenizer_hash(files)
    if not name:
        return None
    found = _KNOWN.get(name)
    if found is None:
        found = _KNOWN[name] = _read_tokenizer(files)
        while len(_KNOWN) > _KEPT:
            _KNOWN.popitem(last=False)
    return found


def _read_tokenizer(files: dict[str, bytes]) -> TokenizerData:
    try:
        if "tokenizer.json" in files:
            return of_tokenizer_json(_object(files["tokenizer.json"], "tokenizer.json"))
        added = _object(files["added_tokens.json"], "added_tokens.json") if "added_tokens.json" in files else {}
        vocabulary: object = None
        if "vocab.json" in files:
            vocabulary = _object(files["vocab.json"], "vocab.json")
        elif "vocab.txt" in files:
            vocabulary = files["vocab.txt"].decode("utf-8", "replace").splitlines()
        merges = files["merges.txt"].decode("utf-8", "replace") if "merges.txt" in files else None
        return of_files(vocabulary, merges, added, files.get("tokenizer.model", b""))
    except RecursionError:
        raise _nested("tokenizer.json") from None


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
