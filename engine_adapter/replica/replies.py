"""One request as the gate sees it: which versions it accepts, and which version made which of its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, StrictInt, StrictStr

from engine_adapter.base import GenerateRequest
from updater.core.errors import Failure, refuse
from updater.core.version import START, Version


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which versions a request accepts."""

    minimum: Version | None = None
    exact: Version | None = None

    def accepts(self, label: str) -> bool:
        if self.minimum is None and self.exact is None:
            return True
        try:
            version = Version.parse(label)
        except ValueError:
            return False
        return (self.minimum is None or version >= self.minimum) and (self.exact is None or version == self.exact)

    @property
    def particular(self) -> bool:
        return self.minimum is not None or self.exact is not None


class VersionWish(BaseModel):
    """`liveweights` of a request."""

    model_config = ConfigDict(extra="forbid")
    min_version: StrictStr | StrictInt | None = None
    exact_version: StrictStr | StrictInt | None = None

    def wanted(self, current: str) -> Wanted:
        """`current`: the version that is served; a bare step is one of its run. Raises Rejected (`bad_request`)."""
        try:
            return Wanted(*(_version_of(label, current) for label in (self.min_version, self.exact_version)))
        except ValueError as error:
            raise refuse("bad_request", f"liveweights: {error}") from None


def _version_of(label: str | int | None, current: str) -> Version | None:
    """`run-step`, `start`, or a bare step of the run of `current`. Raises ValueError."""
    if not isinstance(label, int):
        return None if label is None else Version.parse(label)
    return replace(Version.parse(current) if current else START, step=label)


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `start` to `end` (half-open) of a reply were made by `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ReplyPiece:
    """New tokens of a reply. The last piece has a finish reason; `failure` says why one that broke did."""

    tokens: tuple[int, ...]
    finish_reason: str | None = None
    failure: Failure | None = None


class RunningReply:
    """One admitted request. `spans` and `tokens` grow until the last piece was handed out."""

    def __init__(self, request: GenerateRequest, wanted: Wanted, version: str) -> None:
        self.request = request
        self.wanted = wanted
        self.version = version  # at dispatch; then of the last token
        self.engine_id = request.request_id
        self.tokens: list[int] = []
        self.spans: list[Span] = []
        self.cached_tokens = 0
        self.stale = False  # what it found in the cache may be of before a switch (`cache=keep`)
        self.finish_reason: str | None = None
        self.failure: Failure | None = None
        self.next_version: str | None = None  # the one switch that recompute or keep allows
        self.requeue = False  # recompute: cancelled at the engine, to go on after the switch
        self.resubmitted = 0
        self.ended_by_update = False
        self._pieces: asyncio.Queue[ReplyPiece] = asyncio.Queue()

    async def pieces(self) -> AsyncIterator[ReplyPiece]:
        """Every piece, the last one included."""
        while True:
            piece = await self._pieces.get()
            yield piece
            if piece.finish_reason is not None:
                return

    def take(self, tokens: tuple[int, ...], version: str) -> bool:
        """Append tokens of `version`; False if that would mix versions without leave."""
        if not tokens:
            return True
        last = self.spans[-1] if self.spans else None
        if last is None and version not in (self.version, self.next_version):
            return False
        if last is not None and last.version != version:
            if version != self.next_version:
                return False
            self.next_version = None
            last = None
        start, end = len(self.tokens), len(self.tokens) + len(tokens)
        if last is None:
            self.spans.append(Span(version, start, end))
        else:
            self.spans[-1] = replace(last, end=end)
        self.version = version
        self.tokens.extend(tokens)
        return True

    def hand_out(self, piece: ReplyPiece) -> None:
        if self.finish_reason is not None:
            return
        self.finish_reason, self.failure = piece.finish_reason, piece.failure
        self._pieces.put_nowait(piece)

    def continuation(self) -> GenerateRequest:
        """What is left to do, as a request of its own: the prompt and what was made so far."""
        self.resubmitted += 1
        self.engine_id = f"{self.request.request_id}.{self.resubmitted}"
        return replace(
            self.request,
            request_id=self.engine_id,
            prompt=self.request.prompt + tuple(self.tokens),
            max_tokens=self.request.max_tokens - len(self.tokens),
        )


def stale_prefix(stale: bool, cached_tokens: int) -> dict[str, bool]:
    """What a reply says of keys and values that it did not compute: they may be of earlier weights than its tokens."""
    return {"stale_prefix": True} if stale and cached_tokens else {}


def listed(spans: Iterable[Span]) -> list[dict[str, Any]]:
    return [{"version": span.version, "start": span.start, "end": span.end} for span in spans]


def made_by(version: str, digest_of: Callable[[str], str], spans: Iterable[Span]) -> dict[str, Any]:
    """What `liveweights` of every reply begins with."""
    return {"version": version, "digest": digest_of(version), "spans": listed(spans)}


#: What `liveweights` of a reply that an update cut short has besides: what is there is whole, and asking again helps.
CUT_SHORT = {"reason": "aborted_by_update", "retryable": True}
