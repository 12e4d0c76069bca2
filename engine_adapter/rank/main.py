"""The process of one rank: `python -m engine_adapter.rank.main --fd N`, started by `ranks.RankPool` only.

Four threads: the main one reads the channel and runs control verbs, one at low priority runs everything that may
take long while the engine serves (`STAGING_VERBS`), the engine's own one emits tokens, one looks whether it failed.
This file is the rank boundary: whatever a verb raises becomes a `Refused` with typed failures.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import importlib
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_adapter.base import EngineFactory, RankEngine, TokenEvent
from engine_adapter.rank.agent import STAGING_VERBS, RankAgent
from engine_adapter.rank.channel import ChannelClosed, ChannelError, Frame, FrameKind, RankChannel
from engine_adapter.rank.control_messages import (
    CALLS,
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
from engine_adapter.rank.messages import Hello, RankDone, Refused
from transports.base import Cancelled
from updater import wire
from updater.core.errors import Failure, LiveweightsError
from updater.core.participant import RankInfo

_PR_SET_PDEATHSIG = 1
_STAGING_NICENESS = 10
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


def failures_of(error: BaseException) -> tuple[Failure, ...]:
    """What a raised exception says, typed."""
    if isinstance(error, LiveweightsError):
        return error.failures
    if isinstance(error, TimeoutError):
        return (Failure("phase_timeout", f"out of time: {error}"),)
    if isinstance(error, Cancelled):
        return (Failure("client_abort", "cancelled by the front"),)
    if isinstance(error, MemoryError):
        return (Failure("no_space", f"out of memory: {error}"),)
    return (Failure("rank_failed", f"{type(error).__name__}: {error}"),)


def config_hash(model: str) -> str:
    """SHA-256 hex of the canonical `config.json`, or empty where there is none."""
    try:
        config = json.loads((Path(model) / "config.json").read_bytes())
    except (OSError, ValueError):
        return ""
    return hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class RankProcess:
    """One life of one rank."""

    def __init__(self, channel: RankChannel) -> None:
        self._channel = channel
        self._staging: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._agent: RankAgent | None = None
        self._engine: RankEngine | None = None
        self._stopping = False
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
        stager = threading.Thread(target=self._stage_loop, name="staging", daemon=True)
        stager.start()
        try:
            while not self._stopping:
                frame = self._channel.receive()
                if frame.header.verb in STAGING_VERBS:
                    self._staging.put(frame)
                else:
                    self._answer(frame)
        except ChannelClosed:
            return

    def _stage_loop(self) -> None:
        # Linux keeps niceness per thread: serving goes first while weights are staged.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _STAGING_NICENESS)
        while (frame := self._staging.get()) is not None:
            try:
                self._answer(frame)
            except ChannelClosed:
                return

    def _answer(self, frame: Frame) -> None:
        verb, number = frame.header.verb, frame.header.id
        try:
            request_type, _ = CALLS[verb]
            reply = self._handle(verb, wire.decode(request_type, frame.body))
            answer = Frame.of(FrameKind.REPLY, number, verb, reply)
        except ChannelClosed:
            raise
        except Exception as error:  # the rank boundary
            if not isinstance(error, LiveweightsError | Cancelled | TimeoutError):
                traceback.print_exc()
            answer = Frame.of(FrameKind.REFUSED, number, verb, Refused(failures_of(error)))
        try:
            self._channel.send(answer)
        except ChannelError as error:  # too long for a frame: the front must not wait for it
            refused = Refused((Failure("body_too_large", str(error)),))
            self._channel.send(Frame.of(FrameKind.REFUSED, number, verb, refused))

    def _watch(self, engine: RankEngine) -> None:
        """An engine that failed inside a process that lives would fail every request for ever: let the front learn of
        it from the kernel, like of any other death.
        """
        while not self._stopping:
            failure = engine.failure
            if failure is not None and not self._stopping:
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
        self._engine, self._agent = engine, RankAgent(engine, tell=self._tell)
        parameters = engine.parameters()
        info = RankInfo(
            rank=spec.rank,
            pid=os.getpid(),
            parameters=len(parameters),
            weight_bytes=sum(parameter.local.nbytes for parameter in parameters.values()),
            device=next((str(parameter.local.device) for parameter in parameters.values()), "cpu"),
        )
        return Hello(info, spec.size, engine.name, engine.capabilities, config_hash(spec.model))

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
        self._stopping = True
        self._staging.put(None)
        if self._engine is not None:
            self._engine.stop(request.deadline_s)

    def _tell(self, serial: int, done: int) -> None:
        self._event("staged", Staged(serial, done))

    def _emit(self, event: TokenEvent) -> None:
        self._event("tokens", Tokens((event,)))

    def _event(self, verb: str, message: Any) -> None:
        # A front that is gone ends this process through the main thread; other threads have nothing to add.
        try:
            self._channel.send(Frame.of(FrameKind.EVENT, 0, verb, message))
        except ChannelClosed:
            return


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
