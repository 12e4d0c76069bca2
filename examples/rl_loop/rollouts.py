"""Completions from a replica: sampled over HTTP, none older than what was asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from updater.core.version import Version

REPLY_S = 300.0
LOWER_CASE = frozenset(range(ord("a"), ord("z") + 1))


class TooOld(Exception):
    """A reply holds a token of a version below the one that was asked for."""


@dataclass(frozen=True, slots=True)
class Rollout:
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    version: str

    @property
    def reward(self) -> float:
        """Share of lower-case letters."""
        return sum(token in LOWER_CASE for token in self.tokens) / len(self.tokens)


def sample(replica: str, prompts: Sequence[tuple[int, ...]], *, max_tokens: int, min_version: str) -> list[Rollout]:
    """One completion of exactly `max_tokens` tokens per prompt, all at once, in the order of the prompts."""
    return asyncio.run(_sample(replica, prompts, max_tokens, min_version))


async def _sample(replica: str, prompts: Sequence[tuple[int, ...]], max_tokens: int, oldest: str) -> list[Rollout]:
    limits = httpx.Limits(max_connections=16)
    async with httpx.AsyncClient(base_url=replica, timeout=REPLY_S, limits=limits, trust_env=False) as http:
        return list(await asyncio.gather(*(_one(http, prompt, max_tokens, oldest) for prompt in prompts)))


async def _one(http: httpx.AsyncClient, prompt: tuple[int, ...], max_tokens: int, oldest: str) -> Rollout:
    body = {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 1.0,
        "ignore_eos": True,
        "liveweights": {"min_version": oldest},
    }
    reply = (await http.post("/v1/completions", json=body)).raise_for_status().json()
    for span in reply["liveweights"]["spans"]:
        if Version.parse(span["version"]) < Version.parse(oldest):
            raise TooOld(f"asked for {oldest} or newer, got a token of {span['version']}")
    return Rollout(prompt, tuple(reply["choices"][0]["token_ids"]), reply["liveweights"]["version"])


def refuses(replica: str, min_version: str) -> bool:
    """Whether the replica turns a request down that wants a version that is not published."""
    body = {"prompt": [65], "max_tokens": 1, "liveweights": {"min_version": min_version}}
    answer = httpx.post(f"{replica}/v1/completions", json=body, timeout=REPLY_S, trust_env=False)
    return answer.status_code == 409 and answer.json()["code"] == "version_not_served"
