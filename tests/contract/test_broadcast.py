"""What only a group shows: backends, devices, and when a bucket is posted."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from transports.broadcast import BroadcastHub, BroadcastSender
from transports.buckets import Chunk
from transports.media.gloo import GlooGroup
from transports.media.nccl import refuse_shared_devices
from transports.media.work import CollectiveWork
from transports.testing import refused
from transports.testing.source_contract import noise
from transports.testing.transfer import HeldSender, Transfer, seats_for
from updater.core.participant import StreamOffer

pytestmark = pytest.mark.slow  # together, not each


def test_a_backend_that_cannot_be_had_is_refused() -> None:
    with refused("transport_unsupported"):
        BroadcastSender(backend="carrier pigeon")  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        with refused("transport_unsupported"):
            BroadcastSender(backend="nccl")


@pytest.mark.case("F27")
def test_two_ranks_on_one_device_are_refused_for_nccl() -> None:
    offer = StreamOffer("broadcast", "127.0.0.1:1", "session", seats_for(2, 1))
    refuse_shared_devices(offer, "GPU-0", {0: "GPU-1", 1: "GPU-2", 2: "GPU-3"})
    with refused("transport_unsupported") as caught:
        refuse_shared_devices(offer, "GPU-0", {0: "GPU-1", 1: "GPU-0", 2: "GPU-1"})
    assert [(each.replica, each.rank) for each in caught[0].failures] == [("r0", 0), ("r0", 1), ("r1", 0)]
    assert "cuda_ipc" in caught[0].hint
    with refused("transport_unsupported"):
        refuse_shared_devices(offer, "GPU-0", {0: "GPU-1", 1: "", 2: "GPU-2"})


def model_of(buckets: int) -> dict[str, torch.Tensor]:
    """Tensors that fill a bucket of a kilobyte each."""
    return {f"t{at}": noise("BF16", (8, 64), at) for at in range(buckets)}


class Counting(GlooGroup):
    posted = 0

    def broadcast(self, data: torch.Tensor, notify: Callable[[], None]) -> CollectiveWork:
        type(self).posted += 1
        return super().broadcast(data, notify)


def test_nothing_is_posted_before_everybody_has_room() -> None:
    """One receiver stands still at the third bucket: the next one is under way, and no more are posted."""
    sender, hubs = BroadcastSender(make_group=Counting), [BroadcastHub(30.0), BroadcastHub(30.0)]
    held = HeldSender(sender, 4, then_s=0.5)  # patient until only the one that stands still has anything to do
    still, go_on, seen = threading.Event(), threading.Event(), []

    def stand_still(chunk: Chunk, _data: torch.Tensor) -> None:
        if chunk.name == "t2":
            still.set()
            go_on.wait(60)

    try:
        update = Transfer(held, hubs, model_of(8), bucket_bytes=1024)
        update.receivers[1].take = stand_still
        update.start()
        assert still.wait(60)
        held.release.set()
        update.join_sender()  # until its deadline
        seen.append(Counting.posted)
        go_on.set()
        update.join()
        assert seen == [4]
    finally:
        for end in (sender, *hubs):
            end.close()
