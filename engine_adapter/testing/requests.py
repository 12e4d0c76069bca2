"""The gate's seam, driven by hand: a `RequestEngine` whose tokens come when a test says so."""

from __future__ import annotations

import asyncio
from typing import Any

from engine_adapter.admission import Gate
from engine_adapter.base import GenerateRequest, TokenEvent
from updater.core.errors import Aborted, Failure


class HandEngine:
    """Records what it is told. `refuse_submits`: every submission is refused with `rank_failed`."""

    def __init__(self) -> None:
        self.submitted: dict[str, GenerateRequest] = {}
        self.cancelled: list[str] = []
        self.refuse_submits = False
        self.gate: Gate | None = None
        self._came = asyncio.Event()

    def submit(self, request: GenerateRequest) -> asyncio.Future[Any]:
        taken: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.refuse_submits:
            taken.set_exception(Aborted(Failure("rank_failed", "told to refuse", rank=0)))
        else:
            self.submitted[request.request_id] = request
            self._came.set()
            taken.set_result(None)
        return taken

    async def until_submitted(self, count: int) -> None:
        """Until so many requests have come."""
        while len(self.submitted) < count:
            self._came.clear()
            await self._came.wait()

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def emit(self, request_id: str, *tokens: int, version: str, finish: str | None = None, cached: int = 0) -> None:
        """One token event to the gate, as a rank would send it."""
        if self.gate is None:
            raise RuntimeError("no gate")
        self.gate.on_tokens(TokenEvent(request_id, tokens, version, finish, cached_tokens=cached))
