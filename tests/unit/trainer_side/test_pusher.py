"""`push`: the folder, the request, and which folders of earlier pushes may go."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trainer_side import push, push_async
from trainer_side.publishing import disk
from trainer_side.testing import FakeCoordinator
from transports.digest import tensor_digest, to_hex
from updater.core.errors import Rejected
from updater.core.policy import InFlight, Policy
from updater.core.version import Version
from updater.protocol.manifest import FILE_NAME, Manifest


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    with FakeCoordinator().serving() as running:
        yield running


def weights(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((4,), value)}


def test_a_state_dict_becomes_a_folder_and_an_update(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    receipt = push(weights(), 7, url=coordinator.url, token="", directory=tmp_path)
    assert receipt.version == "0-7"
    (body,) = coordinator.bodies
    assert body["path"] == str((tmp_path / "0-7").resolve())
    assert body["version"] == 7
    assert "policy" not in body
    assert torch.equal(load_file(tmp_path / "0-7" / "model.safetensors")["w"], torch.ones(4))
    assert (tmp_path / "0-7" / FILE_NAME).is_file()


def test_a_bare_step_belongs_to_the_live_run(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    coordinator.live = "2-5"
    push(weights(), 7, url=coordinator.url, token="", directory=tmp_path)
    push(weights(), 1, url=coordinator.url, token="", directory=tmp_path, policy=Policy(new_run=True))
    coordinator.live = None
    push(weights(), 0, url=coordinator.url, token="", directory=tmp_path)
    assert [Path(body["path"]).name for body in coordinator.bodies] == ["2-7", "3-1", "0-0"]


def test_versions_are_spelt_as_the_api_wants(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    for version in ("1-2", Version(1, 3), 4):
        push(weights(), version, url=coordinator.url, token="", directory=tmp_path)
    assert [body["version"] for body in coordinator.bodies] == ["1-2", "1-3", 4]


def test_a_version_that_is_none_is_refused_before_anything_is_written(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    with pytest.raises(Rejected):
        push(weights(), "v7", url=coordinator.url, token="", directory=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert coordinator.bodies == []


def test_only_what_differs_from_the_defaults_is_sent(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    policy = Policy(in_flight=InFlight.ABORT, allow_narrowing=(("F32", "BF16"),))
    push(weights(), 7, url=coordinator.url, token="", directory=tmp_path, policy=policy, id="mine")
    assert coordinator.bodies[0]["policy"] == {"in_flight": "abort", "allow_narrowing": [["F32", "BF16"]]}
    assert coordinator.bodies[0]["id"] == "mine"


@pytest.mark.case("F06")
def test_a_folder_is_pushed_as_it_lies(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    push(tmp_path / "link", 7, url=coordinator.url, token="")
    assert coordinator.bodies[0]["path"] == str(folder.resolve())
    assert "id" not in coordinator.bodies[0]  # the coordinator's own: `run-step`
    assert list(folder.iterdir()) == []


def test_a_folder_that_is_not_there_is_refused(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    with pytest.raises(Rejected) as caught:
        push(tmp_path / "none", 7, url=coordinator.url, token="")
    assert caught.value.code == "source_missing"


def test_a_repaired_version_does_not_write_over_the_refused_one(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    push(weights(1.0), 7, url=coordinator.url, token="", directory=tmp_path)
    push(weights(2.0), 7, url=coordinator.url, token="", directory=tmp_path)
    assert [Path(body["path"]).name for body in coordinator.bodies] == ["0-7", "0-7.2"]
    assert torch.equal(load_file(tmp_path / "0-7" / "model.safetensors")["w"], torch.ones(4))
    assert coordinator.bodies[0]["id"] != coordinator.bodies[1]["id"]


@pytest.mark.case("B035")
def test_the_async_push_copies_before_it_returns(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    given = weights(1.0)
    publishing = push_async(given, 7, url=coordinator.url, token="", directory=tmp_path)
    given["w"].add_(1)
    assert asyncio.run(publishing).outcome == "committed"
    assert torch.equal(load_file(tmp_path / "0-7" / "model.safetensors")["w"], torch.ones(4))


@pytest.mark.case("B202")
def test_pushes_inside_a_running_event_loop(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    """As in a notebook: the blocking call, one in a thread, the asynchronous one."""

    def pushed(step: int) -> str:
        return push(weights(), step, url=coordinator.url, token="", directory=tmp_path).outcome

    async def notebook() -> list[str]:
        first = pushed(1)
        second = await asyncio.to_thread(pushed, 2)
        third = await push_async(weights(), 3, url=coordinator.url, token="", directory=tmp_path)
        return [first, second, third.outcome, pushed(4)]

    assert asyncio.run(notebook()) == ["committed"] * 4
    assert [body["version"] for body in coordinator.bodies] == [1, 2, 3, 4]


def test_old_folders_go_after_the_push_but_never_what_is_needed(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    coordinator.needed = [str(tmp_path / "0-1")]
    for step in range(1, 6):
        push(weights(), step, url=coordinator.url, token="", directory=tmp_path, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-1", "0-4", "0-5"]


def test_a_coordinator_that_cannot_say_what_it_needs_keeps_everything(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    coordinator.needed = None
    for step in range(1, 5):
        push(weights(), step, url=coordinator.url, token="", directory=tmp_path, keep=0)
    assert len(list(tmp_path.iterdir())) == 4


def test_only_folders_that_pushes_wrote_are_ever_removed(tmp_path: Path) -> None:
    for name in ("0-1", "0-2", "0-10", "0-2.2", "notes", "1-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / FILE_NAME).write_text("{}")
    (tmp_path / "0-3").mkdir()
    (tmp_path / "0-4").symlink_to(tmp_path / "notes")
    assert [path.name for path in disk.pushed(tmp_path)] == ["0-1", "0-2", "0-2.2", "0-10"]
    assert [path.name for path in disk.surplus(tmp_path, 1, frozenset())] == ["0-1", "0-2"]
    kept = disk.surplus(tmp_path, 0, frozenset({os.path.realpath(tmp_path / "0-2")}))
    assert [path.name for path in kept] == ["0-1", "0-2.2"]


def test_a_state_dict_needs_a_place(coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIVEWEIGHTS_DIRECTORY", raising=False)
    with pytest.raises(Rejected):
        push(weights(), 7, url=coordinator.url, token="", transport="disk")
    assert coordinator.bodies == []


def test_what_travels_may_be_rounded(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    push(weights(1 / 3), 7, url=coordinator.url, token="", directory=tmp_path, dtypes={"*": "BF16"})
    asyncio.run(push_async(weights(1 / 3), 8, url=coordinator.url, token="", directory=tmp_path, dtypes={"*": "BF16"}))
    expected = torch.full((4,), 1 / 3).bfloat16()
    for name in ("0-7", "0-8"):
        assert torch.equal(load_file(tmp_path / name / "model.safetensors")["w"], expected)


def test_a_folder_that_the_fleet_reads_is_not_cast(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    push(weights(), 7, url=coordinator.url, token="", directory=tmp_path)
    with pytest.raises(Rejected) as caught:
        push(tmp_path / "0-7", 8, url=coordinator.url, token="", dtypes={"*": "BF16"})
    assert caught.value.code == "bad_request"
    assert len(coordinator.bodies) == 1


FITTED = {"layers.0.w": torch.full((4,), 1 / 3), "layers.1.router": torch.full((2,), 1 / 3), "other": torch.ones(2)}


@pytest.mark.case("F26")
def test_engine_rounds_each_tensor_to_what_the_fleet_holds(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    coordinator.dtypes = {"layers.#.w": "BF16", "layers.#.router": "F32"}
    for step in (7, 8):
        options = {"url": coordinator.url, "token": "", "directory": tmp_path, "dtypes": "engine"}
        if step == 7:
            push(FITTED, step, **options)  # type: ignore[arg-type]
        else:
            asyncio.run(push_async(FITTED, step, **options))  # type: ignore[arg-type]
        sent = load_file(tmp_path / f"0-{step}" / "model.safetensors")
        assert {name: tensor.dtype for name, tensor in sent.items()} == {
            "layers.0.w": torch.bfloat16,
            "layers.1.router": torch.float32,
            "other": torch.float32,
        }
        assert coordinator.bodies[-1]["dtypes"] == "f" * 64
        manifest = Manifest.from_json((tmp_path / f"0-{step}" / FILE_NAME).read_text())
        promised = {entry.name: entry.digest for entry in manifest.tensors}
        assert promised["layers.0.w"] == to_hex(tensor_digest(FITTED["layers.0.w"].bfloat16(), "BF16"))


@pytest.mark.case("F26")
def test_engine_refuses_by_name_what_the_fleet_does_not_hold_as_it_comes(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    coordinator.dtypes = {"layers.#.w": "", "layers.#.router": "F32"}
    with pytest.raises(Rejected) as caught:
        push(FITTED, 7, url=coordinator.url, token="", directory=tmp_path, dtypes="engine")
    assert [(each.code, each.tensor) for each in caught.value.failures] == [("tensor_dtype", "layers.0.w")]
    assert "dtypes=" in caught.value.hint
    push(FITTED, 8, url=coordinator.url, token="", directory=tmp_path)
    with pytest.raises(Rejected) as folder:
        push(tmp_path / "0-8", 9, url=coordinator.url, token="", dtypes="engine")
    assert "allow_narrowing" in folder.value.hint
