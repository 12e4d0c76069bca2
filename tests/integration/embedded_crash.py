"""One of two ranks: rank 1's forward raises while a request runs. Rank 0 prints how the request ended."""

from __future__ import annotations

import os
import queue
import sys
import time
from typing import Any

from engine_adapter.base import EngineSpec, GenerateRequest, TokenEvent
from engine_adapter.models import encode
from engine_adapter.transformers.engine import build
from updater.core.policy import CachePolicy

GUARD_S = 100.0


def main(rank: int, model: str) -> None:
    engine = build(EngineSpec(rank, 2, model, f"{model}/meet", {"threads": 1}))
    events: queue.Queue[TokenEvent] = queue.Queue()
    engine.set_version("0-1", "", CachePolicy.RESET)
    engine.start(events.put)
    if rank == 0:
        engine.submit(GenerateRequest("long", encode("a request that runs for a while"), 1500))
        while (event := events.get(timeout=GUARD_S)).finish_reason is None:
            pass
        print(event.finish_reason, flush=True)
    else:
        steps_until(engine, 5)
        engine._model.model.norm.forward = fail
    end = time.monotonic() + GUARD_S
    while engine.failure is None and time.monotonic() < end:
        time.sleep(0.01)
    print("over" if engine.failure else "hangs", flush=True)
    os._exit(0)


def steps_until(engine: Any, count: int) -> None:
    end = time.monotonic() + GUARD_S
    while engine._manager.current_batch < count and time.monotonic() < end:
        time.sleep(0.01)


def fail(*_arguments: Any, **_named: Any) -> None:
    raise RuntimeError("broken on purpose")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
