"""One rank under one front, in whatever process it lives: reads calls off a channel and answers every one.

Verbs of a transaction go to the agent; `build` to `stop` are done here, with the engine.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from engine_adapter.base import GenerateRequest, PlacesSpare, RankEngine, TokenEvent
from engine_adapter.rank.agent import RankAgent
from engine_adapter.rank.channel import RankChannel
from engine_adapter.rank.control_messages import (
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
from engine_adapter.rank.messages import RANK_MESSAGES, Hello, RankDone
from engine_adapter.rank.server import RankServer
from updater.core.errors import Failure, LiveweightsError

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

    def build(self, request: Build) -> Hello:
        engine = self.make_engine(request)
        on_host = spare_on_host(engine)
        agent = RankAgent(engine, tell=self._tell, awaited=self.server.awaited, host_spare=on_host)
        self._built = engine, agent
        return hello_of(engine, request.spec)

    def start(self, request: StartServing) -> None:
        self.agent.label(request.version, request.digest)
        self.engine.start(self._emit)

    def label(self, request: Label) -> None:
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
        self.server.event("staged", Staged(serial, done))

    def _emit(self, event: TokenEvent) -> None:
        self.server.event("tokens", Tokens((event,)))


def spare_on_host(engine: object) -> bool:
    return isinstance(engine, PlacesSpare) and engine.host_spare
