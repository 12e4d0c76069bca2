"""Reload mode over an engine client played by hand: what it proves, what it refuses, and that it never serves doubt."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_adapter.replica.admission import Limits
from engine_adapter.replica.app import ReplicaApp
from engine_adapter.replica.front import Front
from engine_adapter.replica.interfaces import WorkDeadlines
from engine_adapter.replica.lifecycle import STANDALONE, Membership, ReplicaLifecycle
from engine_adapter.testing.fronts import code_of
from engine_adapter.vllm.gate import VllmGate
from engine_adapter.vllm.reload.ranks import NAME, WARNINGS, ReloadControl, ReloadRanks, make_hellos
from transports.disk.manifests import build_manifest, save_manifest, write_manifest
from updater.core.errors import LiveweightsError, Unavailable
from updater.core.participant import (
    DiscardRequest,
    DiskOffer,
    Fence,
    FenceRequest,
    FrontState,
    InvalidateRequest,
    Kind,
    PauseRequest,
    PlanRequest,
    ReleaseTo,
    ResumeRequest,
    SpareState,
    StageRequest,
    StreamOffer,
    VerifyRequest,
)
from updater.core.policy import CachePolicy, InFlight, InstallMode
from updater.protocol.manifest import content_digest
from updater.protocol.model_document import ModelDocument

Tensors = dict[str, torch.Tensor]
CLEAR = ["reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache"]


class HandClient:
    """As much of vLLM's engine client as a front uses. `fail[call]` is raised by it; `never` names a call that does not
    return; `full`: the prefix cache does not clear.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fail: dict[str, Exception] = {}
        self.never = ""
        self.asleep = self.full = False

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        if name.split()[0] in self.fail:
            raise self.fail[name.split()[0]]
        if self.never and name.startswith(self.never):
            await asyncio.get_running_loop().create_future()

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        self.calls.append("generate")
        raise RuntimeError("no caller may get this far")
        yield

    async def collective_rpc(self, method: str, *, kwargs: dict[str, str]) -> list[None]:
        await self._call(f"{method} {Path(kwargs['weights_path']).name}")
        return [None]

    async def is_sleeping(self) -> bool:
        return self.asleep

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False)
        await self._call("pause")

    async def resume_generation(self) -> None:
        await self._call("resume")

    async def update_weight_version(self, version: str) -> None:
        await self._call(f"label {version}")

    async def reset_prefix_cache(self, *, reset_running_requests: bool, reset_connector: bool) -> bool:
        await self._call("reset_prefix_cache")
        return not self.full

    async def reset_mm_cache(self) -> None:
        await self._call("reset_mm_cache")

    async def reset_encoder_cache(self) -> None:
        await self._call("reset_encoder_cache")

    async def abort(self, request_id: str) -> None:
        await self._call(f"abort {request_id}")


def tensors(seed: int) -> Tensors:
    random = torch.Generator().manual_seed(seed)
    table = torch.randn(8, 4, generator=random).to(torch.bfloat16)
    return {
        "model.embed_tokens.weight": table,
        "model.norm.weight": torch.randn(4, generator=random),
        "model.empty": torch.empty(0, 4),
        "lm_head.weight": table.clone(),
    }


