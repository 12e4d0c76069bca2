"""What a journal may forget, as statements on its tables.

Recovery reads the records from the first to the last: it needs the last two publications, the updates that those went
back to, the highest version that was decided, and whatever belongs to an update that runs. Everything else is history.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

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
