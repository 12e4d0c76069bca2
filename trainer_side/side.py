"""A second connection between the ranks that push together: for words on the CPU, whatever their tensors travel by.

It is a group of our own beside the trainer's, of the same ranks in the same order, and not one of torch's registry,
where the name of a new group depends on how many groups a rank is in. A collective of the weights that never ends does
not block it, and what fails in one of the two does not spoil the other.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from updater.core.errors import Aborted, Failure

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_c10d: Any = dist  # torch's own words for groups have no types
#: How much longer than a collective of the trainer's own group a wait here lasts: a rank that has failed stays until
#: the others are back from the collective that they are in.
MARGIN = timedelta(minutes=1)
USUAL = timedelta(minutes=30)


class Side:
    """Made by every rank of `group` at the same time; `side_of` keeps one for the life of the process."""

    def __init__(self, group: ProcessGroup, purpose: str) -> None:
        self.rank, self.size = group.rank(), group.size()
        store = _c10d.PrefixStore(f"liveweights/{purpose}", group.get_group_store())
        with _all_there():
            self._group = _c10d.ProcessGroupGloo(store, self.rank, self.size, timeout_of(group) + MARGIN)

    def highest(self, values: Sequence[int]) -> list[int]:
        """Of each value the highest that a rank says. One collective."""
        told = torch.tensor(values, dtype=torch.int64)
        options = _c10d.AllreduceOptions()
        options.reduceOp = _c10d.ReduceOp.MAX
        self._wait(lambda group: group.allreduce([told], options))
        return [int(value) for value in told]

    def gathered(self, data: bytes) -> list[bytes]:
        """What every rank says, in the order of ranks: lengths first, then everything padded to the longest."""
        mine = torch.tensor([len(data)], dtype=torch.int64)
        lengths = [torch.zeros_like(mine) for _ in range(self.size)]
        self._wait(lambda group: group.allgather([lengths], [mine]))
        counts = [int(length) for length in lengths]
        padded = torch.zeros(max(counts), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.zeros_like(padded) for _ in range(self.size)]
        self._wait(lambda group: group.allgather([parts], [padded]))
        return [part[:count].numpy().tobytes() for part, count in zip(parts, counts, strict=True)]

    def _wait(self, begin: Callable[[Any], Any]) -> None:
        """What broke stays broken, and is let go of at once: that closes its connections, by which the others notice.
        A rank whose own neighbours are alive would wait on.
        """
        try:
            with _all_there():
                if self._group is None:
                    raise RuntimeError("it broke before")
                begin(self._group).wait()
        except BaseException:
            self._group = None
            raise

    def close(self) -> None:
        """torch joins the group's threads."""
        self._group = None


_SIDES: dict[tuple[ProcessGroup, str], Side] = {}


def _close_all() -> None:
    """At exit: a thread of gloo that asks for the interpreter while that ends brings the process down (pytorch issue
    190489), and `destroy_process_group` does not know of ours.
    """
    for side in _SIDES.values():
        side.close()


atexit.register(_close_all)
os.register_at_fork(after_in_child=lambda: atexit.unregister(_close_all))  # a child has none of these threads


def side_of(group: ProcessGroup, purpose: str) -> Side:
    """Collective when it is first asked for. `purpose`: another one has connections of its own, for another thread."""
    key = (group, purpose)
    if key not in _SIDES:
        _SIDES[key] = Side(group, purpose)
    return _SIDES[key]


def timeout_of(group: ProcessGroup) -> timedelta:
    """Of the group's collectives, the longest of its backends; where torch does not say, its usual one."""
    found = []
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        found.append(getattr(options, "_timeout", USUAL))
    return max(found, default=USUAL)


@contextmanager
def _all_there() -> Iterator[None]:
    """torch says by a RuntimeError that a rank is gone or too late, and not which."""
    try:
        yield
    except RuntimeError as error:
        text = "a rank of the trainer is gone, or did not come within the time-out of its group"
        raise Aborted(Failure("peer_lost", text)) from error.with_traceback(None)  # its frames hold the group