def write(folder: Path, held: Tensors, name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    save_file(held, folder / name)
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    return folder


@dataclass
class World:
    home: Path
    client: HandClient = field(default_factory=HandClient)
    reload_s: float = 60.0
    device: str = "cuda"

    def __post_init__(self) -> None:
        self.start, self.second = write(self.home / "start", tensors(1)), write(self.home / "second", tensors(2))
        control = ReloadControl(self.client)
        self.gate = VllmGate(control.abort, Limits(wait_s=0.01))
        self.hellos = make_hellos(2, self.device, ModelDocument(), ("why",))
        roots, deadlines = (str(self.home),), WorkDeadlines(commit_s=60.0)
        self.ranks = ReloadRanks(
            control, self.gate, str(self.start), roots, self.hellos, reload_s=self.reload_s, deadlines=deadlines
        )
        self.face = ReplicaApp("r0", self.gate)
        membership = Membership("r0", "http://r0", str(self.start))
        everything: Any = self.ranks
        self.life = ReplicaLifecycle(membership, everything, self.gate, self.face)

    @property
    def front(self) -> Front:
        assert self.face.front is not None
        return self.face.front

    def fence(self, serial: int = 1, attempt: int = 1) -> Fence:
        return Fence(STANDALONE, 1, serial, attempt, self.life.incarnation)

    def request(self, path: Path | None = None, serial: int = 1, **changes: Any) -> PlanRequest:
        offer = DiskOffer(str(path or self.second))
        base = PlanRequest(
            self.fence(serial, 0),
            Kind.UPDATE,
            "u",
            f"0-{serial}",
            offer,
            "",
            "",
            InFlight.DRAIN,
            CachePolicy.RESET,
            InstallMode.AUTO,
            False,
            (),
            False,
        )
        return replace(base, **changes)

    async def vote(self, path: Path | None = None, serial: int = 1, **changes: Any) -> Any:
        await self.front.ask("plan", self.request(path, serial, **changes))
        await self.front.ask("stage", StageRequest(self.fence(serial, 0), 60.0))
        return await self.front.ask("verify", VerifyRequest(self.fence(serial, 0), 60.0))

    async def pause(self, serial: int = 1) -> Any:
        return await self.front.ask("pause", PauseRequest(self.fence(serial), InFlight.DRAIN, 30.0, 60.0))

    async def install(self, serial: int = 1) -> Any:
        return await self.front.ask("install", FenceRequest(self.fence(serial)))

    async def invalidate(self, serial: int = 1) -> Any:
        return await self.front.ask("invalidate", InvalidateRequest(self.fence(serial), CachePolicy.RESET))

    async def restore(self, serial: int = 1) -> Any:
        return await self.front.ask("restore", FenceRequest(self.fence(serial)))

    async def resume(self, published: bool, digest: str, version: str = "0-1", serial: int = 1) -> Any:
        return await self.front.ask("resume", ResumeRequest(self.fence(serial), published, version, digest))

    async def publish(self, path: Path | None = None, serial: int = 1) -> None:
        vote = await self.vote(path, serial)
        await self.pause(serial)
        await self.install(serial)
        await self.invalidate(serial)
        await self.resume(True, vote.observed, f"0-{serial}", serial)

    def open_files(self) -> list[str]:
        """Of this process, below our folder."""
        links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
        there = [os.readlink(link) for link in links if link.is_symlink()]
        return [path for path in there if path.startswith(str(self.home.resolve()))]

    async def served(self) -> bool:
        """Whether a request reaches the engine."""
        before = len(self.client.calls)
        with pytest.raises((Unavailable, RuntimeError)):
            async for _ in self.gate.gating(self.client.generate)({"prompt_token_ids": [1]}, None, "a"):
                pass
        return self.client.calls[before:] == ["generate"]


def play(home: Path, scene: Callable[[World], Awaitable[None]], *, open_first: bool = True, **changes: Any) -> None:
    async def run() -> None:
        world = World(home, **changes)
        async with asyncio.timeout(120):
            if open_first:
                assert await world.life.start_and_join()
                world.client.calls.clear()
            await scene(world)
            await world.life.stop(5.0)

    asyncio.run(run())


# --- what goes well


def test_before_anybody_is_served_vllm_has_done_once_what_a_publication_asks_of_it(tmp_path: Path) -> None:
    async def scene(w: World) -> None:
        assert not w.gate.is_open
        assert await w.life.start_and_join()
        assert w.client.calls == ["pause", "reload_weights start", "label start", *CLEAR, "resume", "label start"]
        assert (w.front.ready, w.gate.version) == (True, "start")
        about = w.front.describe()
        assert (about.engine, about.capabilities.install, len(about.ranks)) == (NAME, (InstallMode.NONE,), 2)
        assert about.capabilities.notes == ("why", *WARNINGS)
        assert await w.served()

    play(tmp_path, scene, open_first=False)


def test_a_publication_pauses_reloads_labels_clears_and_resumes(tmp_path: Path) -> None:
    async def scene(w: World) -> None:
        plan = await w.front.ask("plan", w.request())
        assert (plan.install, plan.tensors, plan.warnings[:3]) == (InstallMode.NONE, 4, ("why", *WARNINGS))
        stage = await w.front.ask("stage", StageRequest(w.fence(1, 0), 60.0))
        assert stage.bytes_read == plan.bytes_to_read == sum(tensor.nbytes for tensor in tensors(2).values())
        vote = await w.front.ask("verify", VerifyRequest(w.fence(1, 0), 60.0))
        assert (vote.proof, vote.tensors_changed) == ("structure_only", 3)
        assert w.client.calls == []
        paused = await w.pause()
        assert (paused.staged_serial, paused.staged_digest) == (1, vote.observed)
        await w.install()
        await w.invalidate()
        assert not w.front.ready
        await w.resume(True, vote.observed)
        await w.front.idle()
        assert w.client.calls == ["pause", "reload_weights second", "label 0-1", *CLEAR, "resume"]
        assert (w.front.ready, w.gate.version, w.gate.namespace) == (True, "0-1", f"0-1:{vote.observed}")
        assert w.front.status().spare.state is SpareState.EMPTY
        assert w.open_files() == []

    play(tmp_path, scene)


@pytest.mark.parametrize("with_manifest", [False, True])
def test_the_observed_digest_is_that_of_every_other_member(tmp_path: Path, with_manifest: bool) -> None:
    """A copy that the model ties to another tensor is no part of it, as with ranks of ours."""

    async def scene(w: World) -> None:
        manifest = write_manifest(str(w.second)) if with_manifest else build_manifest(str(w.second))
        assert [alias for alias, _ in manifest.ties] == ["lm_head.weight"]
        vote = await w.vote()
        assert vote.observed == content_digest(e for e in manifest.tensors if e.name != "lm_head.weight")

    play(tmp_path, scene)


def test_a_large_tensor_is_digested_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(w: World) -> None:
        whole = await w.vote()
        monkeypatch.setattr("engine_adapter.vllm.reload.source._PIECE_BYTES", 16)
        assert (await w.vote(serial=2)).observed == whole.observed

    play(tmp_path, scene)


# --- what is refused before anything pauses


def without(name: str) -> Callable[[Tensors], None]:
    def drop(held: Tensors) -> None:
        del held[name]

    return drop


def changed(name: str, tensor: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda held: held.update({name: tensor})


def wrapped(held: Tensors) -> None:
    held["module.model.norm.weight"] = held.pop("model.norm.weight")


@pytest.mark.parametrize(
    ("alter", "codes"),
    [
        (without("model.norm.weight"), {("tensor_missing", "model.norm.weight")}),
        (changed("extra", torch.ones(1)), {("tensor_unexpected", "extra")}),
        (changed("model.norm.weight", torch.ones(5)), {("tensor_shape", "model.norm.weight")}),
        (changed("model.norm.weight", torch.ones(4).half()), {("tensor_dtype", "model.norm.weight")}),
        # Ranks of ours would take the wrapper off; vLLM's loader does not.
        (wrapped, {("tensor_missing", "model.norm.weight"), ("tensor_unexpected", "module.model.norm.weight")}),
    ],
)
def test_tensors_unlike_those_of_the_start_are_refused(tmp_path: Path, alter: Any, codes: set[Any]) -> None:
    async def scene(w: World) -> None:
        held = tensors(2)
        alter(held)
        with pytest.raises(LiveweightsError) as caught:
            await w.front.ask("plan", w.request(write(tmp_path / "altered", held)))
        assert {(failure.code, failure.tensor) for failure in caught.value.failures} == codes
        assert (w.client.calls, w.open_files(), w.front.ready) == ([], [], True)

    play(tmp_path, scene)


def single_file(folder: Path) -> Path:
    return folder / "model.safetensors"


def another_index(folder: Path) -> Path:
    """An index that vLLM does not look for, beside a file that it therefore would read."""
    index = {"weight_map": dict.fromkeys(tensors(2), "model.safetensors")}
    (folder / "other.safetensors.index.json").write_text(json.dumps(index))
    save_file({"extra": torch.ones(1)}, folder / "extra.safetensors")
    return folder


def consolidated(folder: Path) -> Path:
    return write(folder, {}, "consolidated.safetensors")


def outside(folder: Path) -> Path:
    return folder.parent.parent


@pytest.mark.parametrize(
    ("offered", "code"),
    [
        (single_file, "mode_unsupported"),
        (another_index, "index_mismatch"),
        (consolidated, "index_mismatch"),
        (outside, "source_outside_roots"),
    ],
)
def test_folders_that_vllm_would_read_differently_are_refused(tmp_path: Path, offered: Any, code: str) -> None:
    async def scene(w: World) -> None:
        assert await code_of(w.front.ask("plan", w.request(offered(w.second)))) == code
        assert (w.client.calls, w.open_files()) == ([], [])

    play(tmp_path, scene)


def test_an_index_that_vllm_looks_for_may_leave_files_out(tmp_path: Path) -> None:
    async def scene(w: World) -> None:
        another_index(w.second)
        (w.second / "other.safetensors.index.json").rename(w.second / "model.safetensors.index.json")
        assert (await w.vote()).observed == (await w.vote(write(tmp_path / "same", tensors(2)), 2)).observed

    play(tmp_path, scene)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"offer": StreamOffer("broadcast", "127.0.0.1:1", "s")}, "transport_unsupported"),
        ({"in_flight": InFlight.RECOMPUTE}, "mode_unsupported"),
        ({"cache": CachePolicy.NAMESPACE}, "mode_unsupported"),
        ({"install": InstallMode.FLIP}, "mode_unsupported"),
        ({"require_digests": True}, "mode_unsupported"),
        ({"kind": Kind.ROLLBACK, "offer": None}, "no_rollback"),
    ],
)
def test_what_needs_ranks_of_ours_is_refused(tmp_path: Path, changes: dict[str, Any], code: str) -> None:
    async def scene(w: World) -> None:
        assert await code_of(w.ranks.plan(w.request(**changes))) == code
        assert w.client.calls == []

    play(tmp_path, scene)


