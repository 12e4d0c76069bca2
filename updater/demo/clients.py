"""The demo's clients, and the judge of what they were answered."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from updater.protocol.events import EventParser

REPLY_S = 300.0  # only a hang takes as long
_TURNED_AWAY_PAUSE_S = 0.1


class Expected(Protocol):
    """What plain generation says: tokens, and per token how far the top logit is above the second."""

    @property
    def tokens(self) -> tuple[int, ...]: ...
    @property
    def margins(self) -> tuple[float, ...]: ...


@dataclass(frozen=True, slots=True)
class ClientReply:
    """One finished stream. `spans`: (version, start, end) over the token indexes, half-open."""

    replica: str
    prompt: int
    tokens: tuple[int, ...]
    version: str
    spans: tuple[tuple[str, int, int], ...]
    finish_reason: str
    cached_tokens: int = 0


@dataclass(slots=True)
class Load:
    """Clients that ask, stream, and ask again until they are stopped. `prompts`: token ids."""

    urls: Mapping[str, str]
    prompts: Sequence[Sequence[int]]
    max_tokens: int
    clients_per_replica: int = 3
    replies: list[ClientReply] = field(default_factory=list)
    turned_away: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def run(self) -> None:
        """Until `stop`; every stream that began is read to its end."""
        async with asyncio.TaskGroup() as group:
            for replica, url in self.urls.items():
                for number in range(self.clients_per_replica):
                    group.create_task(self._client(replica, url, number))

    def stop(self) -> None:
        self._stopping.set()

    async def wait_for(self, version: str, more: int, deadline_s: float = REPLY_S) -> None:
        """Until every replica has finished `more` further replies on `version`. Raises TimeoutError."""
        wanted = {name: self._seen(name, version) + more for name in self.urls}
        async with asyncio.timeout(deadline_s), self._changed:
            await self._changed.wait_for(lambda: all(self._seen(name, version) >= n for name, n in wanted.items()))

    def _seen(self, replica: str, version: str) -> int:
        return sum(reply.replica == replica and reply.version == version for reply in self.replies)

    async def _client(self, replica: str, url: str, number: int) -> None:
        turn = number
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=REPLY_S) as http:
            while not self._stopping.is_set():
                await self._ask(http, replica, turn % len(self.prompts))
                turn += self.clients_per_replica + 1  # so that neighbours on one prefix meet in time

    async def _ask(self, http: httpx.AsyncClient, replica: str, prompt: int) -> None:
        body = {
            "prompt": list(self.prompts[prompt]),
            "max_tokens": self.max_tokens,
            "stream": True,
            "ignore_eos": True,
        }
        try:
            async with http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code == 200:
                    await self._take(await _read_stream(response), replica, prompt)
                    return
                problem = json.loads(await response.aread())
                self.turned_away[str(problem.get("code", response.status_code))] += 1
        except (httpx.HTTPError, ValueError) as error:
            self.broken.append(f"{replica}: {type(error).__name__}: {error}")
        await asyncio.sleep(_TURNED_AWAY_PAUSE_S)

    async def _take(self, chunks: list[dict[str, Any]], replica: str, prompt: int) -> None:
        last = chunks[-1] if chunks else {}
        told = last.get("liveweights")
        if not isinstance(told, dict) or last.get("error"):
            self.broken.append(f"{replica}: a stream ended without its version: {str(last)[:300]}")
            return
        tokens = tuple(token for chunk in chunks for token in chunk["choices"][0]["token_ids"])
        spans = tuple((span["version"], span["start"], span["end"]) for span in told["spans"])
        usage = last.get("usage", {})
        cached = int(usage.get("prompt_tokens_details", {}).get("cached_tokens", 0))
        reason = str(last["choices"][0]["finish_reason"])
        async with self._changed:
            self.replies.append(ClientReply(replica, prompt, tokens, told["version"], spans, reason, cached))
            self._changed.notify_all()


async def _read_stream(response: httpx.Response) -> list[dict[str, Any]]:
    parser = EventParser()
    return [dict(event[1]) async for line in response.aiter_lines() if (event := parser.feed(line))]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`mixed`: one line per reply that is not wholly of the version it claims. Steps are tokens."""

    replies: int
    mixed: tuple[str, ...]
    compared: int
    left_out: int


def judge(
    replies: Sequence[ClientReply], expected: Mapping[str, Sequence[Expected]], *, margin: float, max_tokens: int
) -> Verdict:
    """Compare every reply with plain generation on the checkpoint of the version that it claims.

    From the first step on whose margin is below `margin`, another batch shape may rightly decide otherwise: these
    steps are left out and counted. `expected`: version label -> per prompt.
    """
    mixed, compared, left_out = [], 0, 0
    for reply in replies:
        fault, sure = _fault(reply, expected, margin, max_tokens)
        compared += sure
        left_out += len(reply.tokens) - sure
        if fault:
            mixed.append(f"{reply.replica}, prompt {reply.prompt}, version {reply.version}: {fault}")
    return Verdict(len(replies), tuple(mixed), compared, left_out)


def _fault(
    reply: ClientReply, expected: Mapping[str, Sequence[Expected]], margin: float, max_tokens: int
) -> tuple[str, int]:
    """What is wrong with a reply, or nothing; and how many of its steps were compared."""
    if reply.version not in expected:
        return "claims a version that was never published", 0
    # Under drain and abort a reply is of one version, from its first token to its last.
    whole = ((reply.version, 0, len(reply.tokens)),) if reply.tokens else ()
    if reply.spans != whole:
        return f"spans {list(reply.spans)} over {len(reply.tokens)} tokens", 0
    if reply.finish_reason not in ("length", "abort"):
        return f"ended with {reply.finish_reason}", 0
    if len(reply.tokens) > max_tokens or (reply.finish_reason == "length" and len(reply.tokens) < max_tokens):
        return f"{len(reply.tokens)} tokens and finish_reason {reply.finish_reason}", 0
    wanted = expected[reply.version][reply.prompt]
    thin = next((step for step, gap in enumerate(wanted.margins) if gap < margin), len(wanted.margins))
    sure = min(thin, len(reply.tokens))
    for step in range(sure):
        if reply.tokens[step] != wanted.tokens[step]:
            return f"token {step} is {reply.tokens[step]}, generate says {wanted.tokens[step]}", sure
    return "", sure
