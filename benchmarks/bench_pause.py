"""Pause, rollback, memory, serving while staging and recovery, of whole transactions over real processes.

Small and large model go through the same transactions in the same run: the pause must hardly depend on bytes. The
bare exchange is measured by the same rank processes, on their own parameters, before they serve.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.big_models import make_big
from benchmarks.common import Report
from benchmarks.fleets import Fleet, bare_exchange_s, fleet, resident_bytes
from engine_adapter.models import make_versions

AIM_MS = 20.0
BUCKETS_BYTES = 2 * (512 << 20)


@dataclass(slots=True)
class Measured:
    """Of one fleet. Milliseconds; bytes of all ranks together: `before` the first update, `resident` after each."""

    pauses: dict[str, list[float]] = field(default_factory=lambda: {"flip": [], "exchange": []})
    parts: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {"flip": [], "exchange": []})
    rollbacks: list[float] = field(default_factory=list)
    stages: list[float] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    before: int = 0
    shard: int = 0


class Publisher:
    """Publishes to one fleet, round by round, and keeps what it saw. `live`: which checkpoint was published last."""

    def __init__(self, fleet: Fleet, checkpoints: tuple[Path, Path]) -> None:
        self._fleet, self._checkpoints = fleet, checkpoints
        self._step, self._live = 0, "start"
        self.live = 0
        self.seen = Measured(before=resident_bytes(fleet.rank_pids()), shard=fleet.shard_bytes())

    def round(self, turn: int) -> None:
        """An update with flip, a rollback of it, an update with exchange."""
        fleet, seen = self._fleet, self.seen
        for mode in ("flip", "exchange"):
            self._step += 1
            self.live = (self._step + turn) % 2
            receipt = fleet.publish(self._checkpoints[self.live], self._step, install=mode)
            seen.pauses[mode].append(receipt["pause"]["pause_ms"])
            seen.parts[mode].append(receipt["pause"])
            seen.stages.append(receipt["phases_ms"]["staging"])
            seen.resident.append(resident_bytes(fleet.rank_pids()))
            if mode == "flip":
                back = fleet.rollback(self._live, receipt["version"], install=mode)
                seen.rollbacks.append(back["pause"]["pause_ms"])
            else:
                self._live = receipt["version"]

    def stage(self, rounds: int, **policy: Any) -> list[float]:
        """Milliseconds of staging of further updates, with `policy`."""
        times = []
        for _ in range(rounds):
            self._step, self.live = self._step + 1, 1 - self.live
            receipt = self._fleet.publish(self._checkpoints[self.live], self._step, **policy)
            times.append(receipt["phases_ms"]["staging"])
            self._live = receipt["version"]
        return times


def parts(seen: Measured, mode: str) -> str:
    """Medians of the parts of the pause."""
    names = [f"{name}_ms" for name in ("quiesce", "decide", "install", "invalidate", "publish", "resume")]
    return ", ".join(f"{name} {median(each[name] for each in seen.parts[mode]):.2f}" for name in names)


def compare(report: Report, tp: int, small: Measured, big: Measured, bare_s: float) -> None:
    gigabytes = big.shard / 1e9
    flip = {name: median(each.pauses["flip"]) for name, each in (("small", small), ("big", big))}
    report.add(
        f"pause flip {gigabytes:.2f} GB / few KB, TP={tp}",
        flip["big"] / flip["small"],
        goal=2.0,
        at_most=True,
        detail=f"{flip['big']:.2f} ms / {flip['small']:.2f} ms (medians of {len(big.pauses['flip'])})",
    )
    report.add(
        f"pause flip / {AIM_MS:.0f} ms, TP={tp}",
        flip["big"] / AIM_MS,
        goal=1.0,
        at_most=True,
        detail=f"medians: {parts(big, 'flip')}; small: {parts(small, 'flip')}",
    )
    exchange, small_exchange = median(big.pauses["exchange"]), median(small.pauses["exchange"])
    report.add(
        f"pause exchange less small pause / best bare exchange, TP={tp}",
        (exchange - small_exchange) / (bare_s * 1e3),
        goal=1.3,
        at_most=True,
        detail=f"({exchange:.0f} - {small_exchange:.1f}) ms / {bare_s * 1e3:.0f} ms",
    )
    report.add(
        f"rollback pause / commit pause, TP={tp}",
        median(big.rollbacks) / flip["big"],
        goal=1.1,
        at_most=True,
        detail=f"{median(big.rollbacks):.2f} ms / {flip['big']:.2f} ms",
    )
    growth = big.resident[-1] - big.resident[0]
    report.add(
        f"memory added by updates 2 to {len(big.resident)} / shard, TP={tp}",
        growth / big.shard,
        goal=0.02,
        at_most=True,
        detail=f"after 1, 2, 3, last: {', '.join(f'{big.resident[i] / 1e9:.2f}' for i in (0, 1, 2, -1))} GB",
    )
    kept = big.before - small.before - (big.shard - small.shard)
    report.add(
        f"spare and buckets at join / (shard + 2 buckets), TP={tp}",
        kept / (big.shard + tp * BUCKETS_BYTES),
        goal=1.0,
        at_most=True,
        detail=f"{kept / 1e9:.2f} GB beside {big.shard / 1e9:.2f} GB of live weights, all ranks",
    )
    report.add(
        f"stage first / later updates, TP={tp}",
        big.stages[0] / median(big.stages[1:]),
        detail=f"{big.stages[0]:.0f} ms / {median(big.stages[1:]):.0f} ms",
    )


def serving(report: Report, tp: int, fleet: Fleet, checkpoint: Path, step: int, tokens: int) -> None:
    """Inter-token times of one stream, undisturbed and while an update is staged (committed by hand afterwards)."""
    calm = stream(fleet, tokens, lambda: True)
    done = threading.Event()

    def update() -> None:
        fleet.publish(checkpoint, step)
        done.set()

    worker = threading.Thread(target=update)
    worker.start()
    busy = stream(fleet, tokens, done.is_set)
    worker.join()
    if len(calm) < 3 or len(busy) < 3:
        report.add(f"throughput while staging / undisturbed, TP={tp}", 0.0, detail="too few tokens to say")
        return
    report.add(
        f"throughput while staging / undisturbed, TP={tp}",
        median(calm) / median(busy),
        detail=f"{1 / median(busy):.1f} / {1 / median(calm):.1f} tokens/s",
    )
    report.add(
        f"p99 inter-token while staging / undisturbed, TP={tp}",
        p99(busy) / p99(calm),
        detail=f"{p99(busy) * 1e3:.0f} / {p99(calm) * 1e3:.0f} ms over {len(busy)} tokens",
    )


def stream(fleet: Fleet, tokens: int, enough: Callable[[], bool]) -> list[float]:
    """Seconds between tokens; streams again until `enough`."""
    gaps: list[float] = []
    with httpx.Client(base_url=fleet.replica.url, trust_env=False, timeout=600.0) as http:
        while True:
            last = None
            body = {"prompt": "once upon a time", "max_tokens": tokens, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as answer:
                for line in answer.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    now = time.perf_counter()
                    if last is not None:
                        gaps.append(now - last)
                    last = now
            if enough():
                return gaps


def p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def recovery(report: Report, tp: int, fleet: Fleet) -> None:
    """kill -9 of the coordinator; start to ready again, journal and members read."""
    fleet.kill_coordinator()
    begun = time.perf_counter()
    fleet.restart_coordinator()
    report.add(
        f"recovery of a killed coordinator, seconds, TP={tp}", time.perf_counter() - begun, detail="start to /readyz"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--tp", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--small", action="store_true", help="a few KB on both sides: does it run at all")
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    report = Report("pause")
    with tempfile.TemporaryDirectory(prefix="liveweights-bench-") as folder:
        work = Path(folder)
        tiny = make_versions(work / "small", 2)
        large = tiny
        if not chosen.small:
            large = tuple(make_big(work / f"big{seed}", chosen.gigabytes, seed=seed) for seed in (0, 1))
        for tp in chosen.tp:
            with fleet(work, tiny[0], tp, f"small-tp{tp}") as one, fleet(work, large[0], tp, f"big-tp{tp}") as two:
                small, big = Publisher(one, (tiny[0], tiny[1])), Publisher(two, (large[0], large[1]))
                for turn in range(chosen.rounds):  # in turns: what else the machine does meets both
                    small.round(turn)
                    big.round(turn)
                compare(report, tp, small.seen, big.seen, bare_exchange_s(work, f"big-tp{tp}"))
                recovery(report, tp, one)
                serving(report, tp, two, large[1], 10_000, chosen.tokens)
    report.finish()


if __name__ == "__main__":
    main()
