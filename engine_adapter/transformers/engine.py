"""One rank of the embedded engine. Factory: `engine_adapter.transformers.engine:build`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from engine_adapter.base import Derived, EngineSpec, GenerateRequest, Parameter, PausePoint, TokenEvent
from engine_adapter.parameters import collect, fed
from engine_adapter.placement.declared.dtensor import from_dtensors
from engine_adapter.placement.declared.rules import declare, targets_of
from engine_adapter.placement.rows import Placement
from engine_adapter.transformers.batching import SCHEDULER, BatchingHooks, Manager
from engine_adapter.transformers.families import rules_of
from engine_adapter.transformers.loading import Options, load_model
from updater.core.errors import Failure, LiveweightsError, refuse
from updater.core.policy import CachePolicy, Capabilities, InFlight
from updater.protocol.manifest import TensorSpec

#: Docs: docs/embedded-engine.md.
CAPABILITIES = Capabilities(
    cells=(
        (InFlight.DRAIN, CachePolicy.RESET),
        (InFlight.DRAIN, CachePolicy.KEEP),
        (InFlight.ABORT, CachePolicy.RESET),
        (InFlight.ABORT, CachePolicy.KEEP),
        (InFlight.RECOMPUTE, CachePolicy.RESET),
    ),
    notes=(
        "cache=namespace: the library's block hashes have no place for a version",
        "in_flight=keep: blocks of frozen requests stay shared with later requests, so old keys and values would"
        " reach sequences that never saw the old weights",
    ),
)
_ALMOST_ZERO = 1e-6  # temperature of a greedy request where sampling is on
CACHE_TIER = "kv_blocks"


def build(spec: EngineSpec) -> TransformersEngine:
    """Load the model of this rank. At size > 1 all ranks must be built at about the same time."""
    options = Options.of(spec)
    return TransformersEngine(spec, options, load_model(spec, options))


class TransformersEngine:
    """Implements `engine_adapter.base.RankEngine`."""

    name = "transformers"

    def __init__(self, spec: EngineSpec, options: Options, model: Any) -> None:
        self.rank, self.size = spec.rank, spec.size
        self._options = options
        self._model = model
        self._parameters = collect(model)
        self._tensors = {name: tensor for name, tensor in fed(model) if name in self._parameters}
        self._rules = rules_of(model.config.get_text_config())
        self._manager: Manager | None = None
        self._emit: Callable[[TokenEvent], None] = lambda _event: None
        self._version = ""
        self._paused = False
        self._lock = threading.Lock()
        #: request id -> (tokens sent, stop tokens), on rank 0
        self._requests: dict[str, tuple[int, frozenset[int]]] = {}
        self._ended: str | None = None

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    @property
    def failure(self) -> str | None:
        """Why the generation loop is over, or None while it runs."""
        return self._ended

    def parameters(self) -> Mapping[str, Parameter]:
        return self._parameters

    def derived(self) -> tuple[Derived, ...]:
        return ()

    def placement(self, specs: Mapping[str, TensorSpec]) -> Placement:
        """At size 1 by the declared rules; else by the DTensors, the rules saying only names."""
        if self.size == 1:
            return self.declared(specs)
        aliases = {name: parameter.aliases for name, parameter in self._parameters.items()}
        return from_dtensors(specs, self._tensors, self._rules, self.rank, self.size, aliases)

    def declared(self, specs: Mapping[str, TensorSpec]) -> Placement:
        """What the declared rules say at any size: the independent second opinion that a test compares."""
        return declare(specs, targets_of(self._parameters), self._rules, self.rank, self.size)

    def running_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Unchanged: its options say dtype and sizes of the cache."""
        return config

    def completed_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        full: dict[str, Any] = type(self._model.config).from_dict(dict(config)).to_dict()
        return full

    def tokenizer_folder(self) -> str:
        return ""

    # serving

    def start(self, emit: Callable[[TokenEvent], None]) -> None:
        if self._manager is not None:
            raise LiveweightsError(Failure("wrong_phase", "started already"))
        self._emit = emit
        configs: Any = import_module("transformers")
        options = self._options
        manager = Manager(
            hooks=BatchingHooks(self._deliver, self._cancelled, self._over),
            grace_s=options.pause_grace_s,
            model=self._model,
            generation_config=configs.GenerationConfig(
                eos_token_id=-1,
                pad_token_id=0,
                max_new_tokens=16,
                do_sample=options.sampling,
                # A processor exists only for a value that is not 1; each request sets its own.
                temperature=0.5 if options.sampling else None,
                top_k=None,
                top_p=None,
            ),
            continuous_batching_config=configs.ContinuousBatchingConfig(
                page_size=options.page_size,
                num_blocks=options.num_blocks,
                max_batch_tokens=options.max_batch_tokens,
                allow_block_sharing=options.prefix_sharing,
                use_async_batching=False,  # a step in flight across a pause would break I3
                use_cuda_graph=False,
                auto_switch_to_flash=False,
                disable_nccl_graph_mixing=False,  # no NCCL here; the default warns about it
                cpu_offload_space=0.0,  # a second cache tier would need a reset of its own
                scheduler_type=SCHEDULER,
                per_request_processors=options.sampling,
                cpu_group_timeout=options.group_timeout_s,
                seed=0,
            ),
        )
        self._manager = manager
        manager.start_within(options.start_s)

    def submit(self, request: GenerateRequest) -> None:
        manager = self._running()
        self._check(request)
        processors: dict[str, Any] = {}
        if self._options.sampling:
            processors["temperature"] = request.temperature or _ALMOST_ZERO
        with self._lock:
            if self._ended is not None:
                raise LiveweightsError(Failure("rank_failed", self._ended, rank=self.rank))
            if request.request_id in self._requests:
                raise LiveweightsError(Failure("id_reused", f"request {request.request_id} is running"))
            self._requests[request.request_id] = (0, frozenset(request.stop_token_ids))
        taken = manager.add_request(
            list(request.prompt),
            request_id=request.request_id,
            max_new_tokens=request.max_tokens,
            streaming=True,
            eos_token_id=list(request.stop_token_ids),
            **processors,
        )
        if taken is None and manager.is_tp_driver:  # the library drops what comes while its loop is ending
            with self._lock:
                self._requests.pop(request.request_id, None)
            raise LiveweightsError(Failure("rank_failed", "generation is ending", rank=self.rank))

    def cancel(self, request_id: str) -> None:
        if self._manager is not None:
            self._manager.cancel_request(request_id)

    def stop(self, deadline_s: float) -> None:
        """Raises TimeoutError if the loop does not end (a collective that hangs); the process may then only exit."""
        if self._manager is None:
            return
        if self._paused:
            self.unpause(deadline_s)
        if not self._manager.stop_within(deadline_s):
            raise TimeoutError(f"generation did not stop within {deadline_s} s")

    # between two steps

    def pause(self, deadline_s: float) -> PausePoint:
        if self._manager is not None and not self._paused:
            self._manager.status.acquire_within(self._manager.wake, deadline_s)
        self._paused = True
        return self._point()

    def unpause(self, deadline_s: float) -> None:
        """Also for a rank that is not paused: if another rank stopped its loop, it goes on."""
        if self._manager is not None:
            self._manager.status.release(held=self._paused)
        self._paused = False

    def reset_cache(self) -> Mapping[str, bool]:
        """Running requests, which only `recompute` leaves here, start over; then nothing may hold a block."""
        if self._manager is None:
            return {CACHE_TIER: True}
        if not self._paused:
            raise LiveweightsError(Failure("wrong_phase", "reset_cache needs a pause", rank=self.rank))
        processor = self._manager.processor
        processor.scheduler.requeue_running()
        processor.cache.evict_cached_blocks()
        return {CACHE_TIER: _is_empty(processor.cache)}

    def set_version(self, version: str, digest: str, cache: CachePolicy) -> None:
        if cache is CachePolicy.NAMESPACE:
            raise refuse("mode_unsupported", CAPABILITIES.notes[0])
        self._version = version

    def _point(self) -> PausePoint:
        manager = self._manager
        if manager is None:
            return PausePoint.at(0, ())
        scheduler = manager.processor.scheduler
        return PausePoint.at(manager.current_batch, (*scheduler.active_requests, *scheduler.waiting_requests_order))

    # on the loop's thread

    def _deliver(self, output: Any) -> None:
        finished = output.is_finished()
        with self._lock:
            found = self._requests.get(output.request_id)
            if found is None:  # not rank 0, or it ended before
                return
            sent, stops = found
            if finished:
                del self._requests[output.request_id]
            else:
                self._requests[output.request_id] = (len(output.generated_tokens), stops)
        tokens = tuple(output.generated_tokens[sent:])
        reason = None
        if output.error is not None:
            reason = "error"
        elif finished:
            reason = "stop" if output.generated_tokens and output.generated_tokens[-1] in stops else "length"
        self._send(output.request_id, tokens, reason, output.error or "")

    def _cancelled(self, output: Any) -> None:
        with self._lock:
            found = self._requests.pop(output.request_id, None)
        if found is not None:
            self._send(output.request_id, tuple(output.generated_tokens[found[0] :]), "abort", "")

    def _over(self, error: BaseException | None) -> None:
        reason = "the engine was stopped" if error is None else f"generation failed: {type(error).__name__}: {error}"
        with self._lock:
            self._ended = reason
            left, self._requests = self._requests, {}
        for request_id in left:
            self._send(request_id, (), "error", reason)

    def _send(self, request_id: str, tokens: tuple[int, ...], reason: str | None, error: str) -> None:
        """The label is read here, on the loop's thread, so it is the one of the weights that made the tokens."""
        cached = 0
        if self._manager is not None and self._manager.processor is not None:
            known = self._manager.processor.scheduler.cached_tokens
            cached = known.get(request_id, 0)
            if reason is not None:
                known.pop(request_id, None)
        self._emit(TokenEvent(request_id, tokens, self._version, reason, error, cached))

    # checks

    def _running(self) -> Manager:
        if self._manager is None:
            raise LiveweightsError(Failure("wrong_phase", "not started"))
        return self._manager

    def _check(self, request: GenerateRequest) -> None:
        """What the loop could not survive or would silently do otherwise."""
        config = self._model.config.get_text_config()
        room = self._options.num_blocks * self._options.page_size
        longest = min(room, config.max_position_embeddings)
        wrong = ""
        if not request.prompt or request.max_tokens < 1:
            wrong = "needs at least one prompt token and one new token"
        elif min(request.prompt) < 0 or max(request.prompt) >= config.vocab_size:
            wrong = f"token ids must lie in [0, {config.vocab_size})"
        elif len(request.prompt) + request.max_tokens > longest:
            wrong = f"prompt and new tokens exceed {longest}"
        elif request.temperature < 0 or (request.temperature > 0 and not self._options.sampling):
            wrong = "temperature > 0 needs the engine option sampling=true"
        elif request.temperature > 0 and request.seed is not None:
            wrong = "a seed per request is not supported"
        if wrong:
            raise LiveweightsError(Failure("bad_request", wrong))


def _is_empty(cache: Any) -> bool:
    """No block in a table, shared, hashed or kept, and all of them back in the pool."""
    cache.pool.try_to_free_sectors()
    held = [
        table
        for allocator in cache.cache_allocators.values()
        for table in (
            allocator.block_table,
            allocator.ledger.hash_to_block,
            allocator.ledger.block_to_hash,
            allocator.ledger.cached_blocks,
            allocator.ledger.shared_ref_counts,
        )
    ]
    return not any(held) and cache.pool.num_free_sectors == cache.num_sectors
