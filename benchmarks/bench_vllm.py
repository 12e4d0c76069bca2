"""Publications into a stock vLLM server against vLLM's own `reload_weights` of the same checkpoint, in one run.

Runs where vLLM is installed (`make bench` uses the environment of `make vllm`); elsewhere it says so and adds no rows.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from benchmarks.bench_pause import Publisher, parts
from benchmarks.big_models import make_big
from benchmarks.common import Report
from benchmarks.fleets import Fleet, vllm_fleet
from transports.disk.manifests import write_manifest

#: Of one pause by exchange, beside the copies: what a pause of nothing costs (the goal allows 30 ms).
ALLOWED_MS = 30.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="tens of MB: does it run at all")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        print("vLLM is not installed in this environment: nothing measured (make vllm makes one that has it)")
        return
    report = Report("vLLM: publication against its own reload")
    with tempfile.TemporaryDirectory(prefix="liveweights-bench-") as folder:
        work = Path(folder)
        measure(report, work, "bfloat16", 0.02 if chosen.small else 1.05, chosen.rounds)
        measure(report, work, "float32", 0.02 if chosen.small else 0.35, chosen.rounds)
    report.finish()


def measure(report: Report, work: Path, dtype: str, gigabytes: float, rounds: int) -> None:
    """float32: vLLM packs every linear, so an install swaps handlers."""
    first, second = (make_big(work / f"{dtype}-{seed}", gigabytes, seed=seed) for seed in (0, 1))
    with vllm_fleet(work, first, dtype) as fleet:
        reload_ms = median(reloads(fleet, first, rounds))  # first: of an engine as vLLM left it
        publisher = Publisher(fleet, (first, second))
        for turn in range(rounds):
            publisher.round(turn)
        seen, shard = publisher.seen, fleet.shard_bytes() / 1e9
        if dtype == "bfloat16":
            staging(report, fleet, publisher, (first, second), rounds)
        flip, exchange = median(seen.pauses["flip"]), median(seen.pauses["exchange"])
        how = "flip" if dtype == "bfloat16" else "flip with swapped handlers"
        report.add(
            f"reload_weights / pause by {how}, {dtype}",
            reload_ms / flip,
            goal=20.0,
            detail=f"{reload_ms:.0f} ms / {flip:.1f} ms, {shard:.2f} GB; medians of {rounds}; {parts(seen, 'flip')}",
        )
        if dtype != "bfloat16":
            return
        detail = f"{reload_ms:.0f} ms / {exchange:.0f} ms"
        report.add("reload_weights / pause by exchange", reload_ms / exchange, goal=2.0, detail=detail)
        bare_ms = 1e3 * min(fleet.ask_workers("liveweights_bare_exchange")[0].values())
        report.add(
            f"(pause by exchange less {ALLOWED_MS:.0f} ms) / best bare exchange in the worker",
            (exchange - ALLOWED_MS) / bare_ms,
            goal=1.3,
            at_most=True,
            detail=f"{exchange:.0f} ms / {bare_ms:.0f} ms; {parts(seen, 'exchange')}",
        )
        rollback = median(seen.rollbacks)
        report.add("rollback pause / commit pause, vLLM", rollback / flip, goal=1.1, at_most=True)


def staging(report: Report, fleet: Fleet, publisher: Publisher, checkpoints: tuple[Path, Path], rounds: int) -> None:
    """Of checkpoints with a manifest, whose numbers are not looked at: rows replayed into the spare, nothing else.

    Beside it what staging takes with the look for NaN, and without a manifest, when the spare is filled with NaN first.
    """
    gigabytes = fleet.shard_bytes() / 1e9
    bare_ms = 1e3 * fleet.ask_workers("liveweights_bare_staging", folder=str(checkpoints[0]))[0]["seconds"]
    bare = f"{gigabytes / bare_ms * 1e3:.1f} GB/s bare"
    whole = median(publisher.seen.stages)
    for path in checkpoints:
        write_manifest(str(path))
    checked = median(publisher.stage(rounds))
    plain = median(publisher.stage(rounds, allow_nonfinite=True))
    name = "staging / (pread + copy) in the worker"
    report.add(name, bare_ms / plain, goal=0.7, detail=f"{bare}, {gigabytes / plain * 1e3:.1f} GB/s")
    report.add(
        f"{name}, with the look for NaN", bare_ms / checked, goal=0.7, detail=f"{gigabytes / checked * 1e3:.1f} GB/s"
    )
    report.add(f"{name}, also without a manifest", bare_ms / whole, detail=f"{gigabytes / whole * 1e3:.1f} GB/s")


def reloads(fleet: Fleet, live: Path, rounds: int) -> list[float]:
    """Milliseconds of vLLM's own reload of what is live, as its client sees them: it holds the engine for as long."""
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        fleet.ask_workers("reload_weights", weights_path=str(live))
        times.append((time.perf_counter() - begun) * 1e3)
    return times


if __name__ == "__main__":
    main()
