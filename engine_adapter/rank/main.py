"""The process of one rank: `python -m engine_adapter.rank.main --fd N`, started by `ranks.RankPool` only.

Four threads: the main one reads the channel and runs control verbs, one at low priority runs everything that may
take long while the engine serves (`STAGING_VERBS`), the engine's own one emits tokens, one looks whether it failed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from engine_adapter.base import EngineFactory, RankEngine, TokenEvent
from engine_adapter.rank.agent import RankAgent
from engine_adapter.rank.channel import RankChannel
from engine_adapter.rank.control_messages import (
    ENGINE_FAILED,
    Build,
    CancelRequest,
    CancelStaging,
    Label,
    Staged,
    StartServing,
    StopEngine,
    Tokens,
)
from engine_adapter.rank.hello import hello_of
from engine_adapter.rank.messages import Hello, RankDone
from engine_adapter.rank.server import RankServer
from updater.core.errors import Failure, LiveweightsError

_PR_SET_PDEATHSIG = 1
_WATCH_S = 0.25  # how long a failed engine may go unnoticed


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its front dies; leave at once if that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def load_factory(name: str) -> EngineFactory:
    """`package.module:function`. Raises LiveweightsError if there is no such thing."""
    module_name, _, function = name.partition(":")
    try:
        factory: EngineFactory = getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise LiveweightsError(Failure("bad_request", f"no engine factory {name!r}: {error}")) from None
    return factory


class RankProcess:
    """One life of one rank."""

    def __init__(self, channel: RankChannel) -> None:
        self.server = RankServer(channel, self._handle)
        self._agent: RankAgent | None = None
        self._engine: RankEngine | None = None
        self._verbs: dict[str, Callable[[Any], Any]] = {
            "build": self._build,
            "start": self._start,
            "label": self._label,
            "submit": self._submit,
            "cancel_request": self._cancel_request,
            "cancel_staging": self._cancel_staging,
            "stop": self._stop,
        }

    def run(self) -> None:
        """Until `stop` or until the front is gone."""
        self.server.run()

    def _watch(self, engine: RankEngine) -> None:
        """An engine that failed inside a process that lives would fail every request for ever: let the front learn of
        it from the kernel, like of any other death.
        """
        while not self.server.stopping:
            failure = engine.failure
            if failure is not None and not self.server.stopping:
                print(f"the engine failed: {failure}", file=sys.stderr, flush=True)
                os._exit(ENGINE_FAILED)
            time.sleep(_WATCH_S)

    def _handle(self, verb: str, request: Any) -> Any:
        own = self._verbs.get(verb)
        if own is not None:
            return own(request) or RankDone()
        return self._ready_agent().handle(verb, request)

    def _ready_agent(self) -> RankAgent:
        if self._agent is None:
            raise LiveweightsError(Failure("wrong_phase", "the model is not loaded"))
        return self._agent

    def _ready_engine(self) -> RankEngine:
        if self._engine is None:
            raise LiveweightsError(Failure("wrong_phase", "the model is not loaded"))
        return self._engine

    def _build(self, request: Build) -> Hello:
        spec = request.spec
        engine = load_factory(request.factory)(spec)
        self._engine, self._agent = engine, RankAgent(engine, tell=self._tell, awaited=self.server.awaited)
        return hello_of(engine, spec)

    def _start(self, request: StartServing) -> None:
        self._ready_agent().label(request.version, request.digest)
        engine = self._ready_engine()
        engine.start(self._emit)
        # Libraries and model leave several hundred thousand objects: looking through them once takes longer than ten
        # pauses, and they stay for good.
        gc.collect()
        gc.freeze()
        threading.Thread(target=self._watch, args=(engine,), name="watch", daemon=True).start()

    def _label(self, request: Label) -> None:
        self._ready_agent().relabel(request.version, request.digest)

    def _submit(self, request: Any) -> None:
        self._ready_engine().submit(request)

    def _cancel_request(self, request: CancelRequest) -> None:
        self._ready_engine().cancel(request.request_id)

    def _cancel_staging(self, request: CancelStaging) -> None:
        self._ready_agent().cancel(request.serial)

    def _stop(self, request: StopEngine) -> None:
        self.server.stop()
        if self._engine is not None:
            self._engine.stop(request.deadline_s)

    def _tell(self, serial: int, done: int) -> None:
        self.server.event("staged", Staged(serial, done))

    def _emit(self, event: TokenEvent) -> None:
        self.server.event("tokens", Tokens((event,)))


def main(arguments: list[str] | None = None) -> None:
    """Never returns: threads of the engine or of torch must not keep a rank alive whose front has gone."""
    parser = argparse.ArgumentParser(prog="engine_adapter.rank.main")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args(arguments)
    die_with_parent(options.parent)
    started = time.monotonic()
    RankProcess(RankChannel(socket.socket(fileno=options.fd))).run()
    print(f"rank process ends after {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