def test_bytes_that_are_not_what_the_manifest_promises_are_refused(tmp_path: Path) -> None:
    async def scene(w: World) -> None:
        manifest = build_manifest(str(w.start))
        save_manifest(replace(manifest, config_hash=""), str(w.second))
        await w.front.ask("plan", w.request())
        with pytest.raises(LiveweightsError) as caught:
            await w.front.ask("stage", StageRequest(w.fence(1, 0), 60.0))
        failures = {(failure.code, failure.tensor) for failure in caught.value.failures}
        assert failures == {("tensor_digest", name) for name in tensors(2) if name != "model.empty"}

    play(tmp_path, scene)


def test_bytes_that_no_model_can_use_are_refused_unless_the_policy_allows_them(tmp_path: Path) -> None:
    async def scene(w: World) -> None:
        held = tensors(2)
        held["model.norm.weight"][1] = float("nan")
        spoiled = write(tmp_path / "nan", held)
        assert await code_of(w.vote(spoiled)) == "tensor_nonfinite"
        await w.vote(spoiled, 2, allow_nonfinite=True)
        held = tensors(2)
        held["lm_head.weight"][0, 0] += 1
        assert await code_of(w.vote(write(tmp_path / "untied", held), 3)) == "tensor_digest"

    play(tmp_path, scene)


