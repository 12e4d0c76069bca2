"""The worker extension: `vllm serve MODEL --worker-extension-cls engine_adapter.vllm.worker.LiveweightsWorker`.

Each vLLM worker process gets our rank: an agent on threads of its own, which talks to the front over a Unix socket.
Through vLLM's `collective_rpc` pass only three short calls, and none ever raises: an exception there leaves the
executor's replies out of step for good.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from engine_adapter.base import EngineSpec
from engine_adapter.rank.agent import RankAgent
from engine_adapter.rank.channel import Frame, FrameKind, RankChannel
from engine_adapter.rank.control_messages import Build, CancelStaging, Label, Staged, StartServing, StopEngine
from engine_adapter.rank.hello import hello_of
from engine_adapter.rank.messages import Hello, RankDone
from engine_adapter.rank.server import RankServer
from engine_adapter.vllm.engine import VllmRankEngine
from engine_adapter.vllm.messages import Attach, Attached
from engine_adapter.vllm.twins.layers import check_compiled
from updater import wire
from updater.core.errors import Failure, LiveweightsError

_CONNECT_S = 30.0


class LiveweightsWorker:
    """Mixed into vLLM's worker class, so `self` is the worker. Every name starts with `liveweights_`: vLLM refuses an
    extension whose names it has already.
    """

    def liveweights_rank(self) -> WorkerRank:
        """This worker as a rank. A subclass may make another one."""
        return WorkerRank(self)

    def liveweights_check(self) -> dict[str, Any]:
        """Whether this worker's model can be updated at all, as far as that is seen at once."""
        rank = int(getattr(self, "rank", -1))
        worker: Any = self
        try:
            check_compiled(worker.get_model(), worker.vllm_config)
        except LiveweightsError as error:
            failure = error.failures[0]
            why = f"{failure.code}: {failure.tensor}: {failure.message}: {failure.hint}"
            return wire.plain(Attached(rank, False, why))  # type: ignore[no-any-return]
        except Exception as error:  # the rank boundary
            return wire.plain(Attached(rank, False, f"{type(error).__name__}: {error}"))  # type: ignore[no-any-return]
        return wire.plain(Attached(rank, True))  # type: ignore[no-any-return]

    def liveweights_attach(self, address: str, token: str) -> dict[str, Any]:
        """Connect to the front's socket and serve it from a thread of our own. A later front takes the place."""
        rank = int(getattr(self, "rank", -1))
        try:
            served = self.liveweights_rank()
            served.connect(address, token)
            previous = getattr(self, "liveweights_served", None)
            if previous is not None:
                previous.close()
            self.liveweights_served = served
        except Exception as error:  # the rank boundary
            return wire.plain(Attached(rank, False, f"{type(error).__name__}: {error}"))  # type: ignore[no-any-return]
        return wire.plain(Attached(rank, True))  # type: ignore[no-any-return]

    def liveweights_stand(self, number: int) -> dict[str, Any]:
        """Called while the scheduler is paused: note where this rank stands. Queued behind every earlier step."""
        rank = int(getattr(self, "rank", -1))
        try:
            served: WorkerRank = self.liveweights_served
            served.stand(number)
        except Exception as error:  # the rank boundary
            return wire.plain(Attached(rank, False, f"{type(error).__name__}: {error}"))  # type: ignore[no-any-return]
        return wire.plain(Attached(rank, True))  # type: ignore[no-any-return]


class WorkerRank:
    """One rank under one front."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self._server: RankServer | None = None
        self._channel: RankChannel | None = None
        self._engine: VllmRankEngine | None = None
        self._agent: RankAgent | None = None
        self._verbs: dict[str, Callable[[Any], Any]] = {
            "build": self._build,
            "start": self._start,
            "label": self._label,
            "cancel_staging": self._cancel_staging,
            "stop": self._stop,
        }

    def connect(self, address: str, token: str) -> None:
        """Raises OSError."""
        ours = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.settimeout(_CONNECT_S)
        ours.connect(address)
        ours.settimeout(None)
        self._channel = RankChannel(ours)
        size = int(self.worker.vllm_config.parallel_config.world_size)
        attach = Attach(token, int(self.worker.rank), size, os.getpid())
        self._channel.send(Frame.of(FrameKind.EVENT, 0, "attach", attach))
        self._server = RankServer(self._channel, self.handle)
        threading.Thread(target=self._serve, name="liveweights", daemon=True).start()

    def _serve(self) -> None:
        if self._server is not None:
            self._server.run()
        self.close()

    def close(self) -> None:
        """The front is gone, or another one came."""
        if self._server is not None:
            self._server.stop()
        if self._channel is not None:
            self._channel.close()
        if self._agent is not None:
            self._agent.close()

    def stand(self, number: int) -> None:
        self._ready().stand(number)

    def make_engine(self, spec: EngineSpec) -> VllmRankEngine:
        return VllmRankEngine(self.worker, spec)

    def handle(self, verb: str, request: Any) -> Any:
        """The reply to one call of the front. Raises LiveweightsError where it is refused."""
        own = self._verbs.get(verb)
        if own is not None:
            return own(request) or RankDone()
        if self._agent is None:
            raise LiveweightsError(Failure("wrong_phase", "the rank is not built"))
        return self._agent.handle(verb, request)

    def _build(self, request: Build) -> Hello:
        spec = request.spec
        engine = self._engine = self.make_engine(spec)
        self._agent = RankAgent(engine, tell=self._tell, awaited=self._awaited, host_spare=engine.host_spare)
        return hello_of(engine, spec)

    def _start(self, request: StartServing) -> None:
        if self._agent is None:
            raise LiveweightsError(Failure("wrong_phase", "the rank is not built"))
        self._agent.label(request.version, request.digest)

    def _label(self, request: Label) -> None:
        if self._agent is None:
            raise LiveweightsError(Failure("wrong_phase", "the rank is not built"))
        self._agent.relabel(request.version, request.digest)

    def _cancel_staging(self, request: CancelStaging) -> None:
        if self._agent is not None:
            self._agent.cancel(request.serial)

    def _stop(self, _request: StopEngine) -> None:
        """vLLM ends its workers itself."""
        if self._server is not None:
            self._server.stop()

    def _ready(self) -> VllmRankEngine:
        if self._engine is None:
            raise LiveweightsError(Failure("wrong_phase", "the rank is not built"))
        return self._engine

    def _awaited(self) -> bool:
        return self._server is not None and self._server.awaited()

    def _tell(self, serial: int, done: int) -> None:
        if self._server is not None:
            self._server.event("staged", Staged(serial, done))
