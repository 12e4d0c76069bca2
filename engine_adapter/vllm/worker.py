"""The worker extension: `vllm serve MODEL --worker-extension-cls engine_adapter.vllm.worker.LiveweightsWorker`.

Each vLLM worker process gets our rank: an agent on threads of its own, which talks to the front over a Unix socket.
Through vLLM's `collective_rpc` pass only three short calls, and none ever raises: an exception there leaves the
executor's replies out of step for good.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine_adapter.hosted.rank import AttachedRank, connected
from engine_adapter.rank.channel import Build, RankChannel
from engine_adapter.vllm.control import Attached
from engine_adapter.vllm.engine import VllmRankEngine
from engine_adapter.vllm.twins.layers import check_compiled
from updater.core.errors import LiveweightsError
from updater.protocol import wire


class LiveweightsWorker:
    """Mixed into vLLM's worker class, so `self` is the worker. Every name starts with `liveweights_`: vLLM refuses an
    extension whose names it has already.
    """

    def liveweights_rank(self, channel: RankChannel) -> WorkerRank:
        """This worker as a rank. A subclass may make another one."""
        return WorkerRank(self, channel)

    def liveweights_check(self) -> dict[str, Any]:
        """Whether this worker's model can be updated at all, as far as that is seen at once."""
        worker: Any = self
        return _answer(worker, lambda: check_compiled(worker.get_model(), worker.vllm_config))

    def liveweights_attach(self, address: str, token: str) -> dict[str, Any]:
        """Connect to the front's socket and serve it from a thread of our own. A later front takes the place."""

        def attach() -> None:
            served = self.liveweights_rank(connected(address))
            parallel = served.worker.vllm_config.parallel_config
            served.serve(token, int(served.worker.rank), int(parallel.world_size))
            previous = getattr(self, "liveweights_served", None)
            if previous is not None:
                previous.close()
            self.liveweights_served = served

        return _answer(self, attach)

    def liveweights_stand(self, number: int) -> dict[str, Any]:
        """Called while the scheduler is paused: note where this rank stands. Queued behind every earlier step."""
        return _answer(self, lambda: self.liveweights_served.stand(number))


class WorkerRank(AttachedRank[VllmRankEngine]):
    """One rank under one front."""

    def __init__(self, worker: Any, channel: RankChannel) -> None:
        super().__init__(channel)
        self.worker = worker

    def stand(self, number: int) -> None:
        self.engine.stand(number)

    def make_engine(self, request: Build) -> VllmRankEngine:
        return VllmRankEngine(self.worker, request.spec)


def _answer(worker: Any, work: Callable[[], None]) -> dict[str, Any]:
    """Do it, and say whether it could be done: no exception reaches the executor."""
    why = ""
    try:
        work()
    except LiveweightsError as error:
        failure = error.failures[0]
        why = ": ".join(filter(None, (failure.code, failure.tensor, failure.message, failure.hint)))
    except Exception as error:  # the rank boundary
        why = f"{type(error).__name__}: {error}"
    return wire.plain(Attached(int(getattr(worker, "rank", -1)), not why, why))  # type: ignore[no-any-return]
