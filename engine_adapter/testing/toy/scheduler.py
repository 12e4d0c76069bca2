"""Continuous batching: a step makes one token for every running request. The same on every rank, token for token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from engine_adapter.base import GenerateRequest, TokenEvent
from engine_adapter.testing.toy.cache import PrefixCache
from engine_adapter.testing.toy.model import KeyValues, ToyModel


@dataclass(slots=True)
class Sequence:
    """One request. `born`: the version whose weights made its first keys and values; `shared`: blocks in the cache."""

    request: GenerateRequest
    tokens: list[int]
    born: str = ""
    namespace: int = 0
    past: KeyValues = field(default_factory=KeyValues)
    shared: int = 0
    cached: int = 0
    random: torch.Generator | None = None

    @property
    def made(self) -> int:
        return len(self.tokens) - len(self.request.prompt)


class ToyScheduler:
    """Holds every request of the replica. Not thread safe: it belongs to the loop."""

    def __init__(self, model: ToyModel, cache: PrefixCache, max_running: int) -> None:
        self._model, self._cache, self._max_running = model, cache, max_running
        self._running: dict[str, Sequence] = {}
        self._waiting: dict[str, Sequence] = {}
        self.version = ""

    def add(self, requests: Iterable[GenerateRequest]) -> None:
        for request in requests:
            self._waiting[request.request_id] = Sequence(request, list(request.prompt))

    def cancel(self, ids: Iterable[str]) -> list[TokenEvent]:
        """Ends what is held of `ids`."""
        gone = []
        for request_id in ids:
            held = self._running.pop(request_id, None) or self._waiting.pop(request_id, None)
            if held is not None:
                gone.append(TokenEvent(request_id, (), self.version, "abort", cached_tokens=held.cached))
        return gone

    def __bool__(self) -> bool:
        """Whether there is anything to step."""
        return bool(self._running or self._waiting)

    def held(self) -> tuple[str, ...]:
        return tuple(sorted([*self._running, *self._waiting]))

    def step(self) -> list[TokenEvent]:
        """One token for every running request."""
        self._admit()
        batch = list(self._running.values())
        news = [(sequence.tokens[len(sequence.past) :], sequence.past) for sequence in batch]
        logits = self._model.forward(news)
        return [self._advance(sequence, row) for sequence, row in zip(batch, logits, strict=True)]

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            request_id, sequence = next(iter(self._waiting.items()))
            del self._waiting[request_id]
            self._running[request_id] = sequence
            sequence.born, sequence.namespace = self.version, self._cache.namespace
            blocks = self._cache.lookup(sequence.tokens)
            if blocks:
                sequence.past = _joined(blocks)
            sequence.cached = len(sequence.past)
            sequence.shared = len(blocks)
            if sequence.request.temperature > 0:
                sequence.random = torch.Generator().manual_seed(sequence.request.seed or 0)

    def _advance(self, sequence: Sequence, logits: torch.Tensor) -> TokenEvent:
        self._share(sequence)
        token = _sample(logits, sequence)
        sequence.tokens.append(token)
        request = sequence.request
        reason = None
        if token in request.stop_token_ids:
            reason = "stop"
        elif sequence.made >= request.max_tokens:
            reason = "length"
        if reason is not None:
            del self._running[request.request_id]
        return TokenEvent(request.request_id, (token,), self.version, reason, cached_tokens=sequence.cached)

    def _share(self, sequence: Sequence) -> None:
        """Put whole new blocks into the cache, unless the sequence spans two versions (I5)."""
        if (sequence.born, sequence.namespace) != (self.version, self._cache.namespace):
            return
        size = self._cache.block_size
        while (sequence.shared + 1) * size <= len(sequence.past):
            cut = slice(sequence.shared * size, (sequence.shared + 1) * size)
            block = tuple((k[cut].clone(), v[cut].clone()) for k, v in sequence.past.layers)
            self._cache.insert(sequence.tokens[: cut.stop], block)
            sequence.shared += 1


def _joined(blocks: list[tuple[tuple[torch.Tensor, torch.Tensor], ...]]) -> KeyValues:
    layers = zip(*blocks, strict=True)
    return KeyValues([(torch.cat([k for k, _ in layer]), torch.cat([v for _, v in layer])) for layer in layers])


def _sample(logits: torch.Tensor, sequence: Sequence) -> int:
    if sequence.random is None:
        return int(logits.argmax())
    chances = (logits / sequence.request.temperature).softmax(-1)
    return int(torch.multinomial(chances, 1, generator=sequence.random))
