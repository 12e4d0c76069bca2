"""The journal: what was appended is there after a crash, and only the owner appends."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from updater.coordinator.journal.journal import Journal, JournalError, KnownReplica, OwnershipLost, RequestRow
from updater.coordinator.journal.manifests import UNNAMED_S
from updater.core.fleet.effects import Record, RecordKind
from updater.core.participant import DiskOffer, Kind
from updater.core.policy import Policy
from updater.core.version import Version
from updater.protocol import wire


def record(
    serial: int = 1, kind: RecordKind = RecordKind.DECIDED, step: int = 7, attempt: int = 1, manifest: str = ""
) -> Record:
    return Record(
        kind,
        epoch=1,
        serial=serial,
        attempt=attempt,
        update="a",
        body_hash="hash",
        op=Kind.UPDATE,
        version=Version(0, step),
        digest="d",
        manifest_digest="m",
        members=(("r1", "i1"),),
        offer=DiskOffer("/ckpts/v7"),
        manifest=manifest,
        policy=Policy(allow_narrowing=(("F32", "BF16"),)),
    )


def kinds(journal: Journal) -> list[str]:
    return [entry.kind.value for entry in journal.records()]


def request(name: str = "a", serial: int = 1) -> RequestRow:
    return RequestRow(name, serial, "update", "hash", "{}", 1.0, None)


def owned(folder: Path, owner: str = "one") -> Journal:
    journal = Journal(folder, "fleet")
    journal.claim(owner)
    return journal


def test_epochs_grow_above_what_is_recorded_and_what_members_report(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "fleet")
    assert journal.epoch() == 0
    assert journal.claim("one") == 1
    assert journal.claim("one", at_least=7) == 8
    assert Journal(tmp_path, "fleet").claim("two") == 9


def test_a_coordinator_that_wakes_up_after_another_took_over_can_append_nothing(tmp_path: Path) -> None:
    frozen = owned(tmp_path, "frozen")
    frozen.append(record(), 1.0)
    awake = owned(tmp_path, "awake")
    with pytest.raises(OwnershipLost):
        frozen.append(record(kind=RecordKind.PUBLISHED), 2.0)
    assert kinds(awake) == ["decided"]
    # It stays dead: nothing that it does afterwards counts, not even a read.
    with pytest.raises(JournalError):
        frozen.records()
    awake.append(record(kind=RecordKind.PUBLISHED), 2.0)


def test_of_two_that_claim_at_once_one_loses(tmp_path: Path) -> None:
    """Both have read the same owner; the row is changed by compare-and-set."""
    owned(tmp_path)
    late, early = Journal(tmp_path, "fleet"), Journal(tmp_path, "fleet")
    taken: list[int] = []

    class Interleaved:
        """The connection of `late`, letting `early` in between its read and its write."""

        def __init__(self, inner: sqlite3.Connection) -> None:
            self.inner = inner

        def execute(self, sql: str, *values: object) -> sqlite3.Cursor:
            if sql.startswith("UPDATE ownership"):
                taken.append(early.claim("early"))
            return self.inner.execute(sql, *values)

    late._db = Interleaved(late._db)  # type: ignore[assignment]
    with pytest.raises(OwnershipLost):
        late.claim("late")
    assert taken == [2]
    early.append(record(), 1.0)


def test_nothing_is_written_without_a_claim(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "fleet")
    with pytest.raises(OwnershipLost):
        journal.append(record(), 1.0)
    assert Journal(tmp_path, "fleet").records() == ()


def test_a_repeated_record_changes_nothing(tmp_path: Path) -> None:
    journal = owned(tmp_path)
    journal.append(record(), 1.0)
    journal.append(record(step=8), 2.0)
    assert [(entry.record.version.step, entry.at) for entry in journal.entries()] == [(7, 1.0)]


def test_a_record_comes_back_whole_with_its_manifest_from_a_file(tmp_path: Path) -> None:
    journal = owned(tmp_path)
    written = record(manifest='{"tensors":[]}')
    journal.append(written, 1.0)
    assert journal.records() == (written,)
    assert journal.published_at() is None
    journal.append(record(kind=RecordKind.PUBLISHED), 2.0)
    journal.append(record(serial=2, step=8), 3.0)
    assert journal.published_at() == 2.0


def test_a_record_without_its_manifest_is_a_failed_journal(tmp_path: Path) -> None:
    journal = owned(tmp_path)
    journal.append(record(manifest="{}"), 1.0)
    for path in (tmp_path / "manifests").iterdir():
        path.unlink()
    with pytest.raises(JournalError):
        journal.records()


def test_requests_members_and_receipts_come_back(tmp_path: Path) -> None:
    journal = owned(tmp_path)
    journal.add_request(request("a", 1))
    journal.add_request(request("b", 2))
    journal.put_receipt("a", '{"outcome":"committed"}')
    journal.put_member(KnownReplica("r1", "i1", "http://127.0.0.1:1"))
    journal.put_member(KnownReplica("r1", "i1", "http://127.0.0.1:2"))
    journal.put_member(KnownReplica("r0", "i1", "http://127.0.0.1:3"))
    journal.close()
    again = Journal(tmp_path, "fleet")
    assert again.last_serial() == 2
    assert [entry.id for entry in again.requests()] == ["b", "a"]
    assert [entry.id for entry in again.requests(running=True)] == ["b"]
    found = again.request("a")
    assert found is not None
    assert found.receipt == '{"outcome":"committed"}'
    assert again.request("c") is None
    assert [(m.replica, m.url[-1]) for m in again.members()] == [("r0", "3"), ("r1", "2")]


def test_an_id_is_used_once(tmp_path: Path) -> None:
    journal = owned(tmp_path)
    journal.add_request(request("a", 1))
    with pytest.raises(JournalError):
        journal.add_request(request("a", 2))


def test_any_error_ends_the_journal(tmp_path: Path) -> None:
    """Hazard 19: after a failed write a read-back proves nothing."""
    journal = owned(tmp_path)
    with pytest.raises(JournalError):
        journal.put_receipt("no such request", "{}")
    for call in (journal.records, journal.published_at, journal.members, lambda: journal.append(record(), 1.0)):
        with pytest.raises(JournalError):
            call()
    assert owned(tmp_path).records() == ()


def test_a_full_disk_is_a_failed_journal_and_leaves_the_old_content(tmp_path: Path) -> None:
    journal = owned(tmp_path)
    journal.append(record(), 1.0)
    pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
    journal._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(JournalError):
        journal.put_member(KnownReplica("r1", "i1", "x" * 1_000_000))
    assert kinds(Journal(tmp_path, "fleet")) == ["decided"]


def test_manifests_are_named_by_their_digest(tmp_path: Path) -> None:
    journal = owned(tmp_path)
    digest = hashlib.sha256(b"{}").hexdigest()
    with pytest.raises(ValueError):
        journal.put_manifest(digest, "{} ")
    assert journal.manifest(digest) is None
    journal.put_manifest(digest, "{}")
    journal.put_manifest(digest, "{}")
    assert journal.manifest(digest) == "{}"
    assert [path.name for path in (tmp_path / "manifests").iterdir()] == [f"{digest}.json"]
    for name in ("../journal.sqlite3", "A" * 64, "", digest + "/.."):
        assert journal.manifest(name) is None
        with pytest.raises(ValueError):
            journal.put_manifest(name, "{}")


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite3").write_bytes(b"not a database" * 1000)
    with pytest.raises(JournalError):
        Journal(tmp_path, "fleet")


def test_every_commit_is_synced(tmp_path: Path) -> None:
    journal = owned(tmp_path)
    assert journal._db.execute("PRAGMA synchronous").fetchone()[0] == 2  # FULL
    assert journal._db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"


def test_what_was_appended_survives_a_process_that_dies_at_once(tmp_path: Path) -> None:
    """The process ends without closing anything, between its second append and a third that was never committed."""
    program = """
        import os, sys
        from dataclasses import replace
        from pathlib import Path
        from updater.protocol import wire
        from updater.core.fleet.effects import Record, RecordKind
        from updater.coordinator.journal.journal import Journal
        journal, record = Journal(Path(sys.argv[1]), "fleet"), wire.decode(Record, sys.argv[2])
        journal.claim("one")
        journal.append(record, 1.0)
        journal.append(replace(record, kind=RecordKind.PUBLISHED), 2.0)
        journal._db.execute("BEGIN IMMEDIATE")
        journal._db.execute("DELETE FROM records")
        os.kill(os.getpid(), 9)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path), wire.encode(record()).decode()]
    assert subprocess.run(command, env=os.environ, timeout=200).returncode == -9
    journal = owned(tmp_path, "two")
    assert kinds(journal) == ["decided", "published"]
    assert journal.epoch() == 2


