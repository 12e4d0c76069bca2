"""Device memory, with a stand-in for the device; `tests/gpu` has them with a real one."""

from __future__ import annotations

import dataclasses
import gc
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from transports.buckets import StreamPlan
from transports.cuda_ipc import CudaIpcHub, CudaIpcSender
from transports.media.device_memory import (
    EXPANDABLE,
    DeviceMemoryBuffer,
    DeviceMemoryReceiver,
    DeviceMemorySender,
    check,
    expandable_segments,
)
from transports.media.testing import FakeDevice
from transports.stream.messages import Buffers, DeviceBuffer, Hello, Ready, decode, encode
from transports.testing import refused
from transports.testing.source_contract import digests, noise
from transports.testing.stream_ends import ScriptedReceiver, ScriptedSender
from transports.testing.transfer import Receiving, Transfer, manifest_of, seats_for, specs_of
from updater.core.errors import Aborted
from updater.core.participant import StreamOffer
from updater.protocol import wire

pytestmark = pytest.mark.slow  # together, not each

HELD = {"w": noise("BF16", (64, 100), 1), "v": noise("BF16", (64, 100), 2), "scale": noise("F32", (2,), 3)}


class Devices:
    """One stand-in per process: the trainer's and each rank's."""

    def __init__(self, trainer: FakeDevice, *ranks: FakeDevice) -> None:
        self.trainer, self.ranks = trainer, ranks
        self.sender = CudaIpcSender(memory=trainer)
        self.hubs = [CudaIpcHub(memory=rank) for rank in ranks]

    def push(self, held: dict[str, torch.Tensor] = HELD, **options: Any) -> Transfer:
        return Transfer(self.sender, self.hubs, held, bucket_bytes=4096, **options).run()

    def good(self, held: dict[str, torch.Tensor] = HELD) -> None:
        update = self.push(held)
        assert (update.sender_error, [r.error for r in update.receivers]) == (None, [None] * len(self.hubs))
        assert all(digests(receiver.arrived) == digests(held) for receiver in update.receivers)

    def close(self) -> None:
        self.sender.close()
        for hub in self.hubs:
            hub.close()


@contextmanager
def devices(trainer: FakeDevice, *ranks: FakeDevice) -> Iterator[Devices]:
    made = Devices(trainer, *ranks)
    try:
        yield made
    finally:
        made.close()


def codes(update: Transfer) -> list[tuple[str, str, int | None]]:
    assert isinstance(update.sender_error, Aborted)
    return [(failure.code, failure.replica, failure.rank) for failure in update.sender_error.failures]


def descriptor(**changes: Any) -> DeviceBuffer:
    """A good one, of a buffer that exists, but for `changes`."""
    device = FakeDevice()
    found, _ = DeviceMemoryBuffer(device, 1 << 12).describe()
    assert isinstance(found, DeviceBuffer)
    return dataclasses.replace(found, **changes)


@pytest.mark.case("B110")
def test_fifty_updates_export_twice_and_open_twice() -> None:
    """One handle for each buffer and rank serves the whole session."""
    trainer, rank = FakeDevice(), FakeDevice()
    with devices(trainer, rank) as both:
        for at in range(50):
            both.good({name: tensor if at % 2 else tensor.flip(0) for name, tensor in HELD.items()})
        assert (trainer._exports, rank.opened, rank.closed) == (2, 2, 0)
        assert rank.copies == 50 * len(StreamPlan(specs_of(HELD), 4096).buckets)
    assert (rank.closed, trainer.outstanding()) == (2, [])


@pytest.mark.case("B111")
def test_every_export_is_opened_once_and_counted_down_once() -> None:
    """Two ranks of one buffer have an export each: a shared one would be counted below zero and never come back."""
    trainer, ranks = FakeDevice(), (FakeDevice(), FakeDevice())
    with devices(trainer, *ranks) as both:
        both.good()
        assert (trainer._exports, [rank.opened for rank in ranks]) == (4, [2, 2])
        assert trainer.outstanding() == [1] * 4
    assert trainer.outstanding() == []
    trainer.collect()  # as the allocator does with its next need: the ranks may have let go last
    assert trainer._files == {}


@pytest.mark.case("B111")
def test_what_a_dead_rank_had_open_is_counted_down_for_it() -> None:
    trainer = FakeDevice()
    sender = CudaIpcSender(memory=trainer)
    plan = StreamPlan(specs_of(HELD), 4096)
    offer = StreamOffer("cuda_ipc", sender.address, sender.session, seats_for(1))
    rank = ScriptedReceiver(offer)
    talking = rank.joins(Ready(0), devices=("GPU-0",), handle_format=3)
    sender.open(offer, plan, 5.0)
    talking.join()
    assert trainer.outstanding() == [1, 1]
    rank.close()  # without a goodbye, as after a kill
    with refused("peer_lost"):
        for bucket in plan.buckets:
            sender.buffer(bucket, 5.0)
            sender.send(bucket, 5.0)
        sender.finish(5.0, normal=True)
    assert trainer.outstanding() == []
    sender.close()


