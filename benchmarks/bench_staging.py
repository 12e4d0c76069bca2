"""Staging from disk against `pread` of the same ranges plus one copy by as many threads; bytes asked for.

The checkpoint is in the page cache, except where it says cold.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common import Report, best_of
from transports.base import Box, Read
from transports.disk.reader import ReaderOptions
from transports.disk.source import DiskSource
from transports.scans import has_normal, nonfinite
from transports.testing import write_sharded

LAYERS = 12
SHAPES = {
    "q_proj": (2048, 2048),
    "k_proj": (512, 2048),
    "v_proj": (512, 2048),
    "o_proj": (2048, 2048),
    "gate_proj": (5632, 2048),
    "up_proj": (5632, 2048),
    "down_proj": (2048, 5632),
    "norm": (2048,),
}
VOCABULARY = (32_000, 2048)
BY_COLUMNS = ("o_proj", "down_proj")
CHUNK = 8 << 20


@dataclass(frozen=True, slots=True)
class Range:
    """`rows` of a tensor, read whole from `offset` of a file; `keep` columns of them are copied to `target`."""

    fd: int
    offset: int
    rows: int
    width: int
    keep: slice
    target: torch.Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a few hundred KB: does it run at all")
    parser.add_argument("--tp", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("staging from disk")
    with tempfile.TemporaryDirectory(prefix="liveweights-bench-") as folder:
        make_checkpoint(Path(folder), 64 if chosen.small else 1)
        for tp in chosen.tp:
            measure(report, folder, tp, chosen.rounds)
    report.finish()


def make_checkpoint(folder: Path, smaller: int) -> None:
    shards = [{"embed_tokens": noise(tuple(size // smaller for size in VOCABULARY))}]
    for layer in range(LAYERS):
        sizes = {f"{layer}.{name}": tuple(size // smaller for size in shape) for name, shape in SHAPES.items()}
        shards.append({name: noise(size) for name, size in sizes.items()})
    write_sharded(folder, shards)
    os.sync()


def noise(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16).view(torch.bfloat16)


def measure(report: Report, folder: str, tp: int, rounds: int) -> None:
    """The last rank of `tp`: rows, columns and what is replicated, each against its plain counterpart."""
    options = ReaderOptions()
    with DiskSource.open(folder, (folder,), options=options) as source:
        by_rows = [read for read in shard(source, tp) if not by_columns(read.name, tp)]
        by_column = [read for read in shard(source, tp) if by_columns(read.name, tp)]
        groups = {"rows": by_rows, **({"columns": by_column} if by_column else {})}
        for what, reads in groups.items():
            _speed(report, source, what, tp, reads, rounds, options)
            _bytes(report, source, what, tp, reads, options)
        _looks(report, source, tp, by_rows + by_column, rounds)
        _first_touch(report, source, tp, rounds)
        _cold(report, source, tp, by_rows + by_column)


def by_columns(name: str, tp: int) -> bool:
    return tp > 1 and name.split(".")[-1] in BY_COLUMNS


def shard(source: DiskSource, tp: int) -> list[Read]:
    """Of the last rank, into touched memory."""
    reads = []
    for name, spec in source.specs.items():
        start, size = [0] * len(spec.shape), list(spec.shape)
        if len(size) == 2 and tp > 1:
            dim = 1 if by_columns(name, tp) else 0
            size[dim] //= tp
            start[dim] = size[dim] * (tp - 1)
        reads.append(Read(name, Box(tuple(start), tuple(size)), torch.zeros(size, dtype=torch.bfloat16)))
    return reads


def _speed(
    report: Report, source: DiskSource, what: str, tp: int, reads: Sequence[Read], rounds: int, options: ReaderOptions
) -> None:
    plain = ranges(source, reads)
    size = max(each.rows * each.width for each in plain) * 2
    buckets = [torch.zeros(size, dtype=torch.uint8) for _ in range(options.workers)]
    bare, staged = best_of(rounds, lambda: bare_staging(plain, buckets), lambda: source.read(reads))
    nbytes = sum(read.target.nbytes for read in reads)
    detail = f"{nbytes / staged / 1e9:.1f} against {nbytes / bare / 1e9:.1f} GB/s of shard, {options.workers} threads"
    report.add(f"staging / (pread + copy), {what}, TP={tp}", bare / staged, goal=0.7, detail=detail)


def ranges(source: DiskSource, reads: Sequence[Read]) -> list[Range]:
    """The rows that hold the slices, in chunks."""
    made = []
    for read in reads:
        place = source.places[read.name]
        width = place.spec.shape[-1]
        first, count = (read.box.start[0], read.box.size[0]) if len(place.spec.shape) == 2 else (0, 1)
        target = read.target.view(count, -1)
        keep = slice(read.box.start[-1], read.box.start[-1] + read.box.size[-1])
        step = max(1, CHUNK // (2 * width))
        for low in range(0, count, step):
            rows = min(step, count - low)
            offset = place.start + (first + low) * width * 2
            made.append(Range(place.fd, offset, rows, width, keep, target[low : low + rows]))
    return made


def bare_staging(plain: Sequence[Range], buckets: Sequence[torch.Tensor]) -> None:
    """What anybody would write: read a range into a buffer, copy it to its place."""

    def work(at: int) -> None:
        bucket = buckets[at]
        memory = memoryview(bucket.numpy())
        for each in plain[at :: len(buckets)]:
            size = each.rows * each.width * 2
            done = 0
            while done < size:
                done += os.preadv(each.fd, [memory[done:size]], each.offset + done)
            typed = bucket[:size].view(torch.bfloat16).view(each.rows, each.width)
            each.target.copy_(typed[:, each.keep])

    with ThreadPoolExecutor(len(buckets)) as pool:
        list(pool.map(work, range(len(buckets))))


def _bytes(
    report: Report, source: DiskSource, what: str, tp: int, reads: Sequence[Read], options: ReaderOptions
) -> None:
    """`rchar`: what this process asked of the system by read calls."""
    before = counters()["rchar"]
    source.read(reads)
    asked = counters()["rchar"] - before
    mine = sum(read.target.nbytes for read in reads)
    whole = sum(source.specs[read.name].nbytes for read in reads)
    runs = [read.box.size[-1] * 2 for read in reads if by_columns(read.name, tp)]
    detail = f"{asked / 1e6:.1f} MB asked, shard {mine / 1e6:.1f} MB, tensors {whole / 1e6:.1f} MB"
    if runs and max(runs) < options.limits.run:
        report.add(
            f"bytes asked / tensor, {what} under 16 KiB, TP={tp}",
            asked / whole,
            goal=1.0001,
            at_most=True,
            detail=detail,
        )
    else:
        report.add(f"bytes asked / shard, {what}, TP={tp}", asked / mine, goal=1.05, at_most=True, detail=detail)


def _looks(report: Report, source: DiskSource, tp: int, reads: Sequence[Read], rounds: int) -> None:
    """What is judged of values once they lie in the spare: a NaN anywhere, and one normal number in each matrix."""
    plain = ranges(source, reads)
    size = max(each.rows * each.width for each in plain) * 2
    buckets = [torch.zeros(size, dtype=torch.uint8) for _ in range(ReaderOptions().workers)]
    weights = [read.target.normal_() for read in reads]  # random bytes would hold a NaN in the first block

    def for_numbers() -> None:
        for weight in weights:
            if weight.dim() >= 2:
                has_normal(weight, "BF16")

    def for_nan() -> None:
        for weight in weights:
            nonfinite(weight)

    numbers, nan = best_of(rounds, for_numbers, for_nan)
    bare, staged = best_of(rounds, lambda: bare_staging(plain, buckets), lambda: source.read(reads))
    name = f"staging / (pread + copy), TP={tp}"
    report.add(name, bare / staged)
    each = f"{1e6 * numbers / len(weights):.0f} us for each of {len(weights)} tensors"
    report.add(f"{name}, with the look for a normal number", bare / (staged + numbers), detail=each)
    report.add(f"look for a normal number / staging, TP={tp}", numbers / staged, goal=0.1, at_most=True)
    report.add(f"look for NaN / staging, TP={tp}", nan / staged)


def _first_touch(report: Report, source: DiskSource, tp: int, rounds: int) -> None:
    """Into memory that was never written, as without a spare touched at join."""
    touched = shard(source, tp)

    def fresh() -> None:
        source.read([Read(read.name, read.box, torch.empty_like(read.target)) for read in touched])

    usual, first = best_of(rounds, lambda: source.read(touched), fresh)
    report.add(
        f"staging into untouched / touched memory, time, TP={tp}",
        first / usual,
        detail=f"{first:.2f} s / {usual:.2f} s",
    )


def _cold(report: Report, source: DiskSource, tp: int, reads: Sequence[Read]) -> None:
    """Bytes that came from the device after the page cache was asked to forget the files."""
    for fd in {place.fd for place in source.places.values()}:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    before = counters()["read_bytes"]
    report_of = source.read(reads)
    device = counters()["read_bytes"] - before
    detail = (
        f"{device / 1e6:.1f} MB from the device, {report_of.bytes_asked / 1e6:.1f} MB asked, {report_of.seconds:.2f} s"
    )
    report.add(f"device bytes / bytes asked, cold, TP={tp}", device / report_of.bytes_asked, detail=detail)


def counters() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


if __name__ == "__main__":
    main()
