"""A tokenizer as data: what maps text to token ids, whatever file holds it and however it was written. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Added tokens that a document lists one by one; more of them are one part like the others.
ADDED_LIMIT = 2000
_HASH = 12  # hex digits that name an added token


@dataclass(frozen=True, slots=True)
class TokenizerData:
    """`parts`: name -> SHA-256 hex of its data: vocabulary, merges, normalizer, pre_tokenizer, sentencepiece.

    `added`: hash of an added token's text -> its id.
    """

    parts: dict[str, str] = field(default_factory=dict)
    added: dict[str, int] = field(default_factory=dict)


def of_tokenizer_json(document: Mapping[str, Any]) -> TokenizerData:
    """Of a `tokenizer.json`. What it leaves out is empty, not unknown."""
    model = document.get("model")
    model = model if isinstance(model, Mapping) else {}
    added = document.get("added_tokens")
    tokens = {
        str(token.get("content")): token.get("id")
        for token in (added if isinstance(added, list) else ())
        if isinstance(token, Mapping)
    }
    parts = {
        "vocabulary": _hash(model.get("vocab")),
        "merges": _hash(_merges(model.get("merges"))),
        "normalizer": _hash(document.get("normalizer")),
        "pre_tokenizer": _hash(document.get("pre_tokenizer")),
    }
    return _with_added(parts, tokens)


def of_files(vocabulary: object, merges: str | None, added: Mapping[str, Any], sentencepiece: bytes) -> TokenizerData:
    """Of the files of before `tokenizer.json`: `vocab.json` or the lines of `vocab.txt`, `merges.txt`,
    `added_tokens.json`, `tokenizer.model`.
    """
    parts = {}
    if vocabulary is not None:
        parts["vocabulary"] = _hash(vocabulary)
    if merges is not None:
        lines = [line for line in merges.splitlines() if line and not line.startswith("#version")]
        parts["merges"] = _hash(_merges(lines))
    if sentencepiece:
        parts["sentencepiece"] = hashlib.sha256(sentencepiece).hexdigest()
    return _with_added(parts, added)


def _merges(merges: object) -> object:
    """A pair is written as `"a b"` or as `["a", "b"]`."""
    if not isinstance(merges, list):
        return []
    return [" ".join(map(str, pair)) if isinstance(pair, list) else pair for pair in merges]


def _with_added(parts: dict[str, str], tokens: Mapping[str, Any]) -> TokenizerData:
    if len(tokens) > ADDED_LIMIT:
        return TokenizerData(parts | {"added_tokens": _hash(dict(tokens))})
    named = {
        hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:_HASH]: number
        for text, number in tokens.items()
        if isinstance(number, int)
    }
    return TokenizerData(parts, dict(sorted(named.items())))


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
