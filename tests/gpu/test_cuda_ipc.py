"""CUDA IPC between two real processes on one device.

With LIVEWEIGHTS_STAND_IN=1 the same tests run over a stand-in for the device, to try the tests themselves where there
is none; what only a device can show is skipped then.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from transports.buckets import StreamPlan
from transports.cuda_ipc import CudaIpcSender
from transports.digest import tensor_digest, to_hex
from transports.dtypes import carrier
from transports.media.testing import FakeDevice
from transports.testing.source_contract import noise, samples
from transports.testing.transfer import offer_of, seats_for, send_all, specs_of
from updater.core.errors import Aborted
from updater.protocol import wire

STAND_IN = os.environ.get("LIVEWEIGHTS_STAND_IN") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not STAND_IN and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
only_on_a_device = pytest.mark.skipif(STAND_IN, reason="a stand-in cannot show it")

DEVICE = torch.device("cpu" if STAND_IN else "cuda")
BUCKET = 1 << 20
HANG_S = 60.0
Tensors = dict[str, torch.Tensor]


def there(tensors: Tensors) -> Tensors:
    """The same bytes on the device, by way of an integer type: not every dtype can be copied as itself."""
    return {
        name: t.contiguous().view(carrier(t.element_size())).to(DEVICE).view(t.dtype).view(t.shape)
        for name, t in tensors.items()
    }


def digests(tensors: Tensors) -> dict[str, str]:
    return {name: to_hex(tensor_digest(tensor)) for name, tensor in tensors.items()}


def model(seed: int = 1, rows: int = 500) -> Tensors:
    """Some four buckets."""
    return {f"w{at}": noise("BF16", (rows, 1000), 10 * seed + at) for at in range(4)}


class Rank:
    """The other process."""

    def __init__(self, environment: dict[str, str]) -> None:
        program = Path(__file__).with_name("cuda_ipc_program.py")
        self.process = subprocess.Popen(
            [sys.executable, str(program), "stand-in" if STAND_IN else "cuda"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        assert self.answer() == {"ready": True}

    def tell(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def ask(self, **order: Any) -> dict[str, Any]:
        self.tell(**order)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(HANG_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def rank_process(**environment: str) -> Iterator[Rank]:
    rank = Rank(environment)
    try:
        yield rank
    finally:
        rank.kill()


@pytest.fixture(scope="module")
def rank() -> Iterator[Rank]:
    with rank_process() as started:
        yield started


@pytest.fixture
def sender() -> Iterator[CudaIpcSender]:
    made = new_sender()
    yield made
    made.close()


def new_sender() -> CudaIpcSender:
    return CudaIpcSender(memory=FakeDevice() if STAND_IN else None)


def push(sender: CudaIpcSender, rank: Rank, tensors: Tensors, receivers: int = 1, bucket: int = BUCKET) -> Any:
    """One update, to the other process's answer."""
    specs = specs_of(tensors)
    offer = offer_of(sender, seats_for(receivers))
    told = [[spec.name, spec.dtype, spec.shape] for spec in specs]
    rank.tell(do="read", offer=wire.plain(offer), specs=told, receivers=receivers)
    try:
        send_all(sender, offer, StreamPlan(specs, bucket), tensors, HANG_S)
    finally:
        answer = rank.answer()
    return answer


def good(answer: Any, tensors: Tensors) -> None:
    """Every receiver computed on its device the digests that the CPU computes here."""
    count = len(answer["errors"])
    assert (answer["errors"], answer["device"]) == ([""] * count, DEVICE.type)
    assert answer["digests"] == [digests(tensors)] * count


def until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.01)


def allocated() -> int:
    """Bytes of this process's tensors on the device, after what others have let go of was taken back."""
    gc.collect()
    if STAND_IN:
        return 0
    torch.cuda.synchronize()
    torch.cuda.ipc_collect()
    return torch.cuda.memory_allocated()


def test_every_dtype_a_scalar_and_nothing_at_all(sender: CudaIpcSender, rank: Rank) -> None:
    tensors = samples()
    good(push(sender, rank, there(tensors), bucket=1 << 10), tensors)


def test_bytes_on_the_device_have_the_digests_of_the_cpu(sender: CudaIpcSender, rank: Rank) -> None:
    """Several updates through two buffers that are written again and again."""
    for seed in range(5):
        tensors = model(seed)
        good(push(sender, rank, there(tensors)), tensors)


def test_views_of_device_memory_travel_as_they_are_seen(sender: CudaIpcSender, rank: Rank) -> None:
    base = model()["w0"]
    seen = {"t": base.t(), "slice": base[:, 3:77], "row": base[5]}
    moved = there({"base": base})["base"]
    on_device = {"t": moved.t(), "slice": moved[:, 3:77], "row": moved[5]}
    good(push(sender, rank, on_device), {name: tensor.contiguous() for name, tensor in seen.items()})


