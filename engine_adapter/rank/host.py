"""One rank under one front, in whatever process it lives: reads calls off a channel and answers every one.

Verbs of a transaction go to the agent; `build` to `stop` are done here, with the engine. Verbs of `STAGING_VERBS` run
one at a time on a thread of low priority, because serving goes on meanwhile; every other verb runs on the thread that
reads. This is the rank boundary: whatever a verb raises becomes a `RankRefused`.
"""

from __future__ import annotations

import os
import queue
import threading
import traceback
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from engine_adapter.base import GenerateRequest, PlacesSpare, RankEngine, TokenEvent
from engine_adapter.rank.agent import STAGING_VERBS, RankAgent
from engine_adapter.rank.channel import (
    CALLS,
    Build,
    BytesStaged,
    CancelRequest,
    CancelStaging,
    ChannelClosed,
    ChannelError,
    Frame,
    FrameKind,
    RankChannel,
    RankLabel,
    StartServing,
    StopEngine,
)
from engine_adapter.rank.messages import RANK_MESSAGES, RankDone, RankHello, RankRefused, hello_of
from transports.base import Cancelled
from updater.core.errors import Failure, LiveweightsError
from updater.protocol import wire

Engine = TypeVar("Engine", bound=RankEngine)


class RankHost(Generic[Engine]):
    """A subclass says how the engine is made. Methods that are named like a verb of `CONTROL_MESSAGES` perform it."""

    def __init__(self, channel: RankChannel) -> None:
        self.server = RankServer(channel, self.handle)
        self._built: tuple[Engine, RankAgent] | None = None

    def make_engine(self, request: Build) -> Engine:
        """Called once. Raises LiveweightsError for what cannot be built."""
        raise NotImplementedError

    def handle(self, verb: str, request: Any) -> Any:
        """The reply to one call of the front. `verb`: of `CALLS`. Raises LiveweightsError where it is refused."""
        if verb in RANK_MESSAGES:
            return self.agent.handle(verb, request)
        return getattr(self, verb)(request) or RankDone()

    @property
    def engine(self) -> Engine:
        """Raises LiveweightsError before `build`."""
        return self._ready()[0]

    @property
    def agent(self) -> RankAgent:
        """Raises LiveweightsError before `build`."""
        return self._ready()[1]

    def _ready(self) -> tuple[Engine, RankAgent]:
        if self._built is None:
            raise LiveweightsError(Failure("wrong_phase", "the model is not loaded"))
        return self._built

    def build(self, request: Build) -> RankHello:
        engine = self.make_engine(request)
        on_host = spare_on_host(engine)
        agent = RankAgent(engine, tell=self._tell, awaited=self.server.awaited, host_spare=on_host)
        self._built = engine, agent
        return hello_of(engine, request.spec)

    def start(self, request: StartServing) -> None:
        self.agent.label(request.version, request.digest)
        self.engine.start(self._emit)

    def label(self, request: RankLabel) -> None:
        self.agent.relabel(request.version, request.digest)

    def submit(self, request: GenerateRequest) -> None:
        self.engine.submit(request)

    def cancel_request(self, request: CancelRequest) -> None:
        self.engine.cancel(request.request_id)

    def cancel_staging(self, request: CancelStaging) -> None:
        self.agent.cancel(request.serial)

    def stop(self, request: StopEngine) -> None:
        self.server.stop()
        if self._built is not None:
            self.engine.stop(request.deadline_s)

    def _tell(self, serial: int, done: int) -> None:
        self.server.event("staged", BytesStaged(serial, done))

    def _emit(self, event: TokenEvent) -> None:
        self.server.event("tokens", event)


def spare_on_host(engine: object) -> bool:
    return isinstance(engine, PlacesSpare) and engine.host_spare


_STAGING_NICENESS = 10


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


class RankServer:
    """`handle(verb, request)` returns the reply of `CALLS[verb]` or raises."""

    def __init__(self, channel: RankChannel, handle: Callable[[str, Any], Any]) -> None:
        self._channel = channel
        self._handle = handle
        self._staging: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self.stopping = False

    def run(self) -> None:
        """Until `stop` was called by a verb, or until the front is gone."""
        threading.Thread(target=self._stage_loop, name="staging", daemon=True).start()
        try:
            while not self.stopping:
                frame = self._channel.receive()
                if frame.header.verb in STAGING_VERBS:
                    self._staging.put(frame)
                else:
                    self.answer(frame)
        except ChannelClosed:
            return
        finally:
            self.stop()

    def awaited(self) -> bool:
        """Whether a staging verb waits for the one that runs."""
        return not self._staging.empty()

    def stop(self) -> None:
        """No further call is read; what runs ends by itself."""
        self.stopping = True
        self._staging.put(None)

    def event(self, verb: str, message: Any) -> None:
        """Tell the front something unasked. A front that is gone ends `run`; other threads have nothing to add."""
        try:
            self._channel.send(Frame.of(FrameKind.EVENT, 0, verb, message))
        except ChannelClosed:
            return

    def _stage_loop(self) -> None:
        # Linux keeps niceness per thread: serving goes first while weights are staged.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _STAGING_NICENESS)
        while (frame := self._staging.get()) is not None:
            try:
                self.answer(frame)
            except ChannelClosed:
                return

    def answer(self, frame: Frame) -> None:
        """Run one call and send what came of it. Raises ChannelClosed."""
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
            answer = Frame.of(FrameKind.REFUSED, number, verb, RankRefused(failures_of(error)))
        try:
            self._channel.send(answer)
        except ChannelError as error:  # too long for a frame: the front must not wait for it
            refused = RankRefused((Failure("body_too_large", str(error)),))
            self._channel.send(Frame.of(FrameKind.REFUSED, number, verb, refused))
