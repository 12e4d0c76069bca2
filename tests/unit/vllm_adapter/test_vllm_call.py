"""One call of the engine: read at the reader's pace, or to its end without waiting for the reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress

import pytest

from engine_adapter.hosted.call import EngineCall


class Engine:
    """Makes 0, 1, 2, ... as far as it is told to. `closed`: the call was ended."""

    def __init__(self, last: int = 4, breaks: bool = False) -> None:
        self.made = 0
        self.closed = self.ended = 0
        self.noted: list[int] = []
        self._last, self._breaks = last, breaks
        self._may = asyncio.Semaphore(0)
        self.call = EngineCall(self._outputs(), self._note, self._end)

    def make(self, count: int) -> None:
        for _ in range(count):
            self._may.release()

    async def _outputs(self) -> AsyncGenerator[int, None]:
        try:
            while self.made < self._last:
                await self._may.acquire()
                self.made += 1
                yield self.made - 1
            if self._breaks:
                raise RuntimeError("the engine is gone")
        finally:
            self.closed += 1

    def _note(self, output: int) -> None:
        self.noted.append(output)
        if output == 99:
            raise ValueError("mixed")

    def _end(self) -> None:
        self.ended += 1


def run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 60))  # type: ignore[arg-type]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("at", [None, 0, 1, 3])
def test_a_reader_gets_every_output_once_and_in_order_wherever_the_call_was_detached(at: int | None) -> None:
    async def main() -> None:
        engine, read = Engine(), []
        engine.make(4)
        if at == 0:
            engine.call.detach()
        async for output in engine.call.read():
            read.append(output)
            if len(read) == at:
                engine.call.detach()
        assert read == engine.noted == [0, 1, 2, 3]
        assert (engine.closed, engine.ended) == (1, 1)

    run(main)


def test_an_attached_call_goes_no_faster_than_its_reader() -> None:
    async def main() -> None:
        engine = Engine()
        engine.make(4)
        outputs = engine.call.read()
        await anext(outputs)
        await settle()
        assert (engine.made, engine.ended) == (1, 0)
        await outputs.aclose()
        assert (engine.closed, engine.ended) == (1, 1)

    run(main)


def test_a_detached_call_ends_without_its_reader() -> None:
    async def main() -> None:
        engine = Engine()
        engine.make(4)
        outputs = engine.call.read()
        await anext(outputs)
        engine.call.detach()
        await settle()
        assert (engine.made, engine.closed, engine.ended) == (4, 1, 1)
        assert [output async for output in outputs] == [1, 2, 3]

    run(main)


def test_a_call_that_is_detached_while_its_reader_waits_still_serves_it() -> None:
    async def main() -> None:
        engine = Engine()
        outputs = engine.call.read()
        waits = asyncio.ensure_future(anext(outputs))
        await settle()
        engine.call.detach()
        engine.make(4)
        assert await waits == 0
        await settle()
        assert engine.ended == 1
        assert [output async for output in outputs] == [1, 2, 3]

    run(main)


@pytest.mark.parametrize("detached", [False, True])
def test_what_the_engine_raises_reaches_the_reader_behind_what_it_made(detached: bool) -> None:
    async def main() -> None:
        engine, read = Engine(last=2, breaks=True), list[int]()
        engine.make(2)
        if detached:
            engine.call.detach()
            await settle()
        outputs = engine.call.read()
        read += [await anext(outputs), await anext(outputs)]
        with pytest.raises(RuntimeError):
            await anext(outputs)
        assert (read, engine.ended) == ([0, 1], 1)

    run(main)


@pytest.mark.parametrize("detached", [False, True])
def test_an_output_that_is_refused_ends_the_call_at_the_engine(detached: bool) -> None:
    async def main() -> None:
        engine = Engine(last=200)
        engine.made = 99
        engine.make(5)
        if detached:
            engine.call.detach()
            await settle()
            assert engine.closed == 1  # whether it is read or not
        with pytest.raises(ValueError):
            await anext(engine.call.read())
        assert (engine.made, engine.closed, engine.ended) == (100, 1, 1)

    run(main)


@pytest.mark.parametrize("detached", [False, True])
def test_a_reader_that_is_cancelled_ends_the_call(detached: bool) -> None:
    async def main() -> None:
        engine = Engine()
        if detached:
            engine.call.detach()

        async def read() -> list[int]:
            return [output async for output in engine.call.read()]

        reader = asyncio.ensure_future(read())
        await settle()
        reader.cancel()
        with suppress(asyncio.CancelledError):
            await reader
        await settle()
        assert (engine.closed, engine.ended) == (1, 1)

    run(main)
