"""Text to token ids and back, and where generation ends, from the files beside a model. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from updater.core.errors import refuse

_REPLACEMENT = "�"


@dataclass(frozen=True, slots=True)
class ModelText:
    """`tokenizer`: None where the model has no `tokenizer.json`: then only token ids come in and out."""

    name: str
    tokenizer: Tokenizer | None
    eos: tuple[int, ...]
    vocabulary: int | None  # ids lie below it, where the config says so
    context: int | None  # prompt and answer together, where the config says so

    @classmethod
    def load(cls, folder: Path, name: str) -> ModelText:
        config = _json(folder / "config.json")
        text_config = config.get("text_config")
        inner: dict[str, Any] = config | (text_config if isinstance(text_config, dict) else {})
        file = folder / "tokenizer.json"
        return cls(
            name=name,
            tokenizer=Tokenizer.from_file(str(file)) if file.is_file() else None,
            eos=_eos(_json(folder / "generation_config.json")) or _eos(inner),
            vocabulary=_positive(inner.get("vocab_size")),
            context=_positive(inner.get("max_position_embeddings")),
        )

    def encode(self, text: str) -> tuple[int, ...]:
        if self.tokenizer is None:
            raise refuse("bad_request", "this model has no tokenizer: send the prompt as a list of token ids")
        return tuple(self.tokenizer.encode(text).ids)

    def check(self, prompt: tuple[int, ...], max_tokens: int) -> None:
        """Raises Rejected (`bad_request`) for what the model cannot take."""
        if not prompt:
            raise refuse("bad_request", "the prompt is empty")
        if self.vocabulary is not None and not all(0 <= token < self.vocabulary for token in prompt):
            raise refuse("bad_request", f"token ids must lie in 0 to {self.vocabulary - 1}")
        if self.context is not None and len(prompt) + max_tokens > self.context:
            raise refuse("bad_request", f"{len(prompt)} + {max_tokens} tokens are over the context of {self.context}")


class TextStream:
    """Text of a growing token list; holds back bytes that are not a whole character yet.

    Only a window is decoded anew: the tokens whose text went out last, for what a decoder does between neighbours, and
    those after them. A long reply would else cost its length squared, on the loop that closes and opens the gate.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._sent: list[int] = []  # the window's first part: its text went out
        self._new: list[int] = []

    def add(self, tokens: tuple[int, ...], *, last: bool) -> str:
        """The text that these tokens make final."""
        if self._tokenizer is None:
            return ""
        self._new.extend(tokens)
        text = self._decode([*self._sent, *self._new])
        if not last and text.endswith(_REPLACEMENT):
            return ""
        before = self._decode(self._sent)
        if len(text) > len(before):
            self._sent, self._new = self._new, []
        return text[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        if self._tokenizer is None or not tokens:
            return ""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    content = json.loads(file.read_text())
    return content if isinstance(content, dict) else {}


def _eos(config: dict[str, Any]) -> tuple[int, ...]:
    found = config.get("eos_token_id")
    several = found if isinstance(found, list) else [found]
    return tuple(token for token in several if isinstance(token, int))


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
