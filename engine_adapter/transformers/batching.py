"""The library's continuous batching with a pause that has a deadline, and outputs handed over where they are made.

Invariants that the engine builds on, given asynchronous batching is off: one iteration of the loop is prepare (the
only place where it pauses), forward, deliver. So no forward is in flight while paused, and whatever is delivered was
made by the weights of the latest pause or before (I3).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchingManager,
    OutputRouter,
)
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestState
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler

from engine_adapter.groups import broadcast_bytes
from updater.core.errors import Failure, LiveweightsError

SCHEDULER = "liveweights"


@dataclass(frozen=True, slots=True)
class BatchingHooks:
    """Called on the loop's thread. `ended`: the loop is over; None if it was asked to stop."""

    output: Callable[[GenerationOutput], None]
    cancelled: Callable[[GenerationOutput], None]
    ended: Callable[[BaseException | None], None]


class PauseStatus(BackgroundThreadStatus):
    """Pauses with deadlines.

    All ranks stop as soon as one of them asks. A rank that stopped and is not asked itself within `grace_s` (its
    message was lost, or the asking rank gave up) goes on to the barrier and waits there for the ranks that hold the
    pause: it can not run a forward before they let go, and no rank is parked for ever (I9).
    """

    def __init__(self, grace_s: float) -> None:
        super().__init__()
        self._grace_s = grace_s

    def acquire_within(self, wake_up_loop: threading.Event, deadline_s: float) -> None:
        """Raises TimeoutError, and is then not paused; RuntimeError if the loop is gone."""
        with self._condition:
            self._pauses_requested += 1
            self._condition.notify_all()
            wake_up_loop.set()
            if self._condition.wait_for(self._pause_predicate, timeout=deadline_s) and self._paused:
                return
            stopped = self._local_status == self.STOPPED or self.fatal_error is not None
            self._release()
            if stopped:
                raise RuntimeError("the generation loop is gone") from self.fatal_error
            raise TimeoutError(f"no pause between two steps within {deadline_s} s")

    def release(self, *, held: bool) -> None:
        """`held` False: only end the wait of a loop that stopped for another rank."""
        with self._condition:
            self._release(1 if held else 0)

    def _release(self, requests: int = 1) -> None:
        self._pauses_requested -= requests
        if self._pauses_requested == 0:
            self._paused = False
        self._condition.notify_all()

    def pause_and_wait(self) -> None:
        """On the loop's thread: park until released, or until the grace is over and no pause was asked for here."""
        with self._condition:
            self._paused = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._pauses_requested > 0 or not self._paused, timeout=self._grace_s)
            if self._pauses_requested == 0:
                self._paused = False
                return
            self._condition.wait_for(lambda: not self._paused)


class Router(OutputRouter):
    """Hands every output over at once, on the loop's thread, instead of queueing it."""

    def __init__(self, sink: Callable[[GenerationOutput], None]) -> None:
        super().__init__()
        self._sink = sink

    def deliver(self, output: GenerationOutput) -> None:
        self._sink(output)

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        for output in outputs:
            self._sink(output)


class Scheduler(FIFOScheduler):
    """Notes how much of each prompt came from the cache, and says which requests were cancelled."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cached_tokens: dict[str, int] = {}
        self.on_cancelled: Callable[[GenerationOutput], None] = lambda _output: None
        super().__init__(*args, **kwargs)

    def schedule_batch(self, token_budget: int, cache_budget: int) -> Any:
        answer = super().schedule_batch(token_budget, cache_budget)
        for future in answer[0] or ():
            # Before its first forward a request stands where its shared prefix ends.
            self.cached_tokens.setdefault(future.state.request_id, future.state.position_offset)
        return answer

    def clear_cancelled_requests(self) -> list[RequestState]:
        states: list[RequestState] = super().clear_cancelled_requests()
        for state in states:
            self.on_cancelled(output_of(state))
            self.cached_tokens.pop(state.request_id, None)
        return states

    def requeue_running(self) -> None:
        """Make every running request start over from prompt plus tokens, in the same order, with no block in use.

        All ranks do this at the same step, so their queues stay equal.
        """
        for state in reversed(list(self.active_requests.values())):
            self.cache.free_blocks(state.request_id, no_cache=True)
            self.active_requests.pop(state.request_id)
            self.waiting_requests[state.request_id] = state.create_equivalent_initial_request()
            self.waiting_requests_order.appendleft(state.request_id)


def output_of(state: Any) -> GenerationOutput:
    """A request's tokens so far, across restarts of it."""
    output: GenerationOutput = state.to_generation_output()
    return output


