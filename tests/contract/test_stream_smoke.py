"""Some tests of the stream suite over shared memory and over broadcast, fast enough for `make check`.

The whole suite is `slow` together: `make test` runs it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from transports.broadcast import BroadcastHub, BroadcastSender
from transports.shared_memory import SharedMemoryHub, SharedMemorySender
from transports.testing.stream_contract import StreamContract


class OverSharedMemory(StreamContract):
    def sender(self) -> SharedMemorySender:
        return SharedMemorySender()

    def hub(self, stall_s: float) -> SharedMemoryHub:
        return SharedMemoryHub(patience_s=stall_s)


class OverBroadcast(StreamContract):
    def sender(self) -> BroadcastSender:
        return BroadcastSender()

    def hub(self, stall_s: float) -> BroadcastHub:
        return BroadcastHub(patience_s=stall_s)


@pytest.mark.parametrize("suite", [OverSharedMemory(), OverBroadcast()], ids=["shared_memory", "broadcast"])
class TestSmoke:
    def test_every_rank_of_every_replica_gets_everything(self, suite: StreamContract) -> None:
        suite.test_every_rank_of_every_replica_gets_everything()

    def test_updates_follow_one_another(self, suite: StreamContract) -> None:
        suite.test_updates_follow_one_another()

    def test_a_receiver_that_fails_is_named(self, suite: StreamContract) -> None:
        suite.test_a_receiver_that_fails_is_named()

    def test_what_is_sent_arrives(self, suite: StreamContract, tmp_path: Path) -> None:
        suite.test_what_is_sent_arrives(tmp_path)

    def test_damage_is_refused_or_shows_in_the_digest(self, suite: StreamContract, tmp_path: Path) -> None:
        suite.test_damage_is_refused_or_shows_in_the_digest(tmp_path)
