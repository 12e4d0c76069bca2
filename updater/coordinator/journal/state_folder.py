"""Where a coordinator keeps its journal, and the lock that says that it is in use.

The lock is a file lock that is held for life: the system lets go of it when its owner dies, however it dies. A taker
puts a locked file of its own in its place, so that of three coordinators one holds the lock, not two. The lock alone
stops no owner: the row of ownership in the journal does, at its next append or look.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
from pathlib import Path
from types import TracebackType
from typing import Self

from updater.coordinator.journal.journal import JournalError
from updater.core.errors import LiveweightsError, refuse
from updater.settings import OLD_STATE, Settings

JOURNAL, LOCK = "journal.sqlite3", "lock"


class StateFolder:
    """One coordinator's folder while it lives. `close`: after the journal was closed."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path, self._lock = path, lock

    @classmethod
    def open(cls, settings: Settings, *, take_over: bool = False) -> Self:
        """Raises LiveweightsError: `state_in_use` if a living process has it, unless `take_over`; `state_ambiguous` if
        the journal lies where 0.1.0 looked for it, JournalError if there can be no folder."""
        path = settings.state_folder
        if not settings.state_given:
            _check_old(path)
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            return cls(path, _taken(path) if take_over else _locked(path))
        except OSError as error:
            raise JournalError(f"the state folder {path} cannot be used: {error.strerror}") from None

    def close(self) -> None:
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_old(path: Path) -> None:
    """The folder was relative once: a fleet of then must not begin anew because it is looked for elsewhere."""
    old = OLD_STATE.absolute()
    if (old / JOURNAL).exists() and not (path / JOURNAL).exists():
        raise refuse(
            "state_ambiguous",
            f"the state folder is {path} and holds no journal, and there is one in {old}",
            file=str(old / JOURNAL),
            hint=f"to go on with that fleet: --state {old}, or move the folder to {path};"
            f" for a new fleet: --state {path}",
        )


def _locked(path: Path) -> int:
    """The lock of a folder that no living process has."""
    while True:
        file = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(file, 1000)
            os.close(file)
            raise _in_use(path, owner) from None
        except BaseException:
            os.close(file)
            raise
        if _is_at(file, path / LOCK):
            _sign(file)
            return file
        os.close(file)  # a taker put another one in its place meanwhile


def _taken(path: Path) -> int:
    """A lock of our own in place of whatever is there."""
    mine = path / f"{LOCK}.{secrets.token_hex(4)}"
    file = os.open(mine, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    _sign(file)
    os.replace(mine, path / LOCK)
    return file


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _sign(file: int) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)


def _in_use(path: Path, signed: bytes) -> LiveweightsError:
    try:
        owner = json.loads(signed)
        who = f"process {owner['pid']} on {owner['host']}"
    except (ValueError, TypeError, KeyError):
        who = "another process"
    return refuse("state_in_use", f"{who} has the state folder {path}", file=str(path / LOCK))
