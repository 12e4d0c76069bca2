"""Where the journal lies, and that one coordinator at a time has it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from updater.coordinator.journal.journal import Journal, JournalError
from updater.coordinator.journal.state_folder import StateFolder
from updater.core.errors import LiveweightsError
from updater.server.security import ConfigurationError
from updater.settings import OLD_STATE, STATE_ENV, Settings, default_state

HOLDS = """
import sys
from pathlib import Path
from updater.coordinator.journal.state_folder import StateFolder
from updater.settings import Settings
with StateFolder.open(Settings(state=Path(sys.argv[1]))):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Started in a folder of its own, by a user with a home of their own."""
    monkeypatch.delenv(STATE_ENV, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path


def refused(settings: Settings) -> LiveweightsError:
    with pytest.raises(LiveweightsError) as refusal:
        StateFolder.open(settings)
    return refusal.value


@pytest.mark.case("F14")
def test_the_folder_is_the_users_and_the_fleets_wherever_the_command_was_started(elsewhere: Path) -> None:
    assert default_state("prod") == elsewhere / "home" / "liveweights" / "prod"
    assert default_state("a/../b").parent == elsewhere / "home" / "liveweights"
    with StateFolder.open(Settings(fleet="prod")) as folder:
        assert folder.path == default_state("prod")
        assert folder.path.stat().st_mode & 0o077 == 0
    for name in ("", ".", ".."):
        with pytest.raises(ConfigurationError):
            Settings(fleet=name)


@pytest.mark.case("F14")
def test_the_environment_chooses_the_folder(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Settings().state_given
    monkeypatch.setenv(STATE_ENV, str(elsewhere / "chosen"))
    assert Settings().state_given
    assert Settings().state_folder == elsewhere / "chosen"


@pytest.mark.case("F14")
def test_a_journal_where_010_kept_it_is_not_passed_over(elsewhere: Path) -> None:
    Journal(OLD_STATE, "default").close()
    refusal = refused(Settings())
    assert refusal.code == "state_ambiguous"
    assert refusal.failures[0].file == str(OLD_STATE.absolute() / "journal.sqlite3")
    assert str(OLD_STATE.absolute()) in refusal.hint
    assert str(default_state()) in refusal.hint
    assert not default_state().exists()
    # Once somebody chose, or the new folder has a journal, nothing is in doubt.
    StateFolder.open(Settings(state=elsewhere / "chosen")).close()
    StateFolder.open(Settings(state=OLD_STATE.absolute())).close()
    Journal(default_state(), "default").close()
    StateFolder.open(Settings()).close()


@pytest.mark.case("F14")
def test_a_folder_that_a_living_process_has_is_refused_until_it_ends(tmp_path: Path) -> None:
    settings = Settings(state=tmp_path)
    with holder(tmp_path) as process:
        (failure,) = refused(settings).failures
        assert (failure.code, failure.file) == ("state_in_use", str(tmp_path / "lock"))
        assert str(process.pid) in failure.message
        assert "--take-over" in failure.hint
        process.send_signal(signal.SIGSTOP)  # a frozen one may go on at any time
        assert refused(settings).code == "state_in_use"
        process.kill()
        process.wait()
        StateFolder.open(settings).close()  # a dead one needs no word


@pytest.mark.case("F14")
def test_who_takes_over_has_the_folder_and_the_one_before_no_more(tmp_path: Path) -> None:
    settings = Settings(state=tmp_path)
    with holder(tmp_path) as process, StateFolder.open(settings, take_over=True):
        (failure,) = refused(settings).failures
        assert failure.code == "state_in_use"
        assert str(os.getpid()) in failure.message
        process.kill()
        process.wait()
        assert refused(settings).code == "state_in_use"
    StateFolder.open(settings).close()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


@pytest.mark.case("F14")
@pytest.mark.parametrize("signed", ["", "{", "[]", "{}"])
def test_an_owner_that_did_not_sign_is_refused_all_the_same(tmp_path: Path, signed: str) -> None:
    settings = Settings(state=tmp_path)
    with StateFolder.open(settings):
        (tmp_path / "lock").write_text(signed)
        before = set(os.listdir("/proc/self/fd"))
        assert refused(settings).code == "state_in_use"
        assert set(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_cannot_be_is_an_error_of_the_journal(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError):
        StateFolder.open(Settings(state=tmp_path / "file" / "state"))


@pytest.mark.case("F14")
@pytest.mark.parametrize("state", [None, Path("state")])
def test_an_actor_needs_a_folder_that_is_the_same_on_every_node(elsewhere: Path, state: Path | None) -> None:
    ray_actor = pytest.importorskip("updater.ray_actor", reason="Ray is not installed")
    with pytest.raises(LiveweightsError) as refusal:
        ray_actor.start_coordinator(Settings(state=state))
    assert refusal.value.code == "state_not_shared"
