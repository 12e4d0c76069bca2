"""A watched folder: what counts as complete, in which order, and what is offered again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import ones
from typer.testing import CliRunner, Result

from trainer_side.client.client import Client
from trainer_side.testing import FakeCoordinator
from updater.cli.main import app
from updater.cli.steps import MANIFEST, Exit
from updater.cli.watch import Watch, found_in
from updater.core.errors import Failure, LiveweightsError, Rejected
from updater.protocol.answers import Receipt
from updater.protocol.manifest import FILE_NAME
from updater.protocol.problems import problem_body


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    with FakeCoordinator().serving() as running:
        yield running


def checkpoint(folder: Path, name: str, marker: str = FILE_NAME) -> Path:
    path = folder / name
    path.mkdir()
    save_file({"model.norm.weight": ones(4)}, path / "model.safetensors")
    if marker:
        (path / marker).write_text("{}")
    return path


def pushed(coordinator: FakeCoordinator) -> list[tuple[str, str]]:
    return [(Path(body["path"]).name, body["version"]) for body in coordinator.bodies]


def test_names_that_are_versions(tmp_path: Path) -> None:
    names = ["1-12", "step-9", "step_10", "checkpoint-100", "global_step7", "base", "step-", "7", "step-3.tmp", "a-1-2"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / "step-8").write_text("a file")
    found = {each.path.name: (each.run, each.step) for each in found_in(tmp_path)}
    assert found == {
        "1-12": (1, 12),
        "step-9": (None, 9),
        "step_10": (None, 10),
        "checkpoint-100": (None, 100),
        "global_step7": (None, 7),
    }


def test_the_newest_complete_version_above_the_live_one_is_published(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    for name, marker in (("step-5", FILE_NAME), ("step-9", FILE_NAME), ("step-10", FILE_NAME), ("step-11", "")):
        checkpoint(tmp_path, name, marker)
    with Client(coordinator.url, "") as client:
        watch = Watch(tmp_path, client)
        assert watch.once() is not None
        coordinator.live = "0-10"
        assert watch.once() is None
        checkpoint(tmp_path, "1-0")
        assert watch.once() is not None
    assert pushed(coordinator) == [("step-10", "0-10"), ("1-0", "1-0")]


@pytest.mark.case("B023")
def test_without_its_marker_a_version_is_not_listed(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "step-7", marker="")
    with Client(coordinator.url, "") as client:
        watch = Watch(tmp_path, client, marker="DONE")
        assert watch.once() is None
        (path / FILE_NAME).write_text("{}")
        assert watch.once() is None
        (path / "DONE").touch()
        assert watch.once() is not None
    assert pushed(coordinator) == [("step-7", "0-7")]


def test_what_was_refused_is_offered_again_once_it_changed(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "step-7")
    refused = Rejected(Failure("file_truncated", "short", file="model.safetensors"))
    with Client(coordinator.url, "") as client:
        watch = Watch(tmp_path, client)
        coordinator.problem = (422, problem_body(refused))
        with pytest.raises(LiveweightsError) as caught:
            watch.once()
        assert caught.value.code == "file_truncated"
        assert watch.once() is None
        save_file({"model.norm.weight": ones(5)}, path / "model.safetensors")
        coordinator.problem = None
        assert watch.once() is not None


def test_what_may_go_better_is_tried_again(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    checkpoint(tmp_path, "step-7")
    with Client(coordinator.url, "") as client:
        watch = Watch(tmp_path, client)
        coordinator.problem = (409, problem_body(Rejected(Failure("busy", "another update"))))
        with pytest.raises(LiveweightsError):
            watch.once()
        coordinator.problem = None
        assert watch.once() is not None


def test_without_markers_only_what_is_whole_and_at_rest_counts(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "step-7", marker="")
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[:-4])
    now = [100.0]
    with Client(coordinator.url, "") as client:
        watch = Watch(tmp_path, client, settle_s=5.0, clock=lambda: now[0])
        assert watch.once() is None
        now[0] += 6.0
        assert watch.once() is None  # at rest, and half
        (path / "model.safetensors").write_bytes(whole)
        assert watch.once() is None
        now[0] += 4.0
        assert watch.once() is None
        now[0] += 1.0
        assert watch.once() is not None


def look(coordinator: FakeCoordinator, folder: Path, *options: str) -> Result:
    arguments = ["watch", str(folder), "--once", "--url", coordinator.url, *options]
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


@pytest.mark.case("F23")
def test_a_folder_at_rest_is_published_by_one_look(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    checkpoint(tmp_path, "step-7", marker="")
    assert look(coordinator, tmp_path, "--settle", "0.1").exit_code == Exit.OK
    assert pushed(coordinator) == [("step-7", "0-7")]


@pytest.mark.case("B198", "F23")
def test_what_is_whole_is_published_and_what_is_passed_over_is_named_once(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    checkpoint(tmp_path, "step-7", marker="")
    short = checkpoint(tmp_path, "step-8", marker="") / "model.safetensors"
    short.write_bytes(short.read_bytes()[:-4])
    (checkpoint(tmp_path, "step-9", marker="") / "adapter_config.json").write_text("{}")
    now, passed = [100.0], []
    with Client(coordinator.url, "") as client:
        watch = Watch(
            tmp_path, client, settle_s=1.0, told=lambda path, why: passed.append(path.name), clock=lambda: now[0]
        )
        assert watch.once() is None
        assert watch.waiting
        now[0] += 1.0
        assert watch.once() is not None
        assert watch.once() is not None  # this coordinator's live version does not move
    assert pushed(coordinator) == [("step-7", "0-7")] * 2
    assert sorted(passed) == ["step-8", "step-9"]


@pytest.mark.case("B198", "F23")
@pytest.mark.parametrize("spoilt", ["truncated", "adapter", "unmarked"])
def test_a_look_that_takes_nothing_of_what_is_newer_says_so(
    coordinator: FakeCoordinator, tmp_path: Path, spoilt: str
) -> None:
    path = checkpoint(tmp_path, "step-7", marker="")
    if spoilt == "truncated":
        file = path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-4])
    elif spoilt == "adapter":
        (path / "adapter_config.json").write_text("{}")
    ran = look(coordinator, tmp_path, *(() if spoilt == "unmarked" else ("--settle", "0.05")))
    assert ran.exit_code == Exit.REFUSED
    assert "step-7" in ran.stderr
    assert coordinator.bodies == []


@pytest.mark.case("F23")
def test_a_refused_one_leaves_the_place_to_an_older_one(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    class Judge(Client):
        def update(self, body: Mapping[str, Any], *, timeout_s: float = 1.0) -> Receipt:
            if body["version"] == "0-8":
                raise Rejected(Failure("file_truncated", "short"))
            return super().update(body, timeout_s=timeout_s)

    checkpoint(tmp_path, "step-7")
    checkpoint(tmp_path, "step-8")
    passed: list[str] = []
    with Judge(coordinator.url, "") as client:
        assert Watch(tmp_path, client, told=lambda path, why: passed.append(path.name)).once() is not None
    assert pushed(coordinator) == [("step-7", "0-7")]
    assert passed == ["step-8"]


@pytest.mark.case("F23")
def test_a_refused_one_is_left_until_it_changes_and_a_look_says_so(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    class Judge(Client):
        def update(self, body: Mapping[str, Any], *, timeout_s: float = 1.0) -> Receipt:
            raise Rejected(Failure("file_truncated", "short"))

    path = checkpoint(tmp_path, "step-7")
    with Judge(coordinator.url, "") as client:
        watch = Watch(tmp_path, client)
        with pytest.raises(Rejected):
            watch.once()
        assert watch.once() is None
        assert watch.left
        (path / "more.txt").write_text("x")
        with pytest.raises(Rejected):
            watch.once()


@pytest.mark.case("F23")
def test_what_may_be_taken_later_is_not_passed_over_for_an_older_one(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    class Judge(Client):
        def update(self, body: Mapping[str, Any], *, timeout_s: float = 1.0) -> Receipt:
            if body["version"] == "0-8":
                raise Rejected(Failure("busy", "another one runs"))
            return super().update(body, timeout_s=timeout_s)

    checkpoint(tmp_path, "step-7")
    checkpoint(tmp_path, "step-8")
    passed: list[str] = []
    with Judge(coordinator.url, "") as client:
        watch = Watch(tmp_path, client, told=lambda path, why: passed.append(path.name))
        for _ in range(2):
            with pytest.raises(Rejected):
                watch.once()
    assert (pushed(coordinator), passed) == ([], [])


@pytest.mark.case("F23")
def test_the_live_one_itself_is_no_run_that_began_again(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    checkpoint(tmp_path, "step-6")
    passed: list[str] = []
    with Client(coordinator.url, "") as client:
        assert Watch(tmp_path, client, told=lambda path, why: passed.append(path.name)).once() is None
    assert passed == []


@pytest.mark.case("F23")
def test_a_run_that_began_again_is_named_and_new_run_publishes_it(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    old, new = checkpoint(tmp_path, "step-90"), checkpoint(tmp_path, "step-5")
    for path, seconds in ((old, 1_000), (new, 2_000)):
        for file in path.iterdir():
            os.utime(file, (seconds, seconds))
    coordinator.live = "3-90"
    ran = look(coordinator, tmp_path)
    assert ran.exit_code == Exit.OK
    assert "step-5" in ran.stderr
    assert "--new-run" in ran.stderr
    with Client(coordinator.url, "") as client:
        watch = Watch(tmp_path, client, new_run=True)
        assert watch.once() is not None
        coordinator.live = "4-5"
        assert watch.once() is None  # step-90 is of the old run
        checkpoint(tmp_path, "step-6")
        assert watch.once() is not None
    assert [(body["version"], body["policy"].get("new_run", False)) for body in coordinator.bodies] == [
        (5, True),
        ("4-6", False),
    ]


def test_the_command_looks_once_and_says_how_it_ended(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    def run() -> int:
        arguments = ["watch", str(tmp_path), "--once", "--json", "--url", coordinator.url]
        return CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code

    assert MANIFEST == FILE_NAME
    assert run() == Exit.OK
    assert coordinator.bodies == []
    checkpoint(tmp_path, "step-7")
    assert run() == Exit.OK
    assert pushed(coordinator) == [("step-7", "0-7")]
    coordinator.problem = (422, problem_body(Rejected(Failure("tensor_missing", "no"))))
    assert run() == Exit.REFUSED


def test_the_command_goes_on_until_it_is_ended(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    checkpoint(tmp_path, "step-7")
    command = [sys.executable, "-m", "updater.cli.main", "watch", str(tmp_path), "--every", "0.05", "--json"]
    with subprocess.Popen([*command, "--url", coordinator.url], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "{\n"
        running.send_signal(signal.SIGTERM)
        running.stdout.read()
        assert running.wait(60) == 0
    assert pushed(coordinator)[0] == ("step-7", "0-7")