def test_a_plan_that_a_rank_does_not_expect(sender: CudaIpcSender, rank: Rank) -> None:
    tensors = model()
    offer, specs = offer_of(sender, seats_for(1)), specs_of(tensors)
    rank.tell(do="read", offer=wire.plain(offer), specs=[["other", "BF16", [3]]], receivers=1)
    with pytest.raises(Aborted) as caught:
        send_all(sender, offer, StreamPlan(specs, BUCKET), there(tensors), HANG_S)
    assert {failure.code for failure in caught.value.failures} == {"stream_mismatch"}
    assert rank.answer()["errors"] == ["stream_mismatch"]
    good(push(sender, rank, there(tensors)), tensors)


@pytest.mark.case("B110")
def test_fifty_updates_take_no_more_memory_on_either_side(sender: CudaIpcSender, rank: Rank) -> None:
    tensors = model()
    moved = there(tensors)
    here, others = [], []
    for at in range(50):
        good(push(sender, rank, moved), tensors)
        if at >= 3:
            here.append(allocated())
            others.append(rank.ask(do="memory")["allocated"])
    assert max(here) - min(here) <= BUCKET
    assert max(others) - min(others) <= (2 if STAND_IN else BUCKET)


@pytest.mark.case("B111")
def test_a_buffer_comes_back_after_many_chunks_and_a_bad_end(rank: Rank) -> None:
    rank.ask(do="forget")
    tensors = there({f"c{at}": noise("BF16", (400, 1000), at) for at in range(8)})
    before = allocated()
    sender = new_sender()
    for _ in range(3):
        good(push(sender, rank, tensors), {name: tensor.cpu() for name, tensor in tensors.items()})
        sender.finish(1.0, normal=False)  # buffers are dropped, the rank sees the end and lets go
        until(lambda: allocated() == before)
    sender.close()


@pytest.mark.case("B111")
def test_a_killed_rank_costs_no_buffer() -> None:
    tensors = model()
    moved = there(tensors)
    before = allocated()
    sender = new_sender()
    with rank_process() as doomed:
        good(push(sender, doomed, moved), tensors)
        doomed.kill()
        fresh = offer_of(sender, seats_for(1))
        with pytest.raises(Aborted):  # no receiver is left to come
            send_all(sender, fresh, StreamPlan(specs_of(tensors), BUCKET), moved, 0.5)
    until(lambda: allocated() == before)
    sender.close()


@pytest.mark.case("B113")
@only_on_a_device
def test_expandable_segments_are_refused_with_advice() -> None:
    code = """
import torch
from transports.cuda_ipc import CudaIpcSender
from updater.core.errors import Rejected
torch.zeros(1, device="cuda")
try:
    CudaIpcSender()
except Rejected as error:
    print(error.code, "expandable_segments" in str(error))
"""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        environment = os.environ | {name: "expandable_segments:True"}
        command = [sys.executable, "-c", code]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2 * HANG_S)
        assert ran.stdout.split() == ["transport_unsupported", "True"], ran.stderr


@pytest.mark.case("B117")
@only_on_a_device
def test_the_device_is_found_by_uuid_under_another_name(sender: CudaIpcSender) -> None:
    """A rank that is given its card by UUID, and with two cards in the other order."""
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    orders = [f"GPU-{uuid.removeprefix('GPU-')}"] + (["1,0"] if torch.cuda.device_count() > 1 else [])
    for visible in orders:
        with rank_process(CUDA_VISIBLE_DEVICES=visible) as renamed:
            tensors = model()
            good(push(sender, renamed, there(tensors)), tensors)


@pytest.mark.case("B117")
@only_on_a_device
def test_a_rank_without_the_device_is_refused_with_both_sets(sender: CudaIpcSender) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    with rank_process(CUDA_VISIBLE_DEVICES="1") as apart:
        with pytest.raises(Aborted) as caught:
            push(sender, apart, there(model()))
        assert caught.value.code == "transport_unsupported"
        uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(2)]
        assert all(uuid in str(caught.value) for uuid in uuids)


@pytest.mark.case("B122")
def test_two_receivers_in_one_process(sender: CudaIpcSender, rank: Rank) -> None:
    for seed in range(3):
        tensors = model(seed)
        good(push(sender, rank, there(tensors), receivers=2), tensors)
    began = time.monotonic()
    rank.ask(do="forget")
    assert time.monotonic() - began < HANG_S


@pytest.mark.case("B128")
def test_tensors_of_two_elements(sender: CudaIpcSender, rank: Rank) -> None:
    tensors = {f"scale{at}": torch.tensor([1.0 + at, -2.0]) for at in range(30)} | {"one": torch.tensor(3.5)}
    good(push(sender, rank, there(tensors), bucket=1 << 10), tensors)


@pytest.mark.case("B129")
def test_tensors_of_the_host_are_staged_by_a_copy(sender: CudaIpcSender, rank: Rank) -> None:
    tensors = model()
    mixed = {
        name: tensor if at % 2 else there({name: tensor})[name] for at, (name, tensor) in enumerate(tensors.items())
    }
    good(push(sender, rank, mixed), tensors)