@pytest.mark.case("F05")
def test_a_tensor_without_a_normal_number_is_refused_unless_the_live_one_has_none_either(tmp_path: Path) -> None:
    async def scene(w: World) -> None:
        held = tensors(2)
        table = "model.embed_tokens.weight"
        held |= {name: torch.zeros_like(held[name]) for name in (table, "lm_head.weight")}
        blank = write(tmp_path / "blank", held)
        assert await code_of(w.vote(blank)) == "tensor_suspicious"
        assert await code_of(w.vote(blank, 2, allow_suspicious=("lm_head.*",))) == "tensor_suspicious"
        reply = await w.vote(blank, 3, allow_suspicious=("*",))
        assert any(table in line.split() for line in reply.warnings)
        await w.vote(blank, 4, kind=Kind.CATCH_UP)
        save_manifest(build_manifest(str(blank)), str(blank))
        assert any(table in line.split() for line in (await w.vote(blank, 5)).warnings)

    play(tmp_path, scene)


def test_a_staging_that_was_given_up_ends_and_lets_its_files_go(tmp_path: Path) -> None:
    async def scene(w: World) -> None:
        await w.ranks.plan(w.request())
        w.ranks.cancel(1)
        assert await code_of(w.ranks.stage(StageRequest(w.fence(1, 0), 60.0))) == "client_abort"
        await w.ranks.discard(1)
        assert w.open_files() == []
        assert await code_of(w.ranks.plan(w.request())) == "client_abort"
        assert w.open_files() == []

    play(tmp_path, scene)


