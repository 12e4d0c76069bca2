"""The journal's tables, by number: `PRAGMA user_version` says which ones a file has.

A file of a release before is copied beside itself and then migrated, in one transaction; one of a later release is
refused. Release 0.1.0 gave its files no number, and cannot look at one: a trigger on what it does first, which is to
take the fleet over, keeps it away from a migrated file.
`shorten_requests` and `drop_records` take out what is old.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from updater.core.errors import Failure, LiveweightsError

#: 0: release 0.1.0. 1: fleets have an identity, and ownership is guarded.
NUMBER = 1

_TABLES = (
    "CREATE TABLE IF NOT EXISTS ownership (fleet TEXT PRIMARY KEY, epoch INTEGER NOT NULL, owner TEXT NOT NULL) STRICT",
    """CREATE TABLE IF NOT EXISTS requests (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, serial INTEGER NOT NULL, kind TEXT NOT NULL,
    body_hash TEXT NOT NULL, body TEXT NOT NULL, created REAL NOT NULL, receipt TEXT, facts TEXT) STRICT""",
    """CREATE TABLE IF NOT EXISTS records (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, epoch INTEGER NOT NULL, serial INTEGER NOT NULL, attempt INTEGER NOT NULL,
    kind TEXT NOT NULL, record TEXT NOT NULL, manifest TEXT NOT NULL, at REAL NOT NULL,
    UNIQUE (serial, attempt, kind)) STRICT""",
    """CREATE TABLE IF NOT EXISTS members (
    replica TEXT PRIMARY KEY, incarnation TEXT NOT NULL, url TEXT NOT NULL, config_hash TEXT NOT NULL) STRICT""",
    "CREATE TABLE IF NOT EXISTS room (filler BLOB) STRICT",
)
_LINEAGE = "CREATE TABLE lineage (fleet TEXT PRIMARY KEY, identity TEXT NOT NULL, taken_over INTEGER NOT NULL) STRICT"
_GONE = """CREATE TABLE gone (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, replica TEXT NOT NULL, incarnation TEXT NOT NULL) STRICT"""
#: Every claim since raises `claims` with the epoch. One that does not is of a release that knows no numbers.
_GUARD = """CREATE TRIGGER guard BEFORE UPDATE OF epoch ON ownership WHEN NEW.claims = OLD.claims
    BEGIN SELECT RAISE(ABORT, 'this journal was migrated by a later release of liveweights, which has to be used'); END
"""


class JournalRefused(LiveweightsError):
    """A later release wrote this journal, or it is another fleet's: nothing of it was touched."""

    def __init__(self, message: str, file: Path, hint: str) -> None:
        super().__init__(Failure("journal_failed", message, file=str(file), hint=hint))


def open_tables(db: sqlite3.Connection, file: Path, fleet: str) -> bool:
    """Bring the file to this release's tables; whether it held none before. Raises JournalRefused, sqlite3.Error,
    OSError. What it held before a migration is then beside it (`copy_of`)."""
    number = _number(db)
    if number > NUMBER:
        raise JournalRefused(
            f"this journal has number {number}, and this release reads up to {NUMBER}",
            file,
            "run the release that wrote it, or a later one; a migrated journal has a copy of before beside it",
        )
    _check_fleet(db, file, fleet)
    if number == NUMBER:
        return False
    if _has_tables(db):
        _copy(db, copy_of(file, _number(db)))
    db.execute("BEGIN IMMEDIATE")
    try:
        made = _migrate(db, fleet) if _number(db) < NUMBER else False
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
    return made


def copy_of(file: Path, number: int) -> Path:
    """Where the file is kept as it was under `number`."""
    return file.with_name(f"{file.stem}.before-{number + 1}{file.suffix}")


def _check_fleet(db: sqlite3.Connection, file: Path, fleet: str) -> None:
    """Members and records carry no name of a fleet: the file is one fleet's."""
    names = {row[0] for row in db.execute("SELECT fleet FROM ownership")} if _has_tables(db) else set()
    if names and fleet not in names:
        hint = f"start the coordinator with --fleet {min(names)}, or give fleet {fleet} a --state of its own"
        raise JournalRefused(f"this is the journal of fleet {min(names)!r}, not of {fleet!r}", file, hint)


