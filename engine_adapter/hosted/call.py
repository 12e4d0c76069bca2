"""One call of the engine whose outputs go to a reader at the reader's pace, or to their end without waiting for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class _End:
    """Nothing follows. `error`: what the engine, or the code that notes its outputs, raised."""

    error: Exception | None = None


class EngineCall:
    """`outputs`: of the engine. `note`: sees each once, before the reader does; what it raises, the reader gets.

    `ended`: called once, when the engine has nothing more to say. Lives on one event loop.
    """

    def __init__(
        self, outputs: AsyncGenerator[Any, None], note: Callable[[Any], None], ended: Callable[[], None]
    ) -> None:
        self._outputs, self._note, self._ended = outputs, note, ended
        self._kept: asyncio.Queue[Any] = asyncio.Queue()
        self._detached = self._reading = self._over = False
        self._pump: asyncio.Task[None] | None = None

    def detach(self) -> None:
        """From here on the engine's outputs are kept for the reader, however slowly it reads.

        Without this, an engine that has ended a request is not known to have done so while its client reads nothing.
        """
        self._detached = True
        self._pump_now()

    async def read(self) -> AsyncGenerator[Any, None]:
        """Every output; leaving early ends the call at the engine. To be read once."""
        try:
            while True:
                output = await (self._step() if self._pump is None else self._kept.get())
                if isinstance(output, _End):
                    if output.error is not None:
                        raise output.error
                    return
                yield output
        finally:
            await self._close()

    async def _step(self) -> Any:
        """The next output as the engine makes it, or the end."""
        self._reading = True
        try:
            output = await anext(self._outputs, _End())
            if not isinstance(output, _End):
                self._note(output)
        except Exception as error:
            output = _End(error)
        finally:
            self._reading = False
        if isinstance(output, _End):
            await self._outputs.aclose()
            self._finish()
        else:
            self._pump_now()
        return output

    def _pump_now(self) -> None:
        if self._detached and not self._reading and not self._over and self._pump is None:
            self._pump = asyncio.ensure_future(self._keep())

    async def _keep(self) -> None:
        while not self._over:
            self._kept.put_nowait(await self._step())

    def _finish(self) -> None:
        if not self._over:
            self._over = True
            self._ended()

    async def _close(self) -> None:
        try:
            if self._pump is not None:
                self._pump.cancel()
                await asyncio.gather(self._pump, return_exceptions=True)
        finally:
            try:
                await self._outputs.aclose()
            finally:
                self._finish()