# --- around the pause


@pytest.mark.parametrize(("spoil", "code"), [(Path.unlink, "source_missing"), (Path.touch, "source_changed")])
def test_a_source_that_is_not_what_was_verified_is_not_reloaded(tmp_path: Path, spoil: Any, code: str) -> None:
    async def scene(w: World) -> None:
        await w.vote()
        spoil(w.second / "model.safetensors")
        assert await code_of(w.pause()) == code
        await w.front.ask("discard", DiscardRequest(w.fence()))
        assert (w.front.ready, w.client.calls, w.open_files()) == (True, [], [])
        assert await w.served()

    play(tmp_path, scene)


def test_an_engine_that_sleeps_is_not_touched(tmp_path: Path) -> None:
    async def scene(w: World) -> None:
        await w.vote()
        w.client.asleep = True
        assert await code_of(w.pause()) == "replica_asleep"
        await w.resume(False, w.front.state.live.digest)
        assert (w.front.ready, w.client.calls) == (True, [])

    play(tmp_path, scene)


def test_a_pause_that_leads_to_no_installation_reopens_on_the_old_version(tmp_path: Path) -> None:
    async def scene(w: World) -> None:
        await w.vote()
        await w.pause()
        await w.resume(False, w.front.state.live.digest)
        await w.restore()
        assert (w.front.ready, w.gate.version, w.client.calls) == (True, "start", ["pause", "resume"])
        assert w.open_files() == []

    play(tmp_path, scene)


# --- fail-stop


def fails(call: str) -> Callable[[World], None]:
    return lambda w: w.client.fail.update({call: RuntimeError("told to")})


def touches(w: World) -> None:
    """The files change while vLLM reads them."""

    class Touching(HandClient):
        async def _call(self, name: str) -> None:
            await super()._call(name)
            if name.startswith("reload_weights"):
                (w.second / "model.safetensors").touch()

    w.client.__class__ = Touching


def stalls(w: World) -> None:
    w.client.never = "reload_weights"


@pytest.mark.parametrize(
    ("spoil", "code", "reload_s"),
    [
        (fails("reload_weights"), "rank_failed", 60.0),
        (fails("label"), "rank_failed", 60.0),
        (touches, "source_changed", 60.0),
        (stalls, "phase_timeout", 0.05),
    ],
)
def test_an_installation_that_fails_leaves_the_replica_shut_for_good(
    tmp_path: Path, spoil: Any, code: str, reload_s: float
) -> None:
    async def scene(w: World) -> None:
        await w.vote()
        await w.pause()
        spoil(w)
        assert await code_of(w.install()) == code
        assert not await w.served()
        await in_doubt(w)

    play(tmp_path, scene, reload_s=reload_s)


