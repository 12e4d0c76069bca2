"""Clients that stream from both replicas without end, and everything they were answered."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from updater.demo.clients import ClientReply

_BETWEEN_S = 0.05
_TURNED_AWAY_S = 0.15
_REPLY_S = 30.0


@dataclass(frozen=True)
class Heard:
    """One stream. `digest`: what the reply says of its version. `named`: False for one that broke off before its last
    event, which carries the version: then `reply.version` is empty."""

    reply: ClientReply
    digest: str
    named: bool = True


class Load:
    """`urls`: replica -> where its clients ask. `asking`: what each request says beside its prompt.

    Runs on a thread of its own from `start` to `stop`.
    """

    def __init__(
        self, urls: Mapping[str, str], prompts: Sequence[Sequence[int]], asking: Mapping[str, Any], clients: int = 2
    ) -> None:
        self._urls, self._prompts, self._asking, self._clients = urls, prompts, asking, clients
        self._lock = threading.Lock()
        self._heard: list[Heard] = []
        self.turned_away: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="bad-day-load", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(2 * _REPLY_S)
        self._loop.close()

    def take(self) -> list[Heard]:
        """What was heard since this was asked last."""
        with self._lock:
            heard, self._heard = self._heard, []
        return heard

    def seen(self) -> Counter[tuple[str, str]]:
        """How many whole replies there are of each (replica, version) since `take`."""
        with self._lock:
            return Counter((each.reply.replica, each.reply.version) for each in self._heard if each.named)

    def _run(self) -> None:
        self._loop.run_until_complete(self._all())

    async def _all(self) -> None:
        stopped = asyncio.create_task(self._stopping.wait())
        clients = [
            asyncio.create_task(self._client(replica, url, number))
            for replica, url in self._urls.items()
            for number in range(self._clients)
        ]
        await stopped
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)

    async def _client(self, replica: str, url: str, number: int) -> None:
        turn = number
        timeout = httpx.Timeout(_REPLY_S, connect=5.0)
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=timeout) as http:
            while True:
                served = await self._ask(http, replica, turn % len(self._prompts))
                turn += self._clients + 1  # neighbours on one prefix meet in time
                await asyncio.sleep(_BETWEEN_S if served else _TURNED_AWAY_S)

    async def _ask(self, http: httpx.AsyncClient, replica: str, prompt: int) -> bool:
        body = {**self._asking, "prompt": list(self._prompts[prompt]), "stream": True}
        chunks: list[dict[str, Any]] = []
        try:
            async with http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    problem = json.loads(await response.aread())
                    self.turned_away[str(problem.get("code", response.status_code))] += 1
                    return False
                async for line in response.aiter_lines():
                    data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                    if data and data != "[DONE]":
                        chunks.append(json.loads(data))
        except (httpx.HTTPError, ValueError) as error:
            self.turned_away[type(error).__name__] += 1
        heard = heard_of(replica, prompt, chunks)
        if heard is not None:
            with self._lock:
                self._heard.append(heard)
        return heard is not None


def heard_of(replica: str, prompt: int, events: Sequence[Mapping[str, Any]]) -> Heard | None:
    """What the events of one stream amount to, if to anything. One that ended in an error is judged like one that was
    cut short."""
    chunks = [event for event in events if event.get("choices")]
    if not chunks:
        return None
    last = chunks[-1]
    tokens = tuple(token for chunk in chunks for token in chunk["choices"][0].get("token_ids") or ())
    told = last.get("liveweights")
    if not isinstance(told, dict):
        return Heard(ClientReply(replica, prompt, tokens, "", (), "abort"), "", named=False)
    spans = tuple((span["version"], span["start"], span["end"]) for span in told["spans"])
    reason = "abort" if last.get("error") else str(last["choices"][0]["finish_reason"])
    cached = int(last.get("usage", {}).get("prompt_tokens_details", {}).get("cached_tokens", 0))
    return Heard(ClientReply(replica, prompt, tokens, told["version"], spans, reason, cached), str(told["digest"]))
