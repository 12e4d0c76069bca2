"""The suite that every rank engine has to pass, in real rank processes. Needs pytest.

An engine is done when a short subclass is green:

```python
class TestMyEngine(EngineContract):
    factory = "my.package:build"
    size = 2

    @classmethod
    def checkpoint(cls, folder, seed): ...
    @classmethod
    def reference(cls, folder, prompt, tokens): ...
```
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from safetensors.torch import load_file, save_file

from engine_adapter.testing.harness import HarnessReply, RankHarness, StagedVote
from transports.digest import tensor_digest, to_hex
from transports.dtypes import DTYPE_NAMES
from updater.core.errors import LiveweightsError
from updater.core.policy import CachePolicy, InstallMode
from updater.protocol.manifest import TensorEntry, content_digest

_TOKENS = 12


class EngineContract:
    """Set the class attributes and override `checkpoint` and `reference`; the rest may stay.

    One replica serves all tests of a class: each begins with whatever version the one before it left.
    """

    factory: ClassVar[str]
    size: ClassVar[int] = 1
    options: ClassVar[Mapping[str, str | int | float | bool]] = {}
    modes: ClassVar[tuple[InstallMode, ...]] = (InstallMode.FLIP, InstallMode.EXCHANGE)
    #: Whether a repeated prompt is answered with cached tokens.
    prefix_cache: ClassVar[bool] = True
    prompt: ClassVar[tuple[int, ...]] = tuple(range(40, 61))

    @classmethod
    def checkpoint(cls, folder: Path, seed: int) -> Path:
        """Write the checkpoint of `seed` into `folder`: same shapes for all seeds, other values for each."""
        raise NotImplementedError

    @classmethod
    def reference(cls, folder: Path, prompt: Sequence[int], tokens: int) -> tuple[int, ...]:
        """What greedy generation must give, made without the engine."""
        raise NotImplementedError

    @classmethod
    def expected(cls, folder: Path, rank: int) -> dict[str, str] | None:
        """Parameter name -> parameter digest on `rank`, by a slicer that shares no code with the placement, or None."""
        return None

    # ----- fixtures

    @pytest.fixture(scope="class")
    @classmethod
    def folders(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
        """Checkpoints by seed: 7 is the start, 8 and 9 are pushed."""
        home = tmp_path_factory.mktemp("checkpoints")
        return {seed: cls.checkpoint(home / str(seed), seed) for seed in (7, 8, 9)}

    @pytest.fixture(scope="class")
    @classmethod
    def replica(cls, folders: dict[int, Path]) -> Iterator[RankHarness]:
        with RankHarness(cls.factory, folders[7], cls.size, cls.options) as replica:
            yield replica

    # ----- placement

    def test_the_start_checkpoint_replays_to_the_live_bytes(
        self, replica: RankHarness, folders: dict[int, Path]
    ) -> None:
        assert replica.joined is not None
        assert [vote.changed for vote in replica.joined.votes] == [()] * self.size
        assert replica.joined.digest == observed_digest(folders[7], replica.joined)

    def test_every_source_element_is_read_and_every_parameter_voted(self, replica: RankHarness) -> None:
        joined = replica.joined
        assert joined is not None
        names = {tensor.name for tensor in joined.plans[0].tensors}
        assert set(joined.combined.digests) == names
        assert all({boxes.name for boxes in plan.boxes} <= names for plan in joined.plans)
        assert [vote.parameters for vote in joined.votes] == [len(rank) for rank in replica.digests()]

    def test_a_missing_tensor_is_named_and_nothing_is_spent(
        self, replica: RankHarness, folders: dict[int, Path], tmp_path: Path
    ) -> None:
        before, spares = replica.digests(), [status.spare_state for status in replica.status()]
        name = copy_without_one(folders[8], tmp_path)
        with pytest.raises(LiveweightsError) as refused:
            replica.plan(tmp_path)
        # An engine that knows several spellings of a prefix may name another one than the checkpoint's.
        tail = name[name.index("layers.") :]
        assert {(failure.code, failure.tensor.endswith(tail)) for failure in refused.value.failures} == {
            ("tensor_missing", True)
        }
        assert replica.digests() == before
        assert [status.spare_state for status in replica.status()] == spares
        assert replica.generate(self.prompt, 2).versions == [replica.version] * 2

    # ----- updates

    def test_start_weights_give_the_reference_tokens(self, replica: RankHarness, folders: dict[int, Path]) -> None:
        self.serves(replica, folders[7], "start")

    @pytest.mark.parametrize("mode", [InstallMode.FLIP, InstallMode.EXCHANGE])
    def test_an_update_gives_the_new_tokens_and_a_rollback_the_old_ones(
        self, replica: RankHarness, folders: dict[int, Path], mode: InstallMode
    ) -> None:
        if mode not in self.modes:
            pytest.skip(f"this engine does not install by {mode.value}")
        replica.publish(folders[7], f"{mode.value}-7", mode=mode)
        before = replica.digests()
        staged = replica.stage(folders[8])
        assert staged.digest == observed_digest(folders[8], staged)
        self.serves(replica, folders[7], f"{mode.value}-7")  # staging touches nothing that serves
        replica.switch(staged.serial, f"{mode.value}-8", staged.digest, mode, CachePolicy.RESET)
        self.serves(replica, folders[8], f"{mode.value}-8")
        after = replica.digests()
        assert [rank for rank in range(self.size) if after[rank] == before[rank]] == []
        self.holds(replica, folders[8])
        replica.rollback(mode)
        self.serves(replica, folders[7], f"{mode.value}-7")
        assert replica.digests() == before

    def test_restore_after_install_gives_the_old_tokens_and_may_be_repeated(
        self, replica: RankHarness, folders: dict[int, Path]
    ) -> None:
        replica.publish(folders[7], "restore-7")
        before, staged = replica.digests(), replica.stage(folders[9])
        replica.pause(staged.serial)
        for _ in range(2):
            replica.install(staged.serial, "restore-9", staged.digest)
        assert replica.digests() != before
        for _ in range(2):
            replica.restore(staged.serial)
        replica.resume(staged.serial)
        assert replica.digests() == before
        self.serves(replica, folders[7], "restore-7")
        replica.discard(staged.serial)

    def test_equal_bytes_three_times_change_nothing(self, replica: RankHarness, folders: dict[int, Path]) -> None:
        replica.publish(folders[8], "again-0")
        before = replica.digests()
        for time in (1, 2, 3):
            staged = replica.publish(folders[8], f"again-{time}")
            assert staged.combined.changed == 0
            assert replica.digests() == before
            self.serves(replica, folders[8], f"again-{time}")

    def test_updates_leave_memory_threads_and_descriptors_as_they_were(
        self, replica: RankHarness, folders: dict[int, Path]
    ) -> None:
        replica.publish(folders[8], "flat-0")
        replica.publish(folders[9], "flat-1")
        before = at_rest(replica)
        spare = [status.spare_bytes for status in replica.status()]
        for time in range(2, 6):
            replica.publish(folders[8 + time % 2], f"flat-{time}")
        assert [status.spare_bytes for status in replica.status()] == spare
        after = at_rest(replica)
        assert [counts[:2] for counts in after] == [counts[:2] for counts in before]
        assert all(new[2] - old[2] < 32 * 2**20 for new, old in zip(after, before, strict=True))

    # ----- pausing

    def test_all_ranks_stop_at_one_step_and_stay_there(self, replica: RankHarness, folders: dict[int, Path]) -> None:
        replica.publish(folders[7], "pause-7")
        staged = replica.stage(folders[8])
        running = [replica.submit(self.prompt[shift:], 16) for shift in range(3)]
        replica.wait(running[0], 2)
        first = replica.pause(staged.serial)
        again = replica.pause(staged.serial)
        assert len({(reply.step, reply.running) for reply in [*first, *again]}) == 1
        counts = [len(replica.replies[request].tokens) for request in running]
        for _ in range(8):  # every parameter read over and over: long enough for a loop that did not stop to go on
            replica.digests()
        assert [len(replica.replies[request].tokens) for request in running] == counts
        replica.resume(staged.serial)
        for shift, request in enumerate(running):
            reply = replica.wait(request)
            assert tuple(reply.tokens) == self.reference(folders[7], self.prompt[shift:], 16)
            assert set(reply.versions) == {"pause-7"}
        replica.discard(staged.serial)

    def test_a_cancelled_request_ends_with_what_it_has(self, replica: RankHarness) -> None:
        while True:
            request = replica.submit(self.prompt, 200)
            replica.wait(request, 1)
            replica.pause(0)  # or it may have ended by itself before it is cancelled
            if len(replica.replies[request].tokens) < 190:
                break
            replica.resume(0)
        replica.cancel(request)
        replica.resume(0)
        reply = replica.wait(request)
        assert reply.finish_reason == "abort"
        assert 1 <= len(reply.tokens) < 200

    # ----- caches

    def test_a_reset_leaves_no_cached_token_of_the_old_weights(
        self, replica: RankHarness, folders: dict[int, Path]
    ) -> None:
        replica.publish(folders[7], "cache-7")
        for _ in range(2):
            warm = replica.generate(self.prompt, _TOKENS)
        assert (warm.cached_tokens > 0) is self.prefix_cache
        staged = replica.stage(folders[8])
        replica.pause(staged.serial)
        replica.install(staged.serial, "cache-8", staged.digest)
        tiers = replica.invalidate(staged.serial)
        assert bool(tiers) is self.prefix_cache
        assert all(tier.cleared for tier in tiers)
        replica.resume(staged.serial)
        replica.version, replica.digest, replica.previous = "cache-8", staged.digest, ("cache-7", replica.digest)
        cold = replica.generate(self.prompt, _TOKENS)
        assert cold.cached_tokens == 0
        assert tuple(cold.tokens) == self.reference(folders[8], self.prompt, _TOKENS)

    def test_no_rank_died(self, replica: RankHarness) -> None:
        assert replica.deaths == []
        assert len(replica.status()) == self.size

    # ----- helpers

    def serves(self, replica: RankHarness, folder: Path, version: str) -> HarnessReply:
        """A fresh answer is the reference's, and every token carries the label."""
        reply = replica.generate(self.prompt, _TOKENS)
        assert tuple(reply.tokens) == self.reference(folder, self.prompt, _TOKENS)
        assert set(reply.versions) == {version}
        return reply

    def holds(self, replica: RankHarness, folder: Path) -> None:
        """Every rank holds what an independent slicer says, where the engine brings one."""
        for rank, digests in enumerate(replica.digests()):
            expected = self.expected(folder, rank)
            assert expected is None or digests == expected


