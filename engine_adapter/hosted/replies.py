"""One HTTP reply of an engine's own server: which versions it accepts, and which version made which of its tokens."""

from __future__ import annotations

import json
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from engine_adapter.replica.replies import Span, Wanted, stale_prefix
from updater.core.errors import LiveweightsError


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What the engine says at one moment of a call. `sequences`: what made the tokens of each, by its index; None for
    one value that was made in one go (an embedding). `aborted`: a sequence was cut short. `empty`: of such a value:
    nothing was computed.
    """

    finished: bool
    sequences: dict[int, tuple[Span, ...]] | None
    aborted: bool = False
    empty: bool = False
    cached_tokens: int = 0


@dataclass(slots=True)
class CallPart:
    """One call of the engine: `sequences` by their index (more than one where the request asks for `n`). `stale`: what
    it found in the cache may be of before a switch (`cache=keep`).
    """

    request_id: str = ""
    wanted: int = 1  # so many sequences
    sequences: dict[int, tuple[Span, ...]] = field(default_factory=dict)
    cached_tokens: int = 0
    stale: bool = False

    @property
    def versions(self) -> set[str]:
        return {span.version for spans in self.sequences.values() for span in spans}

    def take(self, output: EngineOutput, version: str) -> None:
        """`version`: for outputs without tokens."""
        self.cached_tokens = output.cached_tokens or self.cached_tokens
        found = {0: (Span(version, 0, 0),)} if output.sequences is None else output.sequences
        self.sequences |= {index: spans or self.sequences.get(index, ()) for index, spans in found.items()}


@dataclass(slots=True, eq=False)
class Reply:
    """`parts` in the order in which the route called the engine. `asked`: the JSON body of the request. `version`: at
    the first dispatch. `ended_by_update`: some of it was cut short by an update.
    """

    wanted: Wanted = field(default_factory=Wanted)
    asked: bytes = b""
    version: str = ""
    parts: list[CallPart] = field(default_factory=list)
    failure: LiveweightsError | None = None
    ended_by_update: bool = False

    @property
    def choices(self) -> int:
        """How many the answer has."""
        return len(self.parts) * self._per_part

    @property
    def is_beam_search(self) -> bool:
        """Its choices are put together from many calls, so that no call is a choice."""
        return b'"use_beam_search"' in self.asked and bool(self.body.get("use_beam_search"))

    @property
    def body(self) -> dict[str, Any]:
        """`asked`, where it is a JSON object."""
        return json_object(self.asked) or {}

    @property
    def _per_part(self) -> int:
        return max((part.wanted for part in self.parts), default=1)

    def part(self, request_id: str = "", wanted: int = 1) -> CallPart:
        self.parts.append(CallPart(request_id, wanted))
        return self.parts[-1]

    def found_stale(self, choice: int | None = None) -> dict[str, bool]:
        """See `stale_prefix`: of the choice with this index, or of any."""
        at = None if choice is None or self.is_beam_search else choice // self._per_part
        parts = self.parts if at is None else self.parts[at : at + 1]
        return stale_prefix(any(part.stale and part.cached_tokens for part in parts), 1)

    def spans_of(self, choice: int) -> tuple[Span, ...]:
        """Of the choice with this index in the answer: prompts one after the other, each with its sequences.

        None of a beam search.
        """
        if self.is_beam_search:
            return ()
        part, sequence = divmod(choice, self._per_part)
        return self.parts[part].sequences.get(sequence, ()) if part < len(self.parts) else ()


def json_object(text: bytes) -> dict[str, Any] | None:
    """What `text` says, where that is a JSON object."""
    try:
        document = json.loads(text)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


#: Set around every request by the middleware; tasks that a route starts inherit it.
current_reply: ContextVar[Reply | None] = ContextVar("liveweights_reply", default=None)
