"""On a CUDA device: exchange, digest and CUDA IPC against a copy inside the device, staging against a copy from pinned
memory and beside a forward loop, and the pause for a model of 16 GB.

Both sides of every ratio are measured in turns in one run. Without a CUDA device it says so and measures nothing;
`--stand-in` runs it on the CPU with a stand-in for the device, to try the script.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Report, best_of
from engine_adapter.base import Parameter
from engine_adapter.rank.exchange import CHUNK_BYTES
from engine_adapter.rank.spare import RankSpare
from transports.base import Box, Read
from transports.buckets import BUCKET_BYTES, StreamPlan
from transports.cuda_ipc import CudaIpcHub, CudaIpcSender
from transports.digest import tensor_digest
from transports.disk.source import DiskSource
from transports.media.testing import FakeDevice
from transports.stream import StreamSource
from transports.testing import write_checkpoint
from transports.testing.transfer import manifest_of, offer_of, seats_for, specs_of
from updater.core.participant import StreamOffer
from updater.core.policy import InstallMode
from updater.protocol import wire
from updater.protocol.manifest import TensorSpec

STAND_IN = "--stand-in" in sys.argv
DEVICE = torch.device("cpu" if STAND_IN else "cuda")
COLUMNS = 8192
CHUNKS = (CHUNK_BYTES, 4 << 20, 32 << 20)
DEADLINE_S = 60.0
MATRIX_BYTES = 1 << 20 if STAND_IN else 64 << 20
#: The model of the pause; less where the device has no room for it twice.
PAUSE_BYTES = 16_000_000_000


def synchronize() -> None:
    if not STAND_IN:
        torch.cuda.synchronize(DEVICE)


def finished(work: Callable[[], object]) -> Callable[[], object]:
    """The work until the device has done it."""

    def run() -> None:
        work()
        synchronize()

    return run


def matrices(nbytes: int) -> dict[str, torch.Tensor]:
    """bf16 matrices of `MATRIX_BYTES` on the device, at least two, of about `nbytes` in all."""
    rows = MATRIX_BYTES // (2 * COLUMNS)
    count = max(2, nbytes // MATRIX_BYTES)
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
        spare = RankSpare(parameters, chunk_bytes=chunk)

        def install(spare: RankSpare, mode: InstallMode) -> None:
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
    pinned = tensor if STAND_IN else tensor.pin_memory()
    there = torch.empty(rows, COLUMNS, dtype=torch.bfloat16, device=DEVICE)
    read = Read("t", Box.whole((rows, COLUMNS)), there)
    with DiskSource.open(str(folder), (str(folder),)) as source:
        staged, copied = best_of(
            rounds, finished(partial(source.read, [read])), finished(partial(there.copy_, pinned, non_blocking=True))
        )
        detail = f"{tensor.nbytes / staged / 1e9:.1f} against {tensor.nbytes / copied / 1e9:.1f} GB/s"
        report.add("gpu copy from pinned memory / staging from the page cache", copied / staged, detail=detail)
        beside_a_forward_loop(report, finished(partial(source.read, [read])), tensor.nbytes, staged)


class Forward(threading.Thread):
    """A chain of matrix products on a stream of its own, step after step, until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        size = 256 if STAND_IN else 4096
        self.weight = torch.randn(size, size, device=DEVICE).to(torch.bfloat16) / size
        self.stop = threading.Event()
        self.steps = 0
        self.seconds = 0.0

    def run(self) -> None:
        stream: Any = None if STAND_IN else torch.cuda.Stream(DEVICE)
        with torch.no_grad(), torch.cuda.stream(stream):
            hidden, began = self.weight.clone(), time.perf_counter()
            while not self.stop.is_set():
                for _ in range(8):
                    hidden = torch.relu(hidden @ self.weight)
                if stream is not None:
                    stream.synchronize()
                self.steps += 1
            self.seconds = time.perf_counter() - began

    def rate(self) -> float:
        """Ends it; steps per second."""
        self.stop.set()
        self.join()
        return self.steps / self.seconds


def beside_a_forward_loop(report: Report, work: Callable[[], object], nbytes: int, alone_s: float) -> None:
    """Each for a second at least: the loop alone, then the loop with staging after staging."""
    loop = Forward()
    loop.start()
    loop.join(1.0)
    free = loop.rate()
    loop, best = Forward(), float("inf")
    loop.start()
    until = time.perf_counter() + 1.0
    while time.perf_counter() < until or best == float("inf"):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    busy = loop.rate()
    report.add("gpu staging beside a forward loop / alone", alone_s / best, detail=f"{nbytes / best / 1e9:.1f} GB/s")
    report.add("gpu forward loop beside staging / alone", busy / free, detail=f"{busy:.0f} against {free:.0f} steps/s")


class Receiver:
    """A rank in another process: it receives every offer it is told of into device memory."""

    def __init__(self, specs: tuple[TensorSpec, ...]) -> None:
        command = [sys.executable, "-m", "benchmarks.bench_gpu", "--receive", wire.encode(StreamPlan(specs)).decode()]
        self.process = subprocess.Popen(
            command + ["--stand-in"] * STAND_IN, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, line: str) -> None:
        if self.process.stdin is not None:
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()

    def answer(self) -> str:
        return self.process.stdout.readline().strip() if self.process.stdout is not None else ""

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(DEADLINE_S)
        self.process.kill()


