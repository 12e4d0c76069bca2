"""The coordinator's memory: SQLite in WAL mode with `synchronous=FULL`, and manifests as files beside it
(`manifests`). It does not grow without end: `schema` says what may go.

Every write is one transaction that first checks the ownership row, so a coordinator that was frozen and wakes up
after another took over cannot record anything (hazard 12: a file lock is not enough). After any error the journal is
closed for good: a read after a failed fsync proves nothing, so the process must stop and recover.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from updater.coordinator.journal import schema
from updater.coordinator.journal.manifests import ManifestFiles
from updater.core.errors import Failure, LiveweightsError
from updater.core.fleet.effects import Record, RecordKind
from updater.protocol import wire

_ROOM = 512 << 10
_GONE = 1000  # how many of the last that were removed or replaced are remembered
_REQUEST = "id, serial, kind, body_hash, body, created, receipt, facts"


class JournalError(LiveweightsError):
    """The journal could not be written or read. The coordinator stops; what was appended last is unknown to it."""

    def __init__(self, message: str) -> None:
        super().__init__(Failure("journal_failed", message))


class OwnershipLost(JournalError):
    """Another coordinator took the fleet over: this one may do nothing more."""


@dataclass(frozen=True, slots=True)
class RequestRow:
    """A request that was taken in. `serial` 0: it ended before its turn came. `receipt`: JSON text, or None while
    it runs. `facts`: what its vote settled, as JSON text, or None before it.
    """

    id: str
    serial: int
    kind: str
    body_hash: str
    body: str
    created: float
    receipt: str | None
    facts: str | None = None


@dataclass(frozen=True, slots=True)
class KnownReplica:
    """A replica as it joined last."""

    replica: str
    incarnation: str
    url: str
    config_hash: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """A durable record and when it was written, in Unix seconds."""

    record: Record
    at: float


class Journal:
    """One fleet's journal in `folder`. Every method raises JournalError; after that every further call does.

    Opening one may raise JournalRefused. `new`: there was none in the folder. `on_error`: called with the first error,
    before it is raised.
    """

    def __init__(self, folder: Path, fleet: str) -> None:
        self._fleet = fleet
        self._owner: tuple[int, str] | None = None
        self._broken = ""
        self.on_error: Callable[[JournalError], None] = lambda _error: None
        with self._guarded():
            self._files = ManifestFiles(folder / "manifests")
            # One thread at a time uses the connection: the loop of the coordinator that owns it.
            file = folder / "journal.sqlite3"
            self._db = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA busy_timeout = 5000")
            mode = self._db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            self._db.execute("PRAGMA synchronous = FULL")
            if mode != "wal":
                raise OSError(f"journal mode is {mode}, not wal")
            self._db.execute("PRAGMA wal_autocheckpoint = 0")  # `tidy` does it, never an append
            self.new = schema.open_tables(self._db, file, fleet)

    # -- ownership

    def epoch(self) -> int:
        """The highest epoch that anybody claimed, 0 at first."""
        rows = self._read("SELECT epoch FROM ownership WHERE fleet = ?", self._fleet)
        return int(rows[0][0]) if rows else 0

    def claim(self, owner: str, at_least: int = 0) -> int:
        """Take the fleet over; returns the new epoch, one more than both what is recorded and `at_least`.

        Compare-and-set: of two that claim at once, one raises OwnershipLost.
        """
        with self._guarded():
            seen = self._db.execute("SELECT epoch, owner FROM ownership WHERE fleet = ?", (self._fleet,)).fetchone()
            epoch = max(seen[0] if seen else 0, at_least) + 1
            if seen is None:
                sql, values = "INSERT OR IGNORE INTO ownership VALUES (?, ?, ?, 1)", (self._fleet, epoch, owner)
            else:
                sql = (
                    "UPDATE ownership SET epoch = ?, owner = ?, claims = claims + 1"
                    " WHERE fleet = ? AND epoch = ? AND owner = ?"
                )
                values = (epoch, owner, self._fleet, *seen)
            if self._db.execute(sql, values).rowcount != 1:
                raise OwnershipLost("another coordinator claimed this fleet at the same moment")
        self._owner = (epoch, owner)
        self._make_room()
        return epoch

    def must_own(self) -> None:
        """Raises OwnershipLost if another coordinator has taken the fleet over."""
        with self._guarded():
            self._check_owner()

    # -- who the fleet is (I11)

    def identity(self) -> str:
        """Random, made with the journal, or that of the fleet which was adopted. A fleet of before there were
        identities has its name."""
        rows = self._read("SELECT identity FROM lineage WHERE fleet = ?", self._fleet)
        return str(rows[0][0]) if rows else ""

    def adopt(self, identity: str) -> None:
        """From now on this is the journal of that fleet."""
        with self._owned() as db:
            db.execute("INSERT OR REPLACE INTO lineage VALUES (?, ?, 0)", (self._fleet, identity))

    def taken_over(self) -> bool:
        """Whether this fleet's coordinator was once refused because another one led it."""
        rows = self._read("SELECT taken_over FROM lineage WHERE fleet = ?", self._fleet)
        return bool(rows and rows[0][0])

    def put_taken_over(self) -> None:
        with self._owned() as db:
            db.execute("UPDATE lineage SET taken_over = 1 WHERE fleet = ?", (self._fleet,))

    def _make_room(self) -> None:
        """Grow the log once to what some updates need."""
        for statement in ("INSERT INTO room VALUES (zeroblob(?))", "DELETE FROM room WHERE length(filler) = ?"):
            with self._owned() as db:
                db.execute(statement, (_ROOM,))
        self.tidy()

    def tidy(self) -> None:
        """Write back what the log holds, so that the next records overwrite its space instead of making it longer: an
        append is then one sync of data, without a transaction of the file system. Not within a pause."""
        with self._guarded():
            self._db.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()

    # -- requests and receipts

    def add_request(self, request: RequestRow) -> None:
        """Take a request in, before anything is sent because of it."""
        with self._owned() as db:
            db.execute(
                f"INSERT INTO requests ({_REQUEST}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    request.id,
                    request.serial,
                    request.kind,
                    request.body_hash,
                    request.body,
                    request.created,
                    request.receipt,
                    request.facts,
                ),
            )

    def put_receipt(self, request_id: str, receipt: str) -> None:
        self._set(request_id, "receipt", receipt)

    def put_facts(self, request_id: str, facts: str) -> None:
        """What is known of a running update from its vote on. Not within a pause."""
        self._set(request_id, "facts", facts)

    def _set(self, request_id: str, column: str, text: str) -> None:
        with self._owned() as db:
            changed = db.execute(f"UPDATE requests SET {column} = ? WHERE id = ?", (text, request_id)).rowcount
            if changed != 1:
                raise OSError(f"no request {request_id!r}")

    def request(self, request_id: str) -> RequestRow | None:
        rows = self._read(f"SELECT {_REQUEST} FROM requests WHERE id = ?", request_id)
        return RequestRow(*rows[0]) if rows else None

    def requests(self, *, limit: int = 1000, running: bool = False) -> tuple[RequestRow, ...]:
        """Newest first; `running`: only those without a receipt."""
        where = "WHERE receipt IS NULL" if running else ""
        return tuple(
            RequestRow(*row)
            for row in self._read(f"SELECT {_REQUEST} FROM requests {where} ORDER BY seq DESC LIMIT ?", limit)
        )

    def last_serial(self) -> int:
        """The highest serial in use, 0 at first."""
        serials = "SELECT serial FROM requests UNION SELECT serial FROM records"
        rows = self._read(f"SELECT coalesce(max(serial), 0) FROM ({serials})")
        return int(rows[0][0])

    # -- records

    def append(self, record: Record, at: float) -> None:
        """Make one record durable. One that is already there changes nothing (I7).

        The manifest, which may be megabytes, is kept as a file of its own and written first.
        """
        manifest = self.keep_manifest(record.manifest) if record.manifest else ""
        text = wire.encode(replace(record, manifest="")).decode()
        with self._owned() as db:
            db.execute(
                "INSERT INTO records (epoch, serial, attempt, kind, record, manifest, at) VALUES (?, ?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (serial, attempt, kind) DO NOTHING",
                (record.epoch, record.serial, record.attempt, record.kind.value, text, manifest, at),
            )

    def entries(self) -> tuple[Entry, ...]:
        """Every record in the order of writing."""
        rows = self._read("SELECT record, manifest, at FROM records ORDER BY seq")
        return tuple(Entry(self._record(text, manifest), at) for text, manifest, at in rows)

    def records(self) -> tuple[Record, ...]:
        return tuple(entry.record for entry in self.entries())

    def published_at(self) -> float | None:
        """Since when what is live is live."""
        rows = self._read("SELECT at FROM records WHERE kind = ? ORDER BY seq DESC LIMIT 1", RecordKind.PUBLISHED.value)
        return rows[0][0] if rows else None

    def newest(self) -> float:
        """The last time of any entry, in Unix seconds; 0 where there is none."""
        times = (
            "SELECT at FROM records UNION ALL SELECT created FROM requests UNION ALL"
            " SELECT json_extract(receipt, '$.ended_at') FROM requests WHERE json_valid(receipt)"
        )
        return float(self._read(f"SELECT coalesce(max(at), 0) FROM ({times})")[0][0])

    def _record(self, text: str, manifest: str) -> Record:
        with self._guarded():
            try:
                record = wire.decode(Record, text)
            except wire.WireError as error:
                raise OSError(f"a record cannot be read: {error}") from error
        if not manifest:
            return record
        kept = self.manifest(manifest)
        with self._guarded():
            if kept is None:
                raise OSError(f"manifest {manifest} is missing")
        return replace(record, manifest=kept)

    # -- members

    def put_member(self, member: KnownReplica) -> None:
        """Another incarnation of the same replica is gone by that."""
        with self._owned() as db:
            values = (member.replica, member.incarnation, member.url, member.config_hash)
            self._note_gone(db, member.replica, but=member.incarnation)
            db.execute("DELETE FROM gone WHERE replica = ? AND incarnation = ?", values[:2])
            db.execute("INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?)", values)

    def remove_member(self, replica: str) -> None:
        with self._owned() as db:
            self._note_gone(db, replica)
            db.execute("DELETE FROM members WHERE replica = ?", (replica,))

    def forget_member(self, replica: str) -> None:
        """As if it had never joined: nothing is said of it."""
        with self._owned() as db:
            db.execute("DELETE FROM members WHERE replica = ?", (replica,))

    def _note_gone(self, db: sqlite3.Connection, replica: str, but: str | None = None) -> None:
        gone = "SELECT replica, incarnation FROM members WHERE replica = ? AND incarnation IS NOT ?"
        db.execute(f"INSERT INTO gone (replica, incarnation) {gone}", (replica, but))
        db.execute("DELETE FROM gone WHERE seq <= (SELECT max(seq) FROM gone) - ?", (_GONE,))

    def gone(self) -> tuple[tuple[str, str], ...]:
        """(replica, incarnation) of the last that were removed or replaced, the oldest first."""
        return tuple((row[0], row[1]) for row in self._read("SELECT replica, incarnation FROM gone ORDER BY seq"))

    def members(self) -> tuple[KnownReplica, ...]:
        return tuple(KnownReplica(*row) for row in self._read("SELECT * FROM members ORDER BY replica"))

    # -- manifests

    def put_manifest(self, digest: str, text: str) -> None:
        """Keep a manifest under its SHA-256. Raises ValueError if the text has another digest."""
        with self._guarded():
            self._files.put(digest, text)

    def keep_manifest(self, text: str) -> str:
        """Keep a manifest and return its name. Asked again for the last one, it neither hashes nor writes: an update
        names its manifest here when it begins, so that nothing of its size is left for the pause."""
        with self._guarded():
            return self._files.keep(text)

    def manifest(self, digest: str) -> str | None:
        """Raises ValueError for what is no digest."""
        with self._guarded():
            return self._files.text(digest)

    # -- the end of what is remembered

    def prune(self, keep: int, shorten: Callable[[str], str], named: Collection[str], now: float) -> None:
        """Forget what only history needs: all but the last `keep` requests and what recovery may ask for.

        `shorten`: makes the receipt that stays of an older request, so that its id still has no second effect (I7).
        `named`: manifests of updates that run. `now`: Unix seconds. Not within a pause.
        """
        with self._owned() as db:
            schema.shorten_requests(db, keep, shorten)
            schema.drop_records(db, keep)
            names = {row[0] for row in db.execute("SELECT DISTINCT manifest FROM records")}
        with self._guarded():
            self._files.sweep({*names, *named}, now)
        self.tidy()

    # -- life

    def close(self) -> None:
        """Let go of the files; calls after this raise."""
        self._broken = self._broken or "closed"
        self._db.close()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        if self._broken:
            raise JournalError(self._broken)
        try:
            yield
        except JournalError as lost:
            self._fail(lost)
            raise
        except (sqlite3.Error, OSError) as error:
            broken = JournalError(f"{type(error).__name__}: {error}")
            self._fail(broken)
            raise broken from error

    def _fail(self, error: JournalError) -> None:
        if not self._broken:  # else it was told by a call inside this one
            self._broken = str(error)
            self.on_error(error)

    @contextmanager
    def _owned(self) -> Iterator[sqlite3.Connection]:
        """One transaction that commits only for the owner. The commit is the fsync."""
        with self._guarded():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._check_owner()
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _check_owner(self) -> None:
        row = self._db.execute("SELECT epoch, owner FROM ownership WHERE fleet = ?", (self._fleet,)).fetchone()
        if self._owner is None or row != self._owner:
            raise OwnershipLost(f"another coordinator took this fleet over, with epoch {row[0] if row else 0}")

    def _read(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._guarded():
            return self._db.execute(sql, values).fetchall()


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces: what is stored, and what body hashes are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
