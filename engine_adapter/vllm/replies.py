"""One HTTP reply of a vLLM route as the gate sees it: which versions it accepts, and what made which of its tokens."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from engine_adapter.replica.replies import Span, Wanted
from updater.core.errors import LiveweightsError


@dataclass(slots=True)
class Part:
    """One call of the engine: `sequences` by their index (more than one where the request asks for `n`)."""

    request_id: str = ""
    sequences: dict[int, tuple[Span, ...]] = field(default_factory=dict)
    cached_tokens: int = 0

    @property
    def versions(self) -> set[str]:
        return {span.version for spans in self.sequences.values() for span in spans}

    def take(self, output: Any, version: str) -> None:
        """`output`: vLLM's RequestOutput or PoolingRequestOutput. `version`: for outputs without tokens."""
        self.cached_tokens = getattr(output, "num_cached_tokens", None) or self.cached_tokens
        outputs = output.outputs
        if not isinstance(outputs, list):  # a pooled output: one value, made in one go
            self.sequences[0] = (Span(version, 0, 0),)
            return
        for each in outputs:
            found = tuple(Span(s.version, s.start, s.end) for s in each.weight_versions or ())
            self.sequences[each.index] = found or self.sequences.get(each.index, ())


@dataclass(slots=True, eq=False)
class Reply:
    """`parts` in the order in which the route called the engine. `asked`: the JSON body of the request."""

    wanted: Wanted = field(default_factory=Wanted)
    asked: bytes = b""
    parts: list[Part] = field(default_factory=list)
    failure: LiveweightsError | None = None
    ended_by_update: bool = False

    @property
    def choices(self) -> int:
        """How many the answer has."""
        return len(self.parts) * self._per_part

    @property
    def _per_part(self) -> int:
        return max((index + 1 for part in self.parts for index in part.sequences), default=1)

    def part(self, request_id: str = "") -> Part:
        self.parts.append(Part(request_id))
        return self.parts[-1]

    def spans_of(self, choice: int) -> tuple[Span, ...]:
        """Of the choice with this index in the answer: prompts one after the other, each with its sequences."""
        part, sequence = divmod(choice, self._per_part)
        return self.parts[part].sequences.get(sequence, ()) if part < len(self.parts) else ()


#: Set around every request by the middleware; tasks that a route starts inherit it.
current_reply: ContextVar[Reply | None] = ContextVar("liveweights_reply", default=None)