async def in_doubt(w: World) -> None:
    """A restore quarantines it, and nothing lets a request through to the engine any more."""
    assert await code_of(w.restore()) == "no_rollback"
    assert w.front.status().state is FrontState.QUARANTINED
    assert (w.front.ready, w.gate.is_open, await w.served()) == (False, False, False)
    assert await code_of(w.front.readmit()) == "mode_unsupported"
    digest = w.front.state.live.digest
    assert await code_of(w.resume(False, digest)) == "mode_unsupported"  # what was said last: it is out of service
    assert await code_of(w.ranks.resume(ResumeRequest(w.fence(), False, "start", digest))) == "no_rollback"
    assert "resume" not in w.client.calls
    assert (w.front.ready, await w.served(), w.open_files()) == (False, False, [])


def test_caches_that_do_not_clear_are_no_publication(tmp_path: Path) -> None:
    async def scene(w: World) -> None:
        await w.vote()
        await w.pause()
        await w.install()
        w.client.full = True
        assert await code_of(w.invalidate()) == "cache_not_reset"
        await in_doubt(w)

    play(tmp_path, scene)


def test_an_installation_that_is_to_be_taken_back_for_anothers_sake_cannot_be(tmp_path: Path) -> None:
    async def scene(w: World) -> None:
        await w.vote()
        await w.pause()
        await w.install()
        await w.invalidate()
        await in_doubt(w)

    play(tmp_path, scene)


@pytest.mark.parametrize("to", ReleaseTo)
def test_an_operator_cannot_release_what_nobody_has_verified(tmp_path: Path, to: ReleaseTo) -> None:
    async def scene(w: World) -> None:
        await w.vote()
        await w.pause()
        await w.install()
        await w.invalidate()
        w.front.state = replace(w.front.state, heard=w.front.state.heard - 1000.0)
        code = await code_of(w.front.release(to))
        assert code == ("mode_unsupported" if to is ReleaseTo.LIVE else "no_rollback")
        assert (w.front.ready, await w.served(), "resume" in w.client.calls) == (False, False, False)

    play(tmp_path, scene)


@pytest.mark.parametrize("call", ["pause", "reload_weights", "label", "reset_mm_cache", "resume"])
def test_a_release_that_cannot_do_it_at_the_start_serves_nobody(tmp_path: Path, call: str) -> None:
    async def scene(w: World) -> None:
        fails(call)(w)
        assert not await w.life.start_and_join()
        assert w.face.failure is not None
        assert w.face.failure.code == "rank_failed"
        assert not await w.served()

    play(tmp_path, scene, open_first=False)


@pytest.mark.parametrize(
    ("extra", "tied", "refused"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"model.layers.0.mlp.experts.0.w1.weight": torch.ones(2)}, False, True),
    ],
)
def test_models_of_which_vllm_keeps_packed_kernels_on_cpu_are_refused(
    tmp_path: Path, extra: Tensors, tied: bool, refused: bool
) -> None:
    """Seen with vLLM 0.32: the reload succeeds, and the tokens are of neither checkpoint."""

    async def scene(w: World) -> None:
        write(w.start, tensors(1) | extra)
        (w.start / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
        assert await w.life.start_and_join() is not refused
        failure = w.face.failure
        assert (failure is not None and failure.code == "adapter_unsupported") is refused
        assert await w.served() is not refused

    play(tmp_path, scene, open_first=False, device="cpu")


def test_publications_follow_each_other_and_leave_nothing_behind(tmp_path: Path) -> None:
    async def scene(w: World) -> None:
        before = threading.active_count()
        for serial, path in enumerate((w.second, w.start, w.second), start=1):
            held = load_file(path / "model.safetensors")
            await w.publish(path, serial)
            await w.front.idle()
            assert (w.gate.version, w.open_files()) == (f"0-{serial}", [])
            assert len(held) == 4
        assert [call for call in w.client.calls if call.startswith("reload")] == [
            "reload_weights second",
            "reload_weights start",
            "reload_weights second",
        ]
        assert threading.active_count() <= before + 2

    play(tmp_path, scene)