def test_updates_do_not_make_the_log_longer(tmp_path: Path) -> None:
    """What an append costs inside a pause depends on it: overwriting needs no file system transaction."""
    journal = owned(tmp_path)
    log = tmp_path / "journal.sqlite3-wal"
    size = log.stat().st_size
    for serial in range(1, 20):
        journal.add_request(request(str(serial), serial))
        journal.append(record(serial), 1.0)
        journal.append(record(serial, kind=RecordKind.PUBLISHED), 2.0)
        journal.put_receipt(str(serial), "x" * 5000)
        journal.tidy()
        assert log.stat().st_size == size
    assert len(Journal(tmp_path, "fleet").records()) == 38


def published(journal: Journal, serial: int, step: int, op: Kind = Kind.UPDATE, manifest: str = "") -> None:
    for kind in (RecordKind.DECIDED, RecordKind.PUBLISHED):
        journal.append(replace(record(serial, kind, step, manifest=manifest), op=op, digest=f"d{step}"), 1.0)
    journal.add_request(request(str(serial), serial))
    journal.put_receipt(str(serial), f"long {serial}")


def short(receipt: str) -> str:
    return receipt.replace("long", "short")


def test_old_requests_keep_a_short_receipt_and_very_old_ones_nothing(tmp_path: Path) -> None:
    journal = owned(tmp_path)
    for serial in range(1, 51):
        published(journal, serial, serial)
    journal.add_request(request("running", 51))
    journal.prune(2, short, (), 1.0)
    receipts = {each.id: each.receipt for each in journal.requests()}
    assert receipts == {
        "running": None,
        "50": "long 50",
        **{str(serial): f"short {serial}" for serial in range(12, 50)},
    }
    journal.prune(2, short, (), 1.0)
    assert {each.id: each.receipt for each in journal.requests()} == receipts
    assert journal.last_serial() == 51


