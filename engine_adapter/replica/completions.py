"""The OpenAI-compatible face of a replica: `/v1/completions`, streamed or not, and `/v1/models`.

What is not supported is refused, never ignored. Every reply, and the last chunk of a stream, says which version made
which tokens.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, StrictInt
from tokenizers import Tokenizer

from engine_adapter.base import GenerateRequest
from engine_adapter.replica.admission import Gate
from engine_adapter.replica.replies import (
    CUT_SHORT,
    ReplyPiece,
    RunningReply,
    VersionWish,
    Wanted,
    made_by,
    stale_prefix,
)
from updater.core.errors import Failure, Unavailable, refuse
from updater.protocol.events import EVENT_STREAM, event_text
from updater.protocol.problems import problem_body
from updater.server.guard import problem

MAX_TOKENS_BOUND = 1 << 20


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = True


class CompletionRequest(BaseModel):
    """The subset of the OpenAI request that is honoured; other members are allowed only where they ask for nothing."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    prompt: str | list[StrictInt]
    max_tokens: int = Field(default=16, ge=1, le=MAX_TOKENS_BOUND)
    temperature: float = Field(default=0.0, ge=0.0, le=100.0)
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop_token_ids: list[StrictInt] = []
    ignore_eos: bool = False
    user: str | None = None
    liveweights: VersionWish | None = None
    n: Literal[1] = 1
    best_of: Literal[1] | None = None
    echo: Literal[False] = False
    logprobs: None = None
    suffix: None = None
    stop: None = None
    top_p: float = Field(default=1.0, ge=1.0, le=1.0)
    presence_penalty: float = Field(default=0.0, ge=0.0, le=0.0)
    frequency_penalty: float = Field(default=0.0, ge=0.0, le=0.0)
    logit_bias: None = None


@dataclass(frozen=True, slots=True)
class CompletionSettings:
    """`request_s`: no reply runs longer than this (I9)."""

    request_s: float = 600.0


class Completions:
    """`digest_of`: version label -> content digest, as far as this replica served it."""

    def __init__(
        self,
        gate: Gate,
        text: ModelText,
        digest_of: Callable[[str], str],
        settings: CompletionSettings | None = None,
    ) -> None:
        self._gate = gate
        self._text = text
        self._digest_of = digest_of
        self._settings = settings or CompletionSettings()
        self._created = int(time.time())

    def router(self) -> APIRouter:
        router = APIRouter()
        router.add_api_route("/v1/completions", self.complete, methods=["POST"], response_model=None)
        router.add_api_route("/v1/models", self.models, methods=["GET"], response_model=None)
        return router

    async def models(self) -> JSONResponse:
        entry = {"id": self._text.name, "object": "model", "created": self._created, "owned_by": "liveweights"}
        return JSONResponse({"object": "list", "data": [entry | {"liveweights": {"version": self._gate.version}}]})

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        running = await self._admitted(body, request)
        if body.stream:
            return StreamingResponse(self._chunks(running), media_type=EVENT_STREAM)
        return await self._whole(running, request)

    async def _admitted(self, body: CompletionRequest, request: Request) -> RunningReply:
        wanted = body.liveweights.wanted(self._gate.version) if body.liveweights is not None else Wanted()
        generate = self._generate_request(body)
        admission = asyncio.ensure_future(self._gate.admit(generate, wanted))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({admission, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not admission.done():
                raise Unavailable(Failure("client_abort", "the client went away while it waited"))
            return admission.result()
        finally:
            gone.cancel()
            admission.cancel()

    def _generate_request(self, body: CompletionRequest) -> GenerateRequest:
        if body.model is not None and body.model.rstrip("/").rsplit("/", 1)[-1] != self._text.name:
            raise refuse("not_found", f"this replica serves the model {self._text.name!r}")
        prompt = self._text.encode(body.prompt) if isinstance(body.prompt, str) else tuple(body.prompt)
        self._text.check(prompt, body.max_tokens)
        stops = (() if body.ignore_eos else self._text.eos) + tuple(body.stop_token_ids)
        return GenerateRequest(
            self._gate.next_id(), prompt, body.max_tokens, tuple(dict.fromkeys(stops)), body.temperature, body.seed
        )

    async def _whole(self, running: RunningReply, request: Request) -> Response:
        stream = TextStream(self._text.tokenizer)
        parts: list[str] = []
        gone = asyncio.ensure_future(_disconnected(request))
        gone.add_done_callback(lambda done: None if done.cancelled() else self._gate.give_up(running))
        try:
            async with aclosing(self._bounded(running)) as pieces:
                async for piece in pieces:
                    parts.append(stream.add(piece.tokens, last=piece.finish_reason is not None))
        finally:
            gone.cancel()
        if running.failure is not None:
            return problem(Unavailable(running.failure, live_version=self._gate.version or None))
        choice = self._choice("".join(parts), running.tokens, running.finish_reason)
        return JSONResponse(self._envelope(running, choice) | self._ending(running))

    async def _chunks(self, running: RunningReply) -> AsyncIterator[str]:
        stream = TextStream(self._text.tokenizer)
        async with aclosing(self._bounded(running)) as pieces:
            async for piece in pieces:
                chunk = self._chunk(running, piece, stream)
                yield event_text(chunk)
        yield "data: [DONE]\n\n"

    def _chunk(self, running: RunningReply, piece: ReplyPiece, stream: TextStream) -> dict[str, Any]:
        last = piece.finish_reason is not None
        choice = self._choice(stream.add(piece.tokens, last=last), list(piece.tokens), piece.finish_reason)
        chunk = self._envelope(running, choice) | (self._ending(running) if last else {})
        if piece.failure is not None:
            chunk["error"] = problem_body(Unavailable(piece.failure, live_version=self._gate.version or None))
        return chunk

    async def _bounded(self, running: RunningReply) -> AsyncGenerator[ReplyPiece, None]:
        """Every piece, the last one within the deadline; leaving early cancels the request at the engine."""
        limit = asyncio.get_running_loop().call_later(self._settings.request_s, self._gate.give_up, running)
        try:
            async for piece in running.pieces():
                yield piece
        finally:
            limit.cancel()
            if running.finish_reason is None:
                self._gate.give_up(running)

    def _choice(self, text: str, tokens: list[int], finish_reason: str | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "token_ids": tokens, "logprobs": None, "finish_reason": finish_reason}

    def _envelope(self, running: RunningReply, choice: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": f"cmpl-{running.request.request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._text.name,
            "choices": [choice],
        }

    def _ending(self, running: RunningReply) -> dict[str, Any]:
        prompt, made = len(running.request.prompt), len(running.tokens)
        return {
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": made,
                "total_tokens": prompt + made,
                "prompt_tokens_details": {"cached_tokens": running.cached_tokens},
            },
            "liveweights": {
                **made_by(running.version, self._digest_of, running.spans),
                **stale_prefix(running.stale, running.cached_tokens),
                **(CUT_SHORT if running.finish_reason == "abort" and running.ended_by_update else {}),
            },
        }


async def _disconnected(request: Request) -> None:
    """Returns when the client has gone. The body was read before: what comes now is the end."""
    while (await request.receive())["type"] != "http.disconnect":
        continue


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