def receive(text: str) -> None:
    """What the other process does: an offer per line in, the code of an error or "ok" out."""
    specs = wire.decode(StreamPlan, text).tensors
    targets = {s.name: torch.zeros(s.shape, dtype=torch.bfloat16, device=DEVICE) for s in specs}
    reads = [Read(name, Box.whole(target.shape), target) for name, target in targets.items()]
    hub = CudaIpcHub(memory=FakeDevice() if STAND_IN else None)
    for line in sys.stdin:
        offer = wire.decode(StreamOffer, line)
        source = StreamSource("cuda_ipc", manifest_of(specs), hub.receiver(offer, 0))
        source.read(reads)
        source.close()
        print("ok", flush=True)
    hub.close()


def between_processes(report: Report, live: Mapping[str, torch.Tensor], rounds: int) -> None:
    """From the sender's full buffers into the targets of the other process."""
    specs, total = specs_of(live), sum(tensor.nbytes for tensor in live.values())
    plan = StreamPlan(specs, 4 << 20 if STAND_IN else BUCKET_BYTES)
    sender, receiver = CudaIpcSender(memory=FakeDevice() if STAND_IN else None), Receiver(specs)
    copies = {name: torch.empty_like(tensor) for name, tensor in live.items()}
    moved = copied = float("inf")
    for turn in range(rounds + 1):
        seconds = _transfer(sender, receiver, plan)
        began = time.perf_counter()
        for name, copy in copies.items():
            copy.copy_(live[name])
        synchronize()
        if turn:
            moved, copied = min(moved, seconds), min(copied, time.perf_counter() - began)
    sender.close()
    receiver.close()
    detail = f"{total / moved / 1e9:.0f} against {total / copied / 1e9:.0f} GB/s"
    report.add("gpu copy inside the device / CUDA IPC to another process", copied / moved, detail=detail)


def _transfer(sender: CudaIpcSender, receiver: Receiver, plan: StreamPlan) -> float:
    offer = offer_of(sender, seats_for(1))
    receiver.tell(wire.encode(offer).decode())
    sender.open(offer, plan, DEADLINE_S)
    began = time.perf_counter()
    for bucket in plan.buckets:
        sender.buffer(bucket, DEADLINE_S)
        sender.send(bucket, DEADLINE_S)
    sender.finish(DEADLINE_S, normal=True)
    seconds = time.perf_counter() - began
    if receiver.answer() != "ok":
        raise RuntimeError("the receiving process failed")
    return seconds


def pause(report: Report, nbytes: int, rounds: int) -> None:
    """What a commit does to the weights while admission is shut, by both modes, against one copy of the model."""
    if not STAND_IN:
        nbytes = min(nbytes, int(torch.cuda.mem_get_info()[0] * 0.45))
    live = matrices(nbytes)
    total, bound = sum(tensor.nbytes for tensor in live.values()), dict(live)
    parameters = {name: Parameter(name, t, partial(bound.__setitem__, name)) for name, t in live.items()}
    spare = RankSpare(parameters)

    def install(mode: InstallMode) -> None:
        spare.install(mode)
        spare.settle()

    def copy() -> None:
        for name, tensor in spare.live.items():
            spare.spare[name].copy_(tensor)

    exchanged, flipped, copied = best_of(
        rounds,
        finished(partial(install, InstallMode.EXCHANGE)),
        finished(partial(install, InstallMode.FLIP)),
        finished(copy),
    )
    size = f"{total / 1e9:.1f} GB"
    detail = f"{exchanged * 1e3:.1f} ms, copy {copied * 1e3:.1f} ms"
    report.add(f"gpu pause, exchange of {size} / two copies", exchanged / (2 * copied), detail=detail)
    report.add(f"gpu pause, flip of {size} / one copy", flipped / copied, detail=f"{flipped * 1e6:.0f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a hundred megabytes: does it run at all")
    parser.add_argument("--stand-in", action="store_true", help="on the CPU, a few megabytes: does the script run")
    parser.add_argument("--receive", default="", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if not STAND_IN and not torch.cuda.is_available():
        print("bench_gpu: there is no CUDA device here; nothing was measured")
        return
    if chosen.receive:
        receive(chosen.receive)
        return
    small = chosen.small or STAND_IN
    nbytes = 2 * MATRIX_BYTES if small else int(chosen.gigabytes * 1e9)
    rounds = 1 if small else chosen.rounds
    report = Report("gpu")
    live = matrices(nbytes)
    installs(report, live, rounds)
    digests(report, live, rounds)
    between_processes(report, live, rounds)
    live.clear()
    if not STAND_IN:
        torch.cuda.empty_cache()
    pause(report, nbytes if small else PAUSE_BYTES, rounds)
    with tempfile.TemporaryDirectory() as folder:
        staging(report, Path(folder), nbytes, rounds)
    report.finish()


if __name__ == "__main__":
    main()
