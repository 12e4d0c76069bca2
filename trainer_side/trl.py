"""trl's asynchronous trainers publish through liveweights: a `WeightTransferProtocol` for trl 1.16.

    transfer = LiveweightsTransfer("http://127.0.0.1:8700")
    trainer = AsyncGRPOTrainer(..., weight_transfer=transfer)
    transfer.bind(trainer)
    trainer.train()

The trainer streams every parameter from its main process, while its other ranks take part in the gathers by
themselves; it merges adapters of peft before and unmerges them after. Frozen parameters of a model without adapters
are not in its stream, so a model that is trained in part is refused by the fleet as incomplete.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from trainer_side.client.protocol import UPDATE_S
from trainer_side.publishing.pusher import Pusher
from trainer_side.sources.casts import Casts, Dtypes, cast
from transports.dtypes import DTYPE_NAMES
from updater.core.errors import refuse
from updater.core.policy import Policy
from updater.protocol.answers import Receipt
from updater.protocol.manifest import TensorSpec
from updater.protocol.names import clean_names

_WALK = "_iter_vllm_named_params"


class LiveweightsTransfer:
    """Pass it as `weight_transfer` and `bind` the trainer. `receipt`: of the last version that was committed.

    Every training begins a run of its own; a version's step is the number that the trainer gives its rollout worker.
    `dtypes`: as in `sources.as_source`. `policy`: of every update. `options`: of `Pusher`, the transport among them.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        policy: Policy | Mapping[str, Any] | None = None,
        dtypes: Dtypes | None = None,
        timeout_s: float = UPDATE_S,
        **options: Any,
    ) -> None:
        self.receipt: Receipt | None = None
        self._url, self._token, self._options = url, token, options
        self._policy, self._casts, self._timeout_s = policy, Casts.of(dtypes), timeout_s
        self._trainer: Any = None
        self._pusher: Pusher | None = None
        self._new_run = True

    def bind(self, trainer: Any) -> None:
        """The trainer whose weights these are: its stream says names and shapes only as it goes, its model before."""
        self._trainer = trainer

    # -- what the trainer calls, on its main process

    def init_weight_transfer(self) -> None:
        """Once, before the first version. Raises Rejected without a trainer."""
        self._new_run = True
        self._specs()

    def pause(self) -> None:
        """Nothing: the fleet serves until it commits, and pauses by itself for that moment."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish what the iterator gives, and return when it is live. Raises the errors of `Pusher.push`.

        The iterator is walked to its end in any case: the trainer's other ranks are inside the same gathers.
        """
        try:
            source = StreamedParameters(self._specs(), iterator)
            version = int(self._trainer.model_version) + 1
            self.receipt = self._opened().push(source, version, policy=self._terms(), timeout_s=self._timeout_s)
            self._new_run = False
        finally:
            for _ in iterator:
                pass

    def resume(self) -> None:
        """Nothing, for the same reason."""

    def destroy(self) -> None:
        """At the end of a training."""
        if self._pusher is not None:
            self._pusher.close()
            self._pusher = None

    # -- inside

    def _opened(self) -> Pusher:
        if self._pusher is None:
            self._pusher = Pusher(self._url, self._token, **self._options)
        return self._pusher

    def _terms(self) -> Policy | Mapping[str, Any] | None:
        if not self._new_run:
            return self._policy
        if isinstance(self._policy, Policy):
            return replace(self._policy, new_run=True)
        return {**(self._policy or {}), "new_run": True}

    def _specs(self) -> dict[str, TensorSpec]:
        """Of what the trainer is going to stream, in its order, by the walk that it uses itself."""
        if self._trainer is None:
            raise refuse("bad_request", "bind(trainer) before training")
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        held = dict(_walk_of(self._trainer)(model))
        names = clean_names(held)
        self._casts.check(names.values())
        specs = {}
        for raw, parameter in held.items():
            name = names[raw]
            specs[name] = TensorSpec(name, self._casts.wire(name, DTYPE_NAMES[parameter.dtype]), tuple(parameter.shape))
        return specs


def _walk_of(trainer: Any) -> Callable[[torch.nn.Module], Iterator[tuple[str, torch.Tensor]]]:
    """The function by which the trainer's own module names what it streams; GRPO's and distillation's have one each."""
    for kind in type(trainer).__mro__:
        found = getattr(sys.modules.get(kind.__module__), _WALK, None)
        if found is not None:
            walk: Callable[[torch.nn.Module], Iterator[tuple[str, torch.Tensor]]] = found
            return walk
    with warnings.catch_warnings():  # that it is experimental was said where the trainer was made
        warnings.simplefilter("ignore")
        from trl.experimental.async_grpo import async_grpo_trainer
    return getattr(async_grpo_trainer, _WALK)  # type: ignore[no-any-return]


class StreamedParameters:
    """A `trainer_side.sources.WeightSource` over an iterator of whole tensors: walked once, digested as they pass.

    Nothing can step meanwhile: the trainer is inside the call that walks it.
    """

    is_sender = True
    group = None
    ties: tuple[tuple[str, str], ...] = ()

    def __init__(self, specs: Mapping[str, TensorSpec], iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.specs = specs
        self._iterator = iterator

    def digests(self) -> Mapping[str, str]:
        return {}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        names = iter(self.specs)
        for raw, tensor in self._iterator:
            name = next(iter(clean_names((raw,)).values()))
            expected = next(names, None)
            dtype = self.specs[name].dtype if name == expected else DTYPE_NAMES[tensor.dtype]
            yield name, cast(tensor, dtype)
            del tensor

    def check_untouched(self) -> None: ...
