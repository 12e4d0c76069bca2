"""Updates in a row over every transport in turns: nothing of coordinator, front, rank and trainer grows.

The long form, 200 updates of each transport over two ranks, is `benchmarks/bench_many_updates.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.bench_many_updates import KINDS, Party, allowed_bytes, party, soak
from benchmarks.watching import descriptors

WARM, MORE = 12, 60
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def everybody(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Party]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with party(tmp_path_factory.mktemp("soak"), tp=1) as all:
        yield all
    torch.set_num_threads(threads)


def test_many_updates_leave_everything_as_it_was(everybody: Party) -> None:
    growth = soak(everybody, KINDS, WARM, MORE)
    assert not growth.meanwhile
    assert not growth.afterwards, {role: descriptors(pid) for role, pid in everybody.pids.items()}
    assert all(size < allowed_bytes(everybody, MORE) for size in growth.memory.values()), growth.memory
