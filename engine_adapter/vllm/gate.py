"""The gate in front of a vLLM engine: wraps `generate` and `encode` of its client, whichever route calls them."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from engine_adapter.hosted.gate import HostedGate
from engine_adapter.hosted.replies import EngineOutput
from engine_adapter.replica.admission import Limits
from engine_adapter.replica.replies import Span
from updater.core.errors import refuse

#: (arguments of vLLM's method) -> its outputs.
Generate = Callable[..., AsyncGenerator[Any, None]]


class VllmGate(HostedGate):
    """`abort`: ends a request at the engine; what it made so far is answered."""

    def __init__(self, abort: Callable[[str], Awaitable[None]], limits: Limits | None = None) -> None:
        super().__init__(abort, read_output, limits)

    def gating(self, original: Generate) -> Generate:
        """Takes the place of the client's `generate` or `encode`, whose calls name `prompt` and `request_id`."""
        signature = inspect.signature(original)

        def call(*args: Any, **named: Any) -> AsyncGenerator[Any, None]:
            bound = signature.bind(*args, **named)
            prompt = bound.arguments["prompt"]

            def dispatch() -> AsyncGenerator[Any, None]:
                bound.arguments["prompt"] = self._salted(prompt)
                return original(*bound.args, **bound.kwargs)

            wanted = getattr(bound.arguments.get("sampling_params"), "n", None) or 1
            return self.gated(bound.arguments["request_id"], wanted, dispatch)

        return call

    def _salted(self, prompt: Any) -> Any:
        """The same prompt in the namespace of what is live: blocks of other versions are never its prefix (I5).

        Raises Rejected for what has no place for it.
        """
        if not self.namespace:
            return prompt
        if isinstance(prompt, str):
            return {"prompt": prompt, "cache_salt": self.namespace}
        if not isinstance(prompt, dict):
            raise refuse("mode_unsupported", f"a {type(prompt).__name__} cannot be kept apart from other versions")
        own = prompt.get("cache_salt")
        return {**prompt, "cache_salt": f"{own}/{self.namespace}" if own else self.namespace}


def read_output(output: Any) -> EngineOutput:
    """`output`: vLLM's RequestOutput or PoolingRequestOutput, whose tokens vLLM labels in its core."""
    cached = getattr(output, "num_cached_tokens", None) or 0
    if not isinstance(output.outputs, list):  # pooled
        data = getattr(output.outputs, "data", None)
        return EngineOutput(output.finished, None, empty=data is None or not data.numel(), cached_tokens=cached)
    return EngineOutput(
        output.finished,
        {
            each.index: tuple(Span(s.version, s.start, s.end) for s in each.weight_versions or ())
            for each in output.outputs
        },
        aborted=any(each.finish_reason == "abort" for each in output.outputs),
        cached_tokens=cached,
    )