def observed_digest(folder: Path, staged: StagedVote) -> str:
    """Content digest of the tensors that were planned, from the files alone."""
    aliases = {alias for alias, _ in staged.plans[0].redundant}
    planned = {tensor.name for tensor in staged.plans[0].tensors} - aliases
    entries = []
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if name in planned:
                digest = to_hex(tensor_digest(tensor))
                entries.append(TensorEntry(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), digest))
    return content_digest(entries)


def copy_without_one(folder: Path, to: Path) -> str:
    """Copy a checkpoint of one file, without the last of its norms. Returns the name that is gone."""
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (to / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    gone = max(name for name in tensors if "post_attention_layernorm" in name)
    del tensors[gone]
    save_file(tensors, to / "model.safetensors")
    return gone


def at_rest(replica: RankHarness) -> list[tuple[int, int, int]]:
    """`held` of every rank. A thread that has ended is counted for a moment longer, so it is asked until it is gone."""
    counts = [held(pid) for pid in replica.pids]
    while True:
        replica.digests()
        again = [held(pid) for pid in replica.pids]
        if [each[:2] for each in again] == [each[:2] for each in counts]:
            return again
        counts = again


def held(pid: int) -> tuple[int, int, int]:
    """Threads, open descriptors and resident bytes of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    threads, resident = (int(re.findall(rf"{key}:\s+(\d+)", status)[0]) for key in ("Threads", "VmRSS"))
    return threads, len(os.listdir(f"/proc/{pid}/fd")), resident * 1024