def test_what_recovery_needs_of_old_updates_stays(tmp_path: Path) -> None:
    journal = owned(tmp_path)
    published(journal, 1, 1)
    published(journal, 2, 99)  # the highest
    published(journal, 3, 3)
    published(journal, 4, 4)
    journal.append(record(5, step=5), 1.0)  # decided, and its request has no receipt
    journal.add_request(request("5", 5))
    for serial in range(6, 16):
        published(journal, serial, 3 if serial % 2 == 0 else 4, Kind.ROLLBACK)
    journal.prune(1, short, (), 1.0)
    left = [(each.serial, each.op.value, each.version.step) for each in journal.records()]
    twice = [(2, "update", 99), (3, "update", 3), (4, "update", 4)]
    expected = [each for each in twice for _ in range(2)] + [(5, "update", 5)]
    assert left == expected + [(14, "rollback", 3)] * 2 + [(15, "rollback", 4)] * 2


def test_manifests_that_nobody_names_are_removed_once_they_are_old(tmp_path: Path) -> None:
    journal = owned(tmp_path)
    for serial in range(1, 4):
        published(journal, serial, serial, manifest=f'{{"m":{serial}}}')
    files = tmp_path / "manifests"
    begun, uploaded = journal.keep_manifest('{"begun":1}'), hashlib.sha256(b'{"up":1}').hexdigest()
    journal.put_manifest(uploaded, '{"up":1}')
    (files / "tmpleftover").write_text("half")
    now = (files / f"{uploaded}.json").stat().st_mtime
    journal.prune(1, short, (begun,), now + UNNAMED_S - 60)
    assert len(list(files.iterdir())) == 6
    os.utime(files / f"{uploaded}.json", (now, now - UNNAMED_S - 10))
    journal.put_manifest(uploaded, '{"up":1}')  # its time begins anew
    journal.prune(1, short, (begun,), now + 1)
    assert journal.manifest(uploaded) is not None
    journal.prune(1, short, (begun,), now + UNNAMED_S + 60)
    names = {hashlib.sha256(text).hexdigest() for text in (b'{"m":2}', b'{"m":3}')} | {begun}
    assert {path.stem for path in files.iterdir()} == names
    # What was swept is written again when it is asked for again.
    assert journal.keep_manifest('{"m":1}') not in names
    assert len(list(files.iterdir())) == 4
    assert [each.manifest for each in journal.records()] == ['{"m":2}'] * 2 + ['{"m":3}'] * 2


def test_facts_come_back(tmp_path: Path) -> None:
    journal = owned(tmp_path)
    journal.add_request(request("a", 1))
    journal.put_facts("a", '{"proof":"digests"}')
    found = Journal(tmp_path, "fleet").request("a")
    assert found == replace(request("a", 1), facts='{"proof":"digests"}')