class _PromptEvent(threading.Event):
    """For ranks that only follow: wait for rank 0 inside the collective, not in a timer beside it."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(0.0)


class Manager(ContinuousBatchingManager):
    """One replica's loop on this rank."""

    def __init__(self, *, hooks: BatchingHooks, grace_s: float, **library: Any) -> None:
        SCHEDULER_MAPPING[SCHEDULER] = Scheduler  # the library's registry of schedulers
        super().__init__(**library)
        self._hooks = hooks
        self._ready = threading.Event()
        self._thread: threading.Thread | None = None
        self.current_batch = 0
        self.status = PauseStatus(grace_s)
        self.background_thread_status = self.status
        self.output_router = Router(hooks.output)
        self.distributed_helper = PlainHelper(self.distributed_helper)
        if not self.is_tp_driver:
            self._wake_up_loop = _PromptEvent()

    @property
    def processor(self) -> Any:
        """The library's batch processor; it exists once `start_within` has returned."""
        return self.batch_processor

    @property
    def wake(self) -> threading.Event:
        return self._wake_up_loop

    def start_within(self, deadline_s: float) -> None:
        """Start the loop and wait until it has its cache. Raises TimeoutError, or LiveweightsError with the cause."""
        self.status.clear()
        self._thread = threading.Thread(target=self._run_generation_loop, name="generation", daemon=True)
        self._generation_thread = self._thread  # type: ignore[assignment]
        self._thread.start()
        if not self._ready.wait(deadline_s):
            raise TimeoutError(f"generation did not start within {deadline_s} s")
        status: Any = self.status  # whose type says that it never fails
        cause = status.fatal_error
        if cause is not None:
            why = f"generation did not start: {type(cause).__name__}: {cause}"
            raise LiveweightsError(Failure("rank_failed", why)) from cause

    def stop_within(self, deadline_s: float) -> bool:
        """Ask the loops of all ranks to end. False if this one does not in time (the thread is a daemon)."""
        thread = self._thread
        if thread is None:
            return True
        end = time.monotonic() + deadline_s
        self.status.request_stop(PauseStatus.HARD_STOP, self.distributed_helper.global_rank)
        self.wake.set()
        thread.join(max(0.0, end - time.monotonic()))
        return not thread.is_alive()

    def _create_batch_processor(self) -> Any:
        processor: Any = super()._create_batch_processor()
        processor.scheduler.on_cancelled = self._hooks.cancelled
        self.batch_processor = processor
        self._ready.set()
        return processor

    def _run_generation_loop(self) -> None:
        try:
            super()._run_generation_loop()
        finally:
            self._ready.set()
            self._hooks.ended(self.status.fatal_error)

    def _handle_critical_error(self, error: Exception, batch_processor: Any) -> None:
        """The peers may be inside a collective of the forward pass, where the library's farewell would never reach
        them: close the groups instead, so that they fail at once and not after a timeout."""
        helper = self.distributed_helper
        self.status.request_stop(PauseStatus.HARD_STOP, helper.global_rank)
        self._fail_all_remaining_requests(error, batch_processor)
        self.status.record_fatal_error(error)
        if helper.tp_size > 1:
            dist.distributed_c10d._abort_process_group()


_FIELDS = ("request_id", "initial_tokens", "max_new_tokens", "streaming", "logit_processor_kwargs")


class PlainHelper(DistributedHelper):
    """The library's helper with its one use of pickle replaced; takes over the groups of the one it is made from."""

    def __init__(self, made: DistributedHelper) -> None:
        self.__dict__.update(made.__dict__)

    def tp_broadcast_object_from_rank_0(self, obj: Any) -> Any:
        """`obj`: (new request states, cancelled ids) on rank 0, ignored elsewhere. Returns it on every rank."""
        if self.tp_size <= 1:
            return obj
        data = pack(*obj) if self.is_tp_driver else None
        said = broadcast_bytes(data, self.tp_root_global_rank, self.cpu_comm_group)
        return obj if self.is_tp_driver else unpack(said)


def pack(states: list[RequestState], cancelled: list[str]) -> bytes:
    new = [
        {name: getattr(state, name) for name in _FIELDS} | {"stop": sorted(state._eos_token_ids)} for state in states
    ]
    return json.dumps({"new": new, "cancelled": cancelled}).encode()


def unpack(data: bytes) -> tuple[list[RequestState], list[str]]:
    payload = json.loads(data)
    states = [
        RequestState(**{name: entry[name] for name in _FIELDS}, eos_token_id=entry["stop"]) for entry in payload["new"]
    ]
    return states, payload["cancelled"]
