"""What a version is beside its tensors, as one document, and the comparison of a source's with an engine's.

The config that changes a forward pass, the tokenizer and the quantisation: one definition each (`model_config`,
`model_tokenizer`). What both sides have is compared; what one of them lacks is not, and the outcome says so. Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from updater.core.errors import Failure
from updater.core.participant import NOT_COMPARED, Compared
from updater.protocol.model_config import (
    ROPE,
    ConfigRefused,
    Difference,
    bounded,
    config_part,
    differences,
    text_of,
    view,
    warns,
)
from updater.protocol.model_tokenizer import TokenizerData

#: Bytes of a whole document as canonical JSON.
DOCUMENT_BYTES = 256 << 10
#: Of the hash of a config: which definition it follows. A hash of another one says nothing.
DEFINITION = "v2"
_SHOWN = 100  # keys named one by one, of refusals and of warnings each
_VALUE = 200  # characters of a value
_SPELLINGS = {"rope_theta": f"{ROPE}.rope_theta", "rope_scaling": ROPE}


@dataclass(frozen=True, slots=True)
class ModelDocument:
    """None: not known. `config`: `model_config.config_part`. `quantization`: empty for a model that has none, known
    only with the config. `completed`: the config as the engine's own class completes it; only engines say it.
    `generation`, `chat_template` (SHA-256 hex): differences warn.
    """

    config: dict[str, Any] | None = None
    quantization: dict[str, Any] | None = None
    tokenizer: TokenizerData | None = None
    generation: dict[str, Any] | None = None
    chat_template: str = ""
    completed: dict[str, Any] | None = None

    def check(self) -> None:
        """Of one that came over a socket or from a file. Raises ConfigRefused."""
        for part in (self.config, self.quantization, self.completed):
            if part is not None and text_of(bounded(part)) != json.dumps(part, sort_keys=True, separators=(",", ":")):
                raise ConfigRefused("is not in its canonical form")
        plain = {"generation": self.generation, "tokenizer": _plain(self.tokenizer)}
        if len(text_of(plain)) > DOCUMENT_BYTES:
            raise ConfigRefused(f"more than {DOCUMENT_BYTES} bytes")


def known(document: ModelDocument) -> ModelDocument | None:
    """None for one that says nothing."""
    return None if document == ModelDocument() else document


def _plain(tokenizer: TokenizerData | None) -> Any:
    return None if tokenizer is None else {"parts": tokenizer.parts, "added": tokenizer.added}


def config_hash(document: ModelDocument) -> str:
    """`v2:` and SHA-256 hex of the keys that change a forward pass, in one spelling; empty where no config is known."""
    if document.config is None:
        return ""
    values = view(document.completed or {}) | {k: v for k, v in view(document.config).items() if v is not None}
    counted = {key: value for key, value in values.items() if value is not None and not warns(key)}
    return f"{DEFINITION}:{hashlib.sha256(text_of(counted).encode()).hexdigest()}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """`refused`: Failures `config_mismatch`, one for each key, as many as are shown. `warnings`: what differs and is
    allowed, or changes no forward pass, or cannot be judged.
    """

    refused: tuple[Failure, ...] = ()
    warnings: tuple[str, ...] = ()
    compared: Compared = NOT_COMPARED


Sides = tuple[str, str]
IN_SOURCE: Sides = ("in the source", "in the engine")


def compare(
    theirs: ModelDocument,
    ours: ModelDocument,
    allowed: Sequence[str] = (),
    *,
    sides: Sides = IN_SOURCE,
    most: int | None = _SHOWN,
) -> Comparison:
    """`theirs`: of a source. `ours`: of the engine. `allowed`: keys that may differ, with all that lies under them.
    `sides`: what the two are called. `most`: refusals and warnings beyond so many are only counted; None: all.
    """
    found: list[tuple[str, Difference]] = []
    compared = NOT_COMPARED
    if theirs.config is not None and ours.config is not None:
        compared = replace(compared, config="engine")
        found += [("config.json", d) for d in differences(theirs.config, ours.config, theirs.completed, ours.completed)]
        if bool(theirs.quantization) == bool(ours.quantization):
            compared = replace(compared, quantisation="engine")
    if theirs.quantization and ours.quantization:
        compared = replace(compared, quantisation="engine")
        prefixed = ({"quantization_config": side} for side in (theirs.quantization, ours.quantization))
        found += [("config.json", difference) for difference in differences(*prefixed)]
    if theirs.tokenizer is not None and ours.tokenizer is not None:
        shared = theirs.tokenizer.parts.keys() & ours.tokenizer.parts.keys()
        compared = replace(compared, tokenizer="engine" if shared else "none")
        found += [("tokenizer.json", difference) for difference in _tokenizers(theirs.tokenizer, ours.tokenizer)]
    notes = [*_added(theirs.tokenizer, ours.tokenizer), *_beside(theirs, ours)]
    return _judged(found, notes, compared, [_canonical_key(key) for key in allowed], sides, most)


def _judged(
    found: list[tuple[str, Difference]],
    notes: list[str],
    compared: Compared,
    allowed: list[str],
    sides: Sides,
    most: int | None,
) -> Comparison:
    refused, warnings = [], []
    for file, difference in found:
        key, text = difference.key, _text(difference, sides)
        if difference.one_sided:
            warnings.append(f"config: {text}; what it is there by default is not known")
        elif warns(key):
            warnings.append(f"config: {text}; this changes no forward pass")
        elif any(key == name or key.startswith(f"{name}.") for name in allowed):
            warnings.append(f"config: {text}; allowed, and the engine goes on with its own")
        else:
            hint = f'if it is meant so, allow_config=["{key}"] (--allow-config {key}); the engine keeps its own value'
            refused.append(Failure("config_mismatch", text, file=file, hint=hint))
    return Comparison(tuple(_cut(refused, most)), tuple(_cut_texts([*warnings, *notes], most)), compared)


def _cut(refused: list[Failure], most: int | None) -> list[Failure]:
    if most is None or len(refused) <= most:
        return refused
    hint = "liveweights inspect DIR --against URL --json lists all of them"
    return [*refused[:most], Failure("config_mismatch", f"{len(refused) - most} more keys differ", hint=hint)]


def _cut_texts(texts: list[str], most: int | None) -> list[str]:
    if most is None or len(texts) <= most:
        return texts
    return [*texts[:most], f"config: {len(texts) - most} more differences"]


def _text(difference: Difference, sides: Sides) -> str:
    theirs, ours = _shown(difference.theirs), _shown(difference.ours)
    return f"{difference.key} is {theirs} {sides[0]}, {ours} {sides[1]}"


def _shown(value: str | None) -> str:
    if value is None:
        return "not there"
    return value if len(value) <= _VALUE else f"{value[:_VALUE]}... ({len(value)} characters)"


def _canonical_key(key: str) -> str:
    key = key.removeprefix("text_config.")
    return _SPELLINGS.get(
        key, f"{ROPE}.{key.removeprefix('rope_scaling.')}" if key.startswith("rope_scaling.") else key
    )


def _tokenizers(theirs: TokenizerData, ours: TokenizerData) -> list[Difference]:
    """Parts that both have, and added tokens that both have under another id."""
    found = [
        Difference(f"tokenizer.{part}", theirs.parts[part][:12], ours.parts[part][:12])
        for part in sorted(theirs.parts.keys() & ours.parts.keys())
        if theirs.parts[part] != ours.parts[part]
    ]
    moved = [name for name, number in theirs.added.items() if ours.added.get(name, number) != number]
    if moved:
        first = moved[0]
        text = f"id {theirs.added[first]} for the first of {len(moved)} tokens"
        found.append(Difference("tokenizer.added_tokens", text, f"id {ours.added[first]}"))
    return found


def _added(theirs: TokenizerData | None, ours: TokenizerData | None) -> list[str]:
    if theirs is None or ours is None:
        return []
    more, fewer = len(theirs.added.keys() - ours.added.keys()), len(ours.added.keys() - theirs.added.keys())
    notes = [f"tokenizer: {more} added tokens that the engine has not"] if more else []
    return notes + ([f"tokenizer: {fewer} added tokens of the engine are not in the source"] if fewer else [])


def _beside(theirs: ModelDocument, ours: ModelDocument) -> list[str]:
    notes = []
    if theirs.generation is not None and ours.generation is not None and theirs.generation != ours.generation:
        notes.append("generation_config.json differs; the engine goes on with its own")
    if theirs.chat_template and ours.chat_template and theirs.chat_template != ours.chat_template:
        notes.append("the chat template differs; the engine goes on with its own")
    one_sided = theirs.config is not None and ours.config is not None
    if one_sided and bool(theirs.quantization) != bool(ours.quantization):
        side = "the source" if theirs.quantization else "the engine's config"
        notes.append(f"only {side} describes a quantisation: it is not compared")
    return notes


def whole(config: dict[str, Any]) -> dict[str, Any]:
    """What an engine's class made of a config, as `completed`; empty where it is too much to be compared."""
    try:
        return config_part(config)
    except ConfigRefused:
        return {}