@pytest.mark.case("B113")
def test_expandable_segments_are_refused_before_anybody_is_asked() -> None:
    with refused("transport_unsupported"):
        CudaIpcSender(memory=FakeDevice(unable="expandable segments"))
    device = FakeDevice(kind=EXPANDABLE)  # the allocator was told so later: the handle shows it
    with devices(device, FakeDevice()) as both:
        update = both.push()
        assert isinstance(update.sender_error, Aborted)
        assert update.sender_error.code == "transport_unsupported"
        assert isinstance(update.receivers[0].error, Aborted)
        assert update.receivers[0].error.code == "transport_unsupported"
        assert update.receivers[0].progress == []
        assert device.outstanding() == []
        device.kind = ord("c")
        both.good()


@pytest.mark.case("B113")
@pytest.mark.parametrize(
    ("settings", "environment", "found"),
    [
        (None, {}, False),
        (None, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, True),
        (None, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments : true"}, True),
        (None, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False),
        (None, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, True),
        (
            None,
            {
                "PYTORCH_ALLOC_CONF": "expandable_segments:False",
                "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            },
            False,
        ),
        ({"expandable_segments": True}, {}, True),
        ({"expandable_segments": False}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, False),
        ({"max_split_size": 1}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, True),
    ],
)
def test_what_the_allocator_was_told(
    settings: dict[str, object] | None, environment: dict[str, str], found: bool
) -> None:
    assert expandable_segments(settings, environment) is found


@pytest.mark.case("B115")
def test_another_format_of_handles_is_refused_at_the_hello() -> None:
    trainer, good, old = FakeDevice(newest=3), FakeDevice(newest=3), FakeDevice(newest=2)
    with devices(trainer, good, old) as both:
        update = both.push(seats=seats_for(1, 1))
        assert codes(update) == [("transport_unsupported", "r1", 0)]
        assert trainer._exports == 0  # nothing was exported, nothing opened
        assert (good.opened, old.opened) == (0, 0)
        assert [receiver.progress for receiver in update.receivers] == [[], []]
    with devices(FakeDevice(newest=2), FakeDevice(newest=3)) as both:  # an older trainer is understood
        both.good()


@pytest.mark.case("B115")
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"handle": ""}, "stream_mismatch"),
        ({"handle": "03"}, "stream_mismatch"),
        ({"handle": "0363" + "00" * 63}, "stream_mismatch"),
        ({"handle": "0363" + "00" * 65}, "stream_mismatch"),
        ({"handle": "0378" + "00" * 64}, "stream_mismatch"),
        ({"handle": "0465" + "00" * 64}, "transport_unsupported"),
        ({"handle": "0463" + "00" * 64}, "transport_unsupported"),
        ({"handle": "0063" + "00" * 64}, "transport_unsupported"),
        ({"event": "00" * 63}, "stream_mismatch"),
        ({"counter": b"/../../etc/passwd".hex()}, "stream_mismatch"),
        ({"counter": b"/a\0b".hex()}, "stream_mismatch"),
        ({"counter": ""}, "stream_mismatch"),
        ({"nbytes": 0}, "stream_mismatch"),
        ({"nbytes": 1 << 13}, "stream_mismatch"),
        ({"storage_offset": 1}, "stream_mismatch"),
        ({"storage_offset": 1 << 62}, "stream_mismatch"),
        ({"device": "GPU-9"}, "transport_unsupported"),
    ],
)
def test_a_malformed_handle_never_reaches_the_driver(changes: dict[str, Any], code: str) -> None:
    rank = FakeDevice()
    memory = DeviceMemoryReceiver(rank)
    with refused(code):
        memory.open(descriptor(**changes), ())
    assert rank.opened == 0
    check(descriptor(), 3)


@pytest.mark.case("B117")
def test_devices_are_found_by_uuid_whatever_their_order() -> None:
    trainer, turned = FakeDevice(("GPU-a", "GPU-b")), FakeDevice(("GPU-b", "GPU-a"))
    with devices(trainer, turned) as both:
        both.good()
    assert turned.opened_on == [1, 1]


@pytest.mark.case("B184")
def test_the_senders_number_of_a_device_means_nothing_to_a_receiver() -> None:
    """The trainer's second card is the only one of an actor that Ray gave a single card."""
    trainer, actor = FakeDevice(("GPU-a", "GPU-b"), index=1), FakeDevice(("GPU-b",))
    with devices(trainer, actor) as both:
        both.good()
    assert actor.opened_on == [0, 0]


