"""On a CUDA device: exchange and digest against a copy inside the device, staging against a copy from pinned memory.

Both sides of every ratio are measured in turns in one run. Without a CUDA device it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.common import Report, best_of
from engine_adapter.base import Parameter
from engine_adapter.rank.exchange import CHUNK_BYTES
from engine_adapter.rank.spare import Spare
from transports.base import Box, Read
from transports.digest import tensor_digest
from transports.disk import DiskSource
from transports.testing import write_checkpoint
from updater.core.policy import InstallMode

DEVICE = torch.device("cuda")
COLUMNS = 8192
CHUNKS = (CHUNK_BYTES, 4 << 20, 32 << 20)


def finished(work: Callable[[], object]) -> Callable[[], object]:
    """The work until the device has done it."""

    def run() -> None:
        work()
        torch.cuda.synchronize(DEVICE)

    return run


def matrices(nbytes: int) -> dict[str, torch.Tensor]:
    """bf16 matrices of 64 MiB on the device, at least two, of about `nbytes` in all."""
    rows = (64 << 20) // (2 * COLUMNS)
    count = max(2, nbytes // (64 << 20))
    made = torch.randn(rows, COLUMNS, device=DEVICE).to(torch.bfloat16)
    return {f"{at}.weight": made + at for at in range(count)}


def installs(report: Report, live: dict[str, torch.Tensor], rounds: int) -> None:
    total = sum(tensor.nbytes for tensor in live.values())
    left = torch.empty(total, dtype=torch.uint8, device=DEVICE).fill_(1)
    right = torch.empty_like(left)
    copy = finished(partial(right.copy_, left))
    for chunk in CHUNKS:
        bound = dict(live)
        parameters = {name: Parameter(name, t, partial(bound.__setitem__, name)) for name, t in live.items()}
        spare = Spare(parameters, chunk_bytes=chunk)

        def install(spare: Spare, mode: InstallMode) -> None:
            spare.install(mode)
            spare.settle()

        exchanged, flipped, copied = best_of(
            rounds,
            finished(partial(install, spare, InstallMode.EXCHANGE)),
            finished(partial(install, spare, InstallMode.FLIP)),
            copy,
        )
        report.add(
            f"gpu exchange in {chunk >> 10} KiB / copy inside the device",
            exchanged / copied,
            detail=f"{exchanged * 1e3:.1f} ms, copy {total / copied / 1e9:.0f} GB/s, flip {flipped * 1e6:.0f} us",
        )


def digests(report: Report, live: dict[str, torch.Tensor], rounds: int) -> None:
    tensor = next(iter(live.values()))
    other = torch.empty_like(tensor)
    half = tensor[:, : COLUMNS // 2]
    whole, part, copied = best_of(
        rounds,
        finished(partial(tensor_digest, tensor)),
        finished(partial(tensor_digest, half)),
        finished(partial(other.copy_, tensor)),
    )
    detail = f"{tensor.nbytes / whole / 1e9:.0f} GB/s"
    report.add("gpu copy inside the device / digest", copied / whole, detail=detail)
    report.add("gpu copy inside the device / digest of a column slice", copied / 2 / part)


def staging(report: Report, folder: Path, nbytes: int, rounds: int) -> None:
    """From a file in the page cache."""
    rows = max(1, nbytes // (2 * COLUMNS))
    tensor = torch.randint(0, 1 << 15, (rows, COLUMNS), dtype=torch.int16).view(torch.bfloat16)
    write_checkpoint(folder / "model.safetensors", {"t": tensor})
    pinned, there = tensor.pin_memory(), torch.empty(rows, COLUMNS, dtype=torch.bfloat16, device=DEVICE)
    read = Read("t", Box.whole((rows, COLUMNS)), there)
    with DiskSource.open(str(folder), (str(folder),)) as source:
        staged, copied = best_of(
            rounds, finished(partial(source.read, [read])), finished(partial(there.copy_, pinned, non_blocking=True))
        )
    detail = f"{tensor.nbytes / staged / 1e9:.1f} against {tensor.nbytes / copied / 1e9:.1f} GB/s"
    report.add("gpu copy from pinned memory / staging from the page cache", copied / staged, detail=detail)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a hundred megabytes: does it run at all")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_gpu: there is no CUDA device here; nothing was measured")
        return
    nbytes = 128 << 20 if chosen.small else int(chosen.gigabytes * 1e9)
    rounds = 1 if chosen.small else chosen.rounds
    report = Report("gpu")
    live = matrices(nbytes)
    installs(report, live, rounds)
    digests(report, live, rounds)
    with tempfile.TemporaryDirectory() as folder:
        staging(report, Path(folder), nbytes, rounds)
    report.finish()


if __name__ == "__main__":
    main()