def _migrate(db: sqlite3.Connection, fleet: str) -> bool:
    new = not _has_tables(db)
    for table in _TABLES:
        db.execute(table)
    if "facts" not in {row[1] for row in db.execute("PRAGMA table_info(requests)")}:
        db.execute("ALTER TABLE requests ADD COLUMN facts TEXT")  # a journal of before there were any
    db.execute("ALTER TABLE ownership ADD COLUMN claims INTEGER NOT NULL DEFAULT 0")
    for statement in (_LINEAGE, _GONE, _GUARD):
        db.execute(statement)
    # A fleet that was born before there were identities keeps its name as its own: its members know it by that.
    db.execute("INSERT INTO lineage SELECT fleet, fleet, 0 FROM ownership")
    db.execute("INSERT OR IGNORE INTO lineage VALUES (?, ?, 0)", (fleet, secrets.token_hex(16)))
    db.execute(f"PRAGMA user_version = {NUMBER}")
    return new


def _number(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _has_tables(db: sqlite3.Connection) -> bool:
    return db.execute("SELECT 1 FROM sqlite_master WHERE name = 'ownership'").fetchone() is not None


def _copy(db: sqlite3.Connection, target: Path) -> None:
    """With what the log holds, and whole or not at all."""
    half = target.with_name(f"{target.name}.half-{secrets.token_hex(4)}")
    try:
        with closing(sqlite3.connect(half)) as copy:
            db.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")
        _sync(half)
        os.replace(half, target)
        _sync(target.parent)
    finally:
        half.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


#: For so many times the requests that are kept whole, an id is remembered with a short receipt.
TOMBSTONES = 20

_LAST_PUBLISHED = "SELECT seq, serial FROM records WHERE kind = 'published' ORDER BY seq DESC LIMIT 2"
_LABEL = (
    "json_extract(record, '$.version.run'), json_extract(record, '$.version.step'), json_extract(record, '$.digest')"
)
_ORIGINAL = f"""
    SELECT serial FROM records WHERE kind = 'published' AND json_extract(record, '$.op') <> 'rollback'
    AND ({_LABEL}) = (SELECT {_LABEL} FROM records WHERE seq = ?) ORDER BY seq DESC LIMIT 1"""
_HIGHEST = """
    SELECT serial FROM records ORDER BY json_extract(record, '$.version.run') DESC,
    json_extract(record, '$.version.step') DESC LIMIT 1"""


def shorten_requests(db: sqlite3.Connection, keep: int, shorten: Callable[[str], str]) -> None:
    """The last `keep` requests stay whole. Of older ones that ended a short receipt stays, and in the end nothing."""
    edge = _nth_newest(db, "requests", keep)
    older = "seq <= ? AND receipt IS NOT NULL"
    for seq, receipt in db.execute(
        f"SELECT seq, receipt FROM requests WHERE {older} AND body <> ''", (edge,)
    ).fetchall():
        short = (shorten(receipt), seq)
        db.execute("UPDATE requests SET body = '', facts = NULL, receipt = ? WHERE seq = ?", short)
    db.execute(f"DELETE FROM requests WHERE {older}", (_nth_newest(db, "requests", keep * TOMBSTONES),))


def drop_records(db: sqlite3.Connection, keep: int) -> None:
    """The records of the last `keep` updates stay, and what recovery may need of older ones."""
    rows = db.execute("SELECT DISTINCT serial FROM records ORDER BY serial DESC LIMIT 1 OFFSET ?", (keep,)).fetchone()
    if rows is None:
        return
    needed = {row[0] for row in db.execute("SELECT serial FROM requests WHERE receipt IS NULL")}
    needed |= {row[0] for row in db.execute(_HIGHEST)}
    for seq, serial in db.execute(_LAST_PUBLISHED).fetchall():
        needed |= {serial, *(row[0] for row in db.execute(_ORIGINAL, (seq,)))}
    marks = ",".join("?" * len(needed))
    db.execute(f"DELETE FROM records WHERE serial <= ? AND serial NOT IN ({marks})", (rows[0], *needed))


def _nth_newest(db: sqlite3.Connection, table: str, count: int) -> int:
    """`seq` of the newest row that is not among the newest `count`; 0 if there is none."""
    row = db.execute(f"SELECT seq FROM {table} ORDER BY seq DESC LIMIT 1 OFFSET ?", (count,)).fetchone()
    return row[0] if row is not None else 0
