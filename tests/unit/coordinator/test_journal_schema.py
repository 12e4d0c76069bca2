"""The journal's tables have a number: what an older release wrote is migrated and kept, a newer one is refused."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from updater.coordinator.journal.journal import Journal, JournalError
from updater.coordinator.journal.schema import NUMBER, JournalRefused, copy_of

#: The tables of 0.1.0, as it made them, and its claim.
TABLES_010 = """
CREATE TABLE ownership (fleet TEXT PRIMARY KEY, epoch INTEGER NOT NULL, owner TEXT NOT NULL) STRICT;
CREATE TABLE requests (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, serial INTEGER NOT NULL, kind TEXT NOT NULL,
    body_hash TEXT NOT NULL, body TEXT NOT NULL, created REAL NOT NULL, receipt TEXT, facts TEXT) STRICT;
CREATE TABLE records (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, epoch INTEGER NOT NULL, serial INTEGER NOT NULL, attempt INTEGER NOT NULL,
    kind TEXT NOT NULL, record TEXT NOT NULL, manifest TEXT NOT NULL, at REAL NOT NULL,
    UNIQUE (serial, attempt, kind)) STRICT;
CREATE TABLE members (
    replica TEXT PRIMARY KEY, incarnation TEXT NOT NULL, url TEXT NOT NULL, config_hash TEXT NOT NULL) STRICT;
CREATE TABLE room (filler BLOB) STRICT;
"""
CLAIM_010 = "UPDATE ownership SET epoch = ?, owner = ? WHERE fleet = ? AND epoch = ? AND owner = ?"
ONE_MEMBER = "INSERT INTO members VALUES ('r1', 'i1', 'http://127.0.0.1:1', '')"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The file of a fleet of 0.1.0 that had one coordinator and one member."""
    file = tmp_path / "journal.sqlite3"
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.executescript(TABLES_010)
        db.execute("INSERT INTO ownership VALUES ('prod', 3, 'old')")
        db.execute(ONE_MEMBER)
    return file


def number(file: Path) -> int:
    with closing(sqlite3.connect(file)) as db:
        return int(db.execute("PRAGMA user_version").fetchone()[0])


def renumber(file: Path, to: int) -> None:
    with closing(sqlite3.connect(file)) as db:
        db.execute(f"PRAGMA user_version = {to}")


@pytest.mark.case("F60")
def test_a_new_journal_has_a_number_and_a_random_identity(tmp_path: Path) -> None:
    first, second = Journal(tmp_path / "a", "prod"), Journal(tmp_path / "b", "prod")
    assert first.new
    assert number(tmp_path / "a" / "journal.sqlite3") == NUMBER
    assert first.identity() not in ("", "prod", second.identity())
    again = Journal(tmp_path / "a", "prod")
    assert not again.new
    assert again.identity() == first.identity()
    assert not list(tmp_path.glob("*/*before*"))


@pytest.mark.case("F60")
def test_an_older_journal_is_migrated_and_a_copy_of_it_is_kept(old: Path) -> None:
    journal = Journal(old.parent, "prod")
    assert not journal.new
    assert journal.identity() == "prod"  # its members know it by that
    assert journal.claim("new") == 4
    assert [member.replica for member in journal.members()] == ["r1"]
    kept = copy_of(old, 0)
    assert number(old) == NUMBER
    assert number(kept) == 0
    with closing(sqlite3.connect(kept)) as db:
        assert db.execute("SELECT * FROM ownership").fetchall() == [("prod", 3, "old")]
        assert db.execute("SELECT replica FROM members").fetchall() == [("r1",)]


@pytest.mark.case("F60")
def test_a_migration_that_was_cut_off_is_done_again(old: Path) -> None:
    copy_of(old, 0).write_bytes(b"half a copy")
    assert Journal(old.parent, "prod").identity() == "prod"
    assert number(copy_of(old, 0)) == 0
    with closing(sqlite3.connect(copy_of(old, 0))) as db:
        assert db.execute("SELECT epoch FROM ownership").fetchone() == (3,)


@pytest.mark.case("F60")
def test_a_journal_of_before_there_were_facts_learns_of_them(old: Path) -> None:
    with closing(sqlite3.connect(old)) as db:
        db.execute("ALTER TABLE requests DROP COLUMN facts")
    assert Journal(old.parent, "prod").requests() == ()


@pytest.mark.case("F60")
def test_a_newer_journal_is_refused_untouched(tmp_path: Path) -> None:
    Journal(tmp_path, "prod").claim("later")
    file = tmp_path / "journal.sqlite3"
    renumber(file, NUMBER + 1)
    with pytest.raises(JournalRefused) as refusal:
        Journal(tmp_path, "prod")
    assert refusal.value.failures[0].file == str(file)
    assert refusal.value.hint
    assert number(file) == NUMBER + 1
    assert not list(tmp_path.glob("*before*"))


@pytest.mark.case("F60")
def test_release_010_cannot_take_over_a_migrated_journal(old: Path) -> None:
    journal = Journal(old.parent, "prod")
    with closing(sqlite3.connect(old, isolation_level=None)) as db, pytest.raises(sqlite3.IntegrityError):
        db.execute(CLAIM_010, (4, "back", "prod", 3, "old"))
    assert journal.claim("new") == 4
    assert journal.claim("newer") == 5


@pytest.mark.case("F60")
def test_a_live_coordinator_of_010_appends_nothing_once_its_journal_was_taken(old: Path) -> None:
    """Its append looks for its own row first."""
    Journal(old.parent, "prod").claim("new")
    with closing(sqlite3.connect(old)) as db:
        assert db.execute("SELECT epoch, owner FROM ownership WHERE fleet = 'prod'").fetchone() == (4, "new")


def test_the_journal_of_another_fleet_is_refused(old: Path) -> None:
    with pytest.raises(JournalRefused):
        Journal(old.parent, "staging")
    assert number(old) == 0
    Journal(old.parent, "prod")
    with pytest.raises(JournalRefused):
        Journal(old.parent, "staging")


def test_a_copy_that_cannot_be_kept_stops_the_migration(old: Path) -> None:
    copy_of(old, 0).mkdir()
    with pytest.raises(JournalError):
        Journal(old.parent, "prod")
    assert number(old) == 0
