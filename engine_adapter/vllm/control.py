"""vLLM's engine client as the front uses it: public calls only, each under a deadline, failures typed.

A call that is late is not taken back inside vLLM: the caller decides what to do next, and the engine's own queue
keeps the order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

from updater.core.errors import Aborted, Failure
from updater.protocol import wire

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Attached:
    """What a worker extension method answers through `collective_rpc`: it never raises across it."""

    rank: int
    ok: bool
    error: str = ""


class VllmControl:
    """Implements `hosted.pool.EngineControl`. `client`: vLLM's `EngineClient`, as an endpoint plugin gets it."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._paused = False  # by us

    async def check(self, deadline_s: float) -> None:
        """Before the server listens. Raises Aborted with why a worker's model can never be updated."""
        await self._on_all("liveweights_check", (), deadline_s)

    async def attach(self, address: str, token: str, deadline_s: float) -> None:
        """Every worker connects to `address`. Raises Aborted with what each said."""
        await self._on_all("liveweights_attach", (address, token), deadline_s)

    async def pause(self, number: int, deadline_s: float) -> bool:
        """The scheduler stops between two steps, whatever runs stays where it is, and every rank notes where it
        stands. False, and nothing was touched: the engine sleeps, or another caller has paused it.

        Raises Aborted (`quiesce_timeout`); the engine then goes on.
        """
        try:
            async with asyncio.timeout(deadline_s):
                if not self._paused and await self._client.is_sleeping():
                    return False
                self._paused = True
                await self._client.pause_generation(mode="keep", clear_cache=False)
                await self._stand(number)
        except TimeoutError:
            await self.resume(deadline_s)
            raise Aborted(Failure("quiesce_timeout", f"the engine did not stop within {deadline_s:.1f} s")) from None
        except Aborted:
            await self.resume(deadline_s)
            raise
        except Exception as error:  # the boundary to vLLM: it raises bare exceptions
            raise _dead("pause", error) from error
        return True

    async def _stand(self, number: int) -> None:
        """Every rank notes where it stands."""
        await self._answers("liveweights_stand", (number,))

    async def resume(self, deadline_s: float) -> None:
        """Let the engine go on, if we stopped it: another caller that paused it or put it to sleep wakes it."""
        if self._paused:
            await self._within(self._client.resume_generation(), "resume", deadline_s)
            self._paused = False

    async def label(self, version: str, deadline_s: float) -> None:
        """Tokens made from here on carry `version`."""
        await self._within(self._client.update_weight_version(version), "update_weight_version", deadline_s)

    async def reset_caches(self, deadline_s: float) -> dict[str, bool]:
        """While paused: every tier -> really empty. What runs is put back to be computed anew."""
        prefix = self._client.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        cleared, others = await self._within(
            asyncio.gather(prefix, self.reset_encodings(deadline_s)), "reset of the caches", deadline_s
        )
        return {"prefix": bool(cleared), **others}

    async def reset_encodings(self, deadline_s: float) -> dict[str, bool]:
        """The tiers whose keys name an input alone, so that no namespace keeps versions apart in them."""
        both = asyncio.gather(self._client.reset_mm_cache(), self._client.reset_encoder_cache())
        await self._within(both, "reset of the encoders' caches", deadline_s)
        return {"multimodal": True, "encoder": True}

    async def abort(self, request_id: str) -> None:
        await self._client.abort(request_id)

    async def _on_all(self, method: str, args: tuple[Any, ...], deadline_s: float) -> None:
        await self._within(self._answers(method, args), method, deadline_s)

    async def _answers(self, method: str, args: tuple[Any, ...]) -> None:
        """No time-out is handed to vLLM: it would leave the replies of slow ranks in its queue for the next call."""
        answers = [wire.build(Attached, each) for each in await self._client.collective_rpc(method, args=args)]
        failures = [Failure("rank_failed", each.error, rank=each.rank) for each in answers if not each.ok]
        if failures:
            raise Aborted(*failures)

    async def _within(self, call: Awaitable[_Answer], what: str, deadline_s: float) -> _Answer:
        try:
            async with asyncio.timeout(deadline_s):
                return await call
        except TimeoutError:
            raise Aborted(Failure("phase_timeout", f"no answer to {what} in {deadline_s:.1f} s")) from None
        except Aborted:
            raise
        except Exception as error:  # the boundary to vLLM
            raise _dead(what, error) from error


def _dead(what: str, error: Exception) -> Aborted:
    return Aborted(Failure("rank_failed", f"{what}: {type(error).__name__}: {error}"))