@pytest.mark.case("B188")
def test_a_rank_whose_visible_list_was_overwritten_is_refused_and_nobody_opens_anything() -> None:
    placed, overwritten = FakeDevice(("GPU-a",)), FakeDevice(("GPU-b",))
    with devices(FakeDevice(("GPU-a",)), placed, overwritten) as both:
        update = both.push()
        assert codes(update) == [("transport_unsupported", "r0", 1)]
        assert all(uuid in str(update.sender_error) for uuid in ("GPU-a", "GPU-b"))
        assert (placed.opened, overwritten.opened) == (0, 0)


@pytest.mark.case("B117")
def test_a_device_that_a_rank_cannot_see_is_refused_with_both_sets() -> None:
    with devices(FakeDevice(("GPU-a", "GPU-b")), FakeDevice(("GPU-c", "GPU-d"))) as both:
        update = both.push()
        assert codes(update) == [("transport_unsupported", "r0", 0)]
        assert all(uuid in str(update.sender_error) for uuid in ("GPU-a", "GPU-b", "GPU-c", "GPU-d"))
    with devices(FakeDevice(), FakeDevice(())) as both:
        update = both.push(deadline_s=0.5)
        assert isinstance(update.receivers[0].error, Aborted)
        assert update.receivers[0].error.code == "transport_unsupported"


@pytest.mark.case("B118")
@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (lambda b: ["rebuild_cuda_tensor", list(b.values())], ""),  # a function and its arguments
        (lambda b: list(b.values()), ""),
        (lambda b: b | {"handle": 3}, "handle"),
        (lambda b: b | {"handle": "not hex"}, "handle"),
        (lambda b: b | {"storage_bytes": "many"}, "storage_bytes"),
        (lambda b: b | {"counter_offset": -1}, "counter_offset"),
        (lambda b: b | {"event_required": 1}, "event_required"),
        (lambda b: {name: value for name, value in b.items() if name != "event"}, "event"),
        (lambda b: b | {"function": "os.system"}, "function"),
        (lambda b: b | {"kind": "pickle"}, ""),
    ],
)
def test_a_handle_message_of_another_shape_names_its_field(spoil: Any, field: str) -> None:
    whole = json.loads(encode(Buffers((descriptor(),))))
    assert isinstance(decode(json.dumps(whole).encode()), Buffers)
    whole["buffers"][0] = spoil(whole["buffers"][0])
    with pytest.raises(wire.WireError) as caught:
        decode(json.dumps(whole).encode())
    assert "buffers.0" in caught.value.where
    assert caught.value.where.endswith(field)


@pytest.mark.case("B118")
def test_a_receiver_refuses_it_and_opens_nothing() -> None:
    rank, sender, plan = FakeDevice(), ScriptedSender("cuda_ipc"), StreamPlan(specs_of(HELD), 4096)
    hub = CudaIpcHub(memory=rank)
    receiving = Receiving(hub, manifest_of(plan.tensors))
    thread = receiving.start(StreamOffer("cuda_ipc", sender.address, sender.session, seats_for(1)), 0)
    sender.meet(plan)
    sender.say(b'{"kind": "buffers", "buffers": [["os.system", ["id"]]]}')
    thread.join(60)
    assert isinstance(receiving.error, Aborted)
    assert (receiving.error.code, rank.opened) == ("stream_mismatch", 0)
    sender.close()
    hub.close()


@pytest.mark.case("B122")
def test_two_consumers_in_one_process_open_and_close_each_its_own() -> None:
    """Neither waits for the other to let go, and what one still reads is not taken away by the other's end."""
    trainer, shared = FakeDevice(), FakeDevice()
    sender, hub = CudaIpcSender(memory=trainer), CudaIpcHub(memory=shared)
    for at in range(3):
        update = Transfer(sender, [hub, hub], HELD, bucket_bytes=4096).run()
        assert (update.sender_error, [r.error for r in update.receivers]) == (None, [None, None]), at
        assert all(digests(receiver.arrived) == digests(HELD) for receiver in update.receivers)
    assert (shared.opened, shared.closed) == (4, 0)
    closing = threading.Thread(target=hub.close)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    gc.collect()
    assert (shared.closed, trainer.outstanding()) == (4, [])
    sender.close()


@pytest.mark.case("B128")
def test_the_smallest_tensors_arrive_as_they_were() -> None:
    small = {f"scale{at}": torch.tensor([1.0 + at, -2.0]) for at in range(20)} | {"one": torch.tensor(3.5)}
    with devices(FakeDevice(), FakeDevice()) as both:
        both.good(small)


@pytest.mark.case("B129")
def test_tensors_of_the_host_are_staged_by_a_copy() -> None:
    """Whatever they lie on, they are packed into the sender's device memory: one transport for all of them."""
    trainer = FakeDevice()
    with devices(trainer, FakeDevice()) as both:
        both.good({"host": HELD["w"].t(), "bias": HELD["scale"]})
    memory = DeviceMemorySender(trainer)
    assert memory.accepts(Hello("s", 0, devices=("GPU-0",), handle_format=3)) is None
