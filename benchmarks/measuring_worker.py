"""A vLLM worker of ours that also measures, in its own process and on its own parameters, what copying them costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from benchmarks.bench_staging import bare_staging, ranges
from benchmarks.measuring_engine import CHUNKS, ROUNDS, exchange_plainly
from engine_adapter.vllm.worker import LiveweightsWorker
from transports.base import Box, Read
from transports.disk.reader import ReaderOptions
from transports.disk.source import DiskSource
from transports.dtypes import TORCH_DTYPES


class MeasuringWorker(LiveweightsWorker):
    """Called by vLLM's `collective_rpc`, on the worker's own thread, while nothing is generated."""

    def liveweights_bare_exchange(self) -> dict[str, float]:
        """Chunk bytes -> median seconds of one whole exchange with a second copy."""
        worker: Any = self
        live = [parameter.detach() for parameter in worker.get_model().parameters() if parameter.numel()]
        spare = [tensor.clone() for tensor in live]
        bounce = torch.empty(max(CHUNKS), dtype=torch.uint8).fill_(0)
        found = {}
        for chunk in CHUNKS:
            part = bounce[:chunk]
            found[str(chunk)] = _median(ROUNDS, lambda part=part: exchange_plainly(live, spare, part))
        return found

    def liveweights_bare_staging(self, folder: str) -> dict[str, float]:
        """Median seconds of reading every tensor of a checkpoint and copying it once, by as many threads as staging."""
        options = ReaderOptions()
        with DiskSource.open(folder, (folder,), options=options) as source:
            reads = [
                Read(name, Box.whole(spec.shape), torch.zeros(spec.shape, dtype=TORCH_DTYPES[spec.dtype]))
                for name, spec in source.specs.items()
            ]
            plain = ranges(source, reads)
            size = max(each.rows * each.width for each in plain) * 2
            buckets = [torch.zeros(size, dtype=torch.uint8) for _ in range(options.workers)]
            return {"seconds": _median(ROUNDS, lambda: bare_staging(plain, buckets))}


def _median(rounds: int, work: Callable[[], object]) -> float:
    """After one untimed round; an even number of rounds in all."""
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return median(times)
