"""The command line against a coordinator on loopback: bodies, JSON, exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from safetensors.torch import load_file, save_file
from torch import ones
from typer.testing import CliRunner, Result

from trainer_side.client import protocol
from trainer_side.testing import RECEIPT, FakeCoordinator
from updater.cli.main import app
from updater.cli.policies import PANEL, dtypes_of, policy_of, takes_policy
from updater.cli.steps import Exit, exit_code
from updater.core.errors import (
    Aborted,
    Failure,
    LiveweightsError,
    Quarantined,
    Rejected,
    RolledBack,
    Unauthorized,
    Unavailable,
)
from updater.core.policy import SourceLayout
from updater.protocol.api import PolicyBody
from updater.protocol.manifest import FILE_NAME, Manifest
from updater.protocol.problems import problem_body
from updater.protocol.wire import WireError


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    with FakeCoordinator().serving() as running:
        yield running


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def checkpoint(folder: Path) -> Path:
    folder.mkdir()
    save_file({"model.norm.weight": ones(4)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (Rejected, Exit.REFUSED),
        (Aborted, Exit.REFUSED),
        (RolledBack, Exit.ROLLED_BACK),
        (Unavailable, Exit.UNAVAILABLE),
        (Unauthorized, Exit.UNAUTHORIZED),
        (Quarantined, Exit.REFUSED),
    ],
)
def test_each_consequence_has_its_exit_code(
    coordinator: FakeCoordinator, kind: type[LiveweightsError], code: Exit
) -> None:
    error = kind(Failure("tensor_digest", "differs", tensor="w"), live_version="0-6")
    assert exit_code(error) is code
    coordinator.problem = (422, problem_body(error, receipt=RECEIPT))
    ran = run("rollback", "--url", coordinator.url, "--json")
    assert ran.exit_code == code
    document = json.loads(ran.stdout)
    assert document["failures"][0]["tensor"] == "w"
    assert document["receipt"]["serial"] == RECEIPT["serial"]


def options_of(command: str) -> dict[str, tuple[object, str]]:
    """Option -> (default, help) of those that belong to the policy."""
    group: Any = typer.main.get_command(app)
    return {
        each.name: (each.default, each.help)
        for each in group.commands[command].params
        if getattr(each, "rich_help_panel", None) == PANEL
    }


@pytest.mark.case("F01", "F04", "F05", "F26")
def test_commands_that_publish_take_one_policy() -> None:
    """Every field of a policy that the command line can say; `commit` and `new_run` belong to a command of its own."""
    assert options_of("push") == options_of("watch") == options_of("inspect")
    assert options_of("rollback").items() <= options_of("push").items()
    assert set(policy_of()) == set(PolicyBody.model_fields) - {"commit", "new_run", "previous", "partial"}
    assert PolicyBody.model_validate(policy_of()) == PolicyBody()


def test_what_is_asked_reaches_the_request_of_each_command(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "step-9")
    (folder / FILE_NAME).write_text("{}")
    asked = [
        "--in-flight",
        "abort",
        "--cache",
        "namespace",
        "--install",
        "flip",
        "--on-busy",
        "wait",
        "--attempts",
        "2",
    ]
    asked += ["--narrow", "f32:bf16", "--require-digests", "--allow-nonfinite", "--allow-suspicious", "*.bias"]
    asked += ["--layout", "*.qkv=by_kv_head", "--require-config", "--allow-config", "rope_theta", "--quiesce", "1.5"]
    asked += ["--deadline", "60", "--pause-lease", "2"]
    assert run("push", str(folder), "9", "--url", coordinator.url, "--json", *asked).exit_code == 0
    pushed = coordinator.bodies[-1]["policy"]
    assert run("watch", str(tmp_path), "--once", "--url", coordinator.url, "--json", *asked).exit_code == 0
    assert coordinator.bodies[-1]["policy"] == {key: value for key, value in pushed.items() if key != "new_run"}
    changed = PolicyBody.model_validate(pushed)
    assert {name for name in policy_of() if getattr(changed, name) == getattr(PolicyBody(), name)} == set()


def test_a_dry_run_is_asked_for_and_a_stream_has_none(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "v7")
    assert run("push", str(folder), "7", "--url", coordinator.url, "--json", "--dry-run").exit_code == 0
    assert coordinator.bodies[-1]["dry_run"] is True
    streamed = run(
        "push", str(folder), "7", "--url", coordinator.url, "--json", "--dry-run", "--transport", "broadcast"
    )
    assert (streamed.exit_code, json.loads(streamed.stdout)["code"]) == (Exit.REFUSED, "mode_unsupported")


@pytest.mark.case("F26")
def test_dtypes_are_those_of_a_stream(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "v7")
    refused = run("push", str(folder), "7", "--url", coordinator.url, "--json", "--dtypes", "BF16")
    told = json.loads(refused.stdout)
    assert (refused.exit_code, told["code"]) == (Exit.REFUSED, "bad_request")
    assert "--transport" in told["hint"]
    assert coordinator.bodies == []
    assert (dtypes_of(None), dtypes_of(["engine"]), dtypes_of(["BF16"])) == (None, "engine", "BF16")
    assert dtypes_of(["*=BF16", "*.router.weight=F32"]) == {"*": "BF16", "*.router.weight": "F32"}
    for wrong in (["BF16", "F32"], ["=F32"], ["*="]):
        with pytest.raises(typer.BadParameter):
            dtypes_of(wrong)


def test_a_command_may_not_say_an_option_of_the_policy_again() -> None:
    def clashes(policy: dict[str, Any], cache: str = "") -> None: ...

    with pytest.raises(TypeError):
        takes_policy()(clashes)


def test_push_sends_what_was_asked_for_and_prints_the_receipt(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "v7")
    options = ("--in-flight", "abort", "--narrow", "f32:bf16", "--base", "0-6", "--id", "mine", "--new-run")
    options += ("--allow-suspicious", "*.bias", "--allow-suspicious", "embed.*", "--layout", "*.qkv=by_kv_head")
    ran = run("push", str(folder), "7", "--url", coordinator.url, "--json", *options)
    assert ran.exit_code == 0
    assert json.loads(ran.stdout)["serial"] == RECEIPT["serial"]
    first, again = coordinator.bodies
    assert first == again
    assert (first["id"], first["version"], first["base_version"]) == ("mine", 7, "0-6")
    assert first["path"] == str(folder)
    assert first["policy"]["in_flight"] == "abort"
    assert first["policy"]["allow_narrowing"] == [["F32", "BF16"]]
    assert first["policy"]["allow_suspicious"] == ["*.bias", "embed.*"]
    assert first["policy"]["layouts"] == {"*.qkv": "by_kv_head"}
    assert first["policy"]["new_run"] is True


@pytest.mark.case("F04")
def test_a_manifest_says_how_tensors_lie(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "v7")
    assert run("manifest", str(folder)).exit_code == 0
    plain = Manifest.from_json((folder / FILE_NAME).read_text())
    assert run("manifest", str(folder), "--layout", "*.qkv=by_kv_head", "--layout", "*=stacked").exit_code == 0
    text = (folder / FILE_NAME).read_text()
    said = Manifest.from_json(text)
    assert said.layouts == (("*.qkv", SourceLayout.BY_KV_HEAD), ("*", SourceLayout.STACKED))
    assert (replace(said, layouts=()), "layouts" in plain.to_json()) == (plain, False)
    with pytest.raises(WireError):
        Manifest.from_json(text.replace("by_kv_head", "sideways"))
    assert run("manifest", str(folder), "--layout", "*=sideways").exit_code == Exit.USAGE


def test_push_with_manifest_writes_it_first(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "v7")
    assert run("push", str(folder), "7", "--url", coordinator.url, "--manifest").exit_code == 0
    assert (folder / FILE_NAME).is_file()


def test_push_follows_the_update_under_its_id(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "v7")
    run("push", str(folder), "7", "--url", coordinator.url)
    assert coordinator.bodies[1]["id"] == coordinator.state["id"]
    assert f"/v1/updates/{coordinator.state['id']}/events" in coordinator.paths


@pytest.mark.parametrize(
    "arguments",
    [
        ("push",),
        ("push", "x", "1", "--in-flight", "never"),
        ("push", "x", "1", "--narrow", "F32"),
        ("engine", "--model", "/nonexistent-folder"),
        ("inspect", ".", "--tp", "0"),
        ("nonsense",),
    ],
)
def test_wrong_usage_is_two(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == Exit.USAGE


@pytest.mark.case("F30")
def test_nobody_there_is_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "BACKOFF_S", ())
    with FakeCoordinator().serving() as gone:
        url = gone.url
    ran = run("status", "--url", url, "--json")
    assert ran.exit_code == Exit.UNAVAILABLE
    document = json.loads(ran.stdout)
    assert document["code"] == "unreachable"
    assert url in document["detail"]
    assert "liveweights serve" in document["hint"]


def test_a_public_bind_without_a_token_is_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIVEWEIGHTS_ADMIN_TOKEN", raising=False)
    assert run("serve", "--host", "0.0.0.0", "--port", "0").exit_code == Exit.USAGE


@pytest.mark.parametrize(("command", "shown"), [("status", "0-6"), ("history", "0-7"), ("rollback", "0-7")])
def test_tables_and_json_come_from_the_same_answers(coordinator: FakeCoordinator, command: str, shown: str) -> None:
    table, document = run(command, "--url", coordinator.url), run(command, "--url", coordinator.url, "--json")
    assert (table.exit_code, document.exit_code) == (0, 0)
    assert shown in table.stdout
    found: Any = json.loads(document.stdout)
    assert shown in json.dumps(found)


def test_manifest_writes_and_check_finds_a_changed_tensor(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "v7")
    made = run("manifest", str(folder), "--json")
    assert (made.exit_code, json.loads(made.stdout)["digests"]) == (0, True)
    assert run("manifest", str(folder), "--check").exit_code == 0
    tensors = load_file(folder / "model.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"] * 2}, folder / "model.safetensors")
    found = run("manifest", str(folder), "--check", "--json")
    assert found.exit_code == Exit.REFUSED
    assert json.loads(found.stdout)["failures"][0]["code"] == "tensor_digest"


@pytest.mark.case("B208", "F28")
def test_rollback_sends_how_it_is_to_pause_and_commit(coordinator: FakeCoordinator) -> None:
    options = ("--in-flight", "abort", "--cache", "namespace", "--on-busy", "wait", "--commit", "manual")
    times = ("--deadline", "20", "--quiesce", "5", "--pause-lease", "6", "--attempts", "1")
    ran = run("rollback", *options, *times, "--url", coordinator.url)
    assert ran.exit_code == 0
    (body,) = coordinator.bodies
    assert body["policy"] == {
        "in_flight": "abort",
        "cache": "namespace",
        "on_busy": "wait",
        "commit": "manual",
        "deadline_s": 20.0,
        "quiesce_s": 5.0,
        "pause_lease_s": 6.0,
        "attempts": 1,
    }
    assert body["id"] in ran.stderr


@pytest.mark.parametrize("verb", ["commit", "abort"])
def test_a_manual_commit_needs_no_curl(coordinator: FakeCoordinator, verb: str) -> None:
    coordinator.begin({"id": "mine", "source": {"kind": "broadcast"}})
    ran = run(verb, "mine", "--url", coordinator.url)
    assert ran.exit_code == 0
    assert coordinator.paths == [f"/v1/updates/mine/{verb}"]
    assert "mine" in ran.stdout


@pytest.mark.case("F30")
def test_an_address_needs_no_scheme(coordinator: FakeCoordinator) -> None:
    assert run("status", "--url", coordinator.url.removeprefix("http://")).exit_code == Exit.OK


@pytest.mark.case("F30")
@pytest.mark.parametrize(
    "url",
    ["ftp://127.0.0.1:8700", "http://", "http://127.0.0.1:port", "http://[::1", "http://a\nb", ":8700", "/v1",
     "http://127.0.0.1:99999", "http://127.0.0.1:0"],
)  # fmt: skip
def test_what_is_no_address_is_refused(url: str) -> None:
    ran = run("status", "--url", url, "--json")
    assert ran.exit_code == Exit.REFUSED
    document = json.loads(ran.stdout)
    assert document["code"] == "bad_request"
    assert "http://" in document["hint"]


@pytest.mark.case("F30")
@pytest.mark.parametrize("answer", [{"version": "0-1", "digest": "d", "state": "open", "replica": "one"}, {"hello": 1}])
def test_the_address_of_another_server_is_named_as_such(coordinator: FakeCoordinator, answer: dict[str, Any]) -> None:
    class Other(FakeCoordinator):
        def answer(self, method: str, path: str, query: str) -> tuple[int, dict[str, Any]]:
            return 200, answer

    with Other().serving() as other:
        ran = run("status", "--url", other.url, "--json")
    assert ran.exit_code == Exit.REFUSED
    document = json.loads(ran.stdout)
    assert document["code"] == "not_found"
    assert "--url" in document["hint"]
    assert ("'one'" in document["detail"]) is ("replica" in answer)


@pytest.mark.case("F30")
@pytest.mark.parametrize(
    ("status", "code", "rc"),
    [(404, "not_found", Exit.REFUSED), (200, "not_found", Exit.REFUSED), (501, "not_found", Exit.REFUSED),
     (403, "forbidden", Exit.REFUSED), (502, "unreachable", Exit.UNAVAILABLE)],
)  # fmt: skip
@pytest.mark.parametrize("answer", [{"detail": "Not Found"}, []])
def test_an_answer_of_no_coordinator_is_named_with_its_address(status: int, code: str, rc: Exit, answer: Any) -> None:
    class Other(FakeCoordinator):
        def answer(self, method: str, path: str, query: str) -> tuple[int, Any]:
            return status, answer

    with Other().serving() as other:
        ran = run("status", "--url", f"{other.url}/a/path", "--json")
        replica = run("readmit", other.url, "--json")
    document = json.loads(ran.stdout)
    assert (ran.exit_code, document["code"]) == (rc, code)
    assert other.url in document["detail"]
    assert "--url" in document["hint"]
    assert (replica.exit_code, json.loads(replica.stdout)["code"]) == (Exit.UNAVAILABLE, "unreachable")
    assert json.loads(replica.stdout)["hint"]


@pytest.mark.case("F30")
def test_a_password_in_an_address_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "BACKOFF_S", ())
    with FakeCoordinator().serving() as gone:
        url = gone.url
    ran = run("status", "--url", url.replace("//", "//me:secret@"), "--json")
    assert url in json.loads(ran.stdout)["detail"]
    assert "secret" not in ran.output
