"""Ranks of a trainer that do the same together: what one of them learned reaches all, as JSON in tensors.

No collective waits long for the sender: while it waits for the fleet it says so again and again (the group's own
timeout would otherwise end a trainer whose fleet is slow). Nothing is pickled (I10).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from updater.core.errors import Aborted, Failure, LiveweightsError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: What one step of the sender takes at most before the others hear that it goes on, in seconds, where it can say so.
BEAT_S = 20.0
Told = Mapping[str, Any]


class Lockstep:
    """The ranks of `group`, all of which make the same calls in the same order; None: this process alone."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group

    def lead(self, step: Callable[[], Told | None] | None) -> Told:
        """The sender gives a `step`, the others None. It is repeated until it returns something or raises, and every
        rank then gets the same or raises the same.
        """
        while True:
            spoken, caught = self._spoken(step)
            told = next((each for each in self.exchange(spoken) if each), {})
            if caught is not None:
                raise caught
            if "error" in told:
                raise _error_of(told["error"])
            if "value" in told:
                value: Told = told["value"]
                return value

    def agree(self, error: LiveweightsError | None) -> LiveweightsError | None:
        """The error of the first rank that has one, on every rank."""
        for told in self.exchange({} if error is None else {"error": _described(error)}):
            if told:
                return error or _error_of(told["error"])
        return None

    def exchange(self, spoken: Told) -> list[Told]:
        """What every rank says, in the order of the group."""
        if self._group is None:
            return [spoken]
        return [json.loads(text) for text in self._gathered(json.dumps(spoken).encode())]

    def _spoken(self, step: Callable[[], Told | None] | None) -> tuple[Told, BaseException | None]:
        if step is None:
            return {}, None
        try:
            value = step()
        except LiveweightsError as error:
            return {"error": _described(error)}, error
        except Exception as error:  # the others would wait for this rank until their group gives up
            failure = Failure("internal", f"{type(error).__name__} on the sending rank")
            return {"error": _described(Aborted(failure))}, error
        return ({"more": True} if value is None else {"value": value}), None

    def _gathered(self, data: bytes) -> list[bytes]:
        """Lengths first, then everything padded to the longest."""
        group, device = self._group, _device(self._group)
        size = dist.get_world_size(group)
        mine = torch.tensor([len(data)], dtype=torch.int64, device=device)
        lengths = [torch.zeros_like(mine) for _ in range(size)]
        dist.all_gather(lengths, mine, group=group)
        counts = [int(length) for length in lengths]
        padded = torch.zeros(max(counts), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        padded = padded.to(device)
        parts = [torch.zeros_like(padded) for _ in range(size)]
        dist.all_gather(parts, padded, group=group)
        return [part[:count].cpu().numpy().tobytes() for part, count in zip(parts, counts, strict=True)]


#: One per group of a trainer, for the life of the process: a second one of the same ranks would have the name of the
#: first in the store, and meet what that left there.
_SIDE: dict[ProcessGroup, ProcessGroup] = {}


def side_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """The same ranks once more, over gloo. Collective when it is first asked for.

    For what goes on in the background, where nothing may come between the trainer's own collectives.
    """
    if group is None:
        return None
    if group not in _SIDE:
        ranks = dist.get_process_group_ranks(group)
        _SIDE[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _SIDE[group]


def _device(group: ProcessGroup | None) -> torch.device:
    """One that the group's backend takes."""
    backend = str(dist.get_backend(group))
    if "gloo" in backend or "mpi" in backend:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _described(error: LiveweightsError) -> Told:
    from updater.http import problem_body

    return problem_body(error, receipt=error.receipt)


def _error_of(document: Any) -> LiveweightsError:
    from updater.http import error_of

    status = document.get("status")
    return error_of(status if isinstance(status, int) else 500, document)
