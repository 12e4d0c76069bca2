"""Optimiser steps that leave no trace in a tensor's version: fused ones, and foreach ones on sharded tensors."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class StepWatch:
    """Which of some tensors an optimiser of torch has stepped on since this was made. Told by torch's own hooks.

    Lists of tensors may share a storage. The hooks are of the process: put in by the first watch, and then kept.
    """

    def __init__(self, watched: Sequence[Sequence[torch.Tensor]]) -> None:
        self._owners: dict[int, set[int]] = {}
        self._kept = [list(tensors) for tensors in watched]  # a storage that is freed would give its key to another
        for at, tensors in enumerate(watched):
            for tensor in tensors:
                self._owners.setdefault(storage_key(tensor), set()).add(at)
        self._stepped: set[int] = set()
        with _lock:
            _install()
            _watches.add(self)

    @property
    def stepped(self) -> frozenset[int]:
        """Indexes of lists with a tensor that was stepped on."""
        return frozenset(self._stepped)

    def note(self, key: int) -> None:
        self._stepped |= self._owners.get(key, set())


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors of one storage; of a DTensor the storage of its shard. Known while the storage lives."""
    plain: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    key: int = plain.untyped_storage()._cdata
    return key


_lock = threading.Lock()
_watches: weakref.WeakSet[StepWatch] = weakref.WeakSet()
_installed = False


def _install() -> None:
    global _installed
    if not _installed:
        _installed = True
        # Before and after: a step of another thread that has begun may write at any moment.
        register_optimizer_step_pre_hook(_on_step)
        register_optimizer_step_post_hook(_on_step)


def _on_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    with _lock:
        watches = list(_watches)
    if watches:
        for key in {storage_key(tensor) for tensor in _written(optimizer)}:
            for watch in watches:
                watch.note(key)


def _written(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Parameters without a gradient are left alone by every optimiser."""
    for group in optimizer.param_groups:
        yield from (tensor for tensor in group["params"] if tensor.grad is not None)
