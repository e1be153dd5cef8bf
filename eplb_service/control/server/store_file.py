"""Opens the SQLite file of a store, sets a damaged one aside, and says what was lost with a damaged write-ahead log."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import struct
import time
from pathlib import Path

import structlog

MEMORY = ":memory:"
"""A store that keeps nothing."""

_log = structlog.get_logger(__name__)

_APPLICATION_ID = 0x45504C42  # "EPLB"
_LOOKED_AT_BYTES = 1 << 16
_SCHEMA_VERSION = 2
_SCHEMA = """
CREATE TABLE IF NOT EXISTS service (leader_term INTEGER NOT NULL);
-- state: a StoredDeployment as JSON.
CREATE TABLE IF NOT EXISTS deployments (name TEXT PRIMARY KEY, state TEXT NOT NULL);
-- layout: an npz file of the placement and, where they do not follow from it by the rule, the tables.
CREATE TABLE IF NOT EXISTS first_layouts (deployment TEXT PRIMARY KEY, group_id TEXT NOT NULL, layout BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS plans (
    id INTEGER PRIMARY KEY,
    deployment TEXT NOT NULL,
    at REAL NOT NULL,
    leader_term INTEGER NOT NULL,
    base_epoch INTEGER NOT NULL,
    verdicts TEXT NOT NULL,
    outcome TEXT,
    reason TEXT NOT NULL DEFAULT '',
    committed INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS plans_of ON plans (deployment, id);
-- Rows of other tables that could not be read.
CREATE TABLE IF NOT EXISTS set_aside (
    at REAL NOT NULL, origin TEXT NOT NULL, reason TEXT NOT NULL, content TEXT NOT NULL
);
-- A row while a service runs; log_needed is 1 in the file itself and 0 in the newest change of the write-ahead log.
CREATE TABLE IF NOT EXISTS running (log_needed INTEGER NOT NULL);
"""


class StoreError(Exception):
    """A file that cannot be this service's store; the message says why and what to do."""


def open_store(path: str) -> tuple[sqlite3.Connection, list[str]]:
    """Open the store at ``path``, created if there is none, and say what was lost of it since it was last open.

    Raises ``StoreError`` if the file is something else or cannot be used.
    """
    if path != MEMORY and not Path(path).parent.is_dir():
        raise StoreError(f"cannot make the store {path!r}: its directory does not exist")
    database = None
    try:
        lost = _lost_changes(path)
        database, damage = connect(path)
        _check_kind(database, path)
        # Text that is not UTF-8 spoils its row, not the whole query.
        database.text_factory = lambda text: text.decode("utf-8", "replace")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        # Left to `copy_log_into_file`, which keeps account of it.
        database.execute("PRAGMA wal_autocheckpoint = 0")
        with database:
            # Fails here, where it is explained, if nothing can be written.
            database.execute("UPDATE service SET leader_term = leader_term")
    except (sqlite3.Error, StoreError) as error:
        if database is not None:
            database.close()
        if isinstance(error, StoreError):
            raise
        raise StoreError(
            f"cannot use {path!r} as the store: {error}; name a writable path that is new or was made by eplb"
        ) from error
    return database, [reason for reason in (damage or lost,) if reason]


def copy_log_into_file(database: sqlite3.Connection) -> None:
    """Write everything to the disk, and copy the changes in the write-ahead log into the file.

    A lost log then costs only later changes. That it is lost shows in ``log_needed``: the file says 1, and only the log
    says 0. Whoever copies the log into the file once more, such as a backup tool after a crash, takes the 0 with it.
    """
    database.execute("PRAGMA synchronous = FULL")
    try:
        with database:
            database.execute("DELETE FROM running")
            database.execute("INSERT INTO running VALUES (1)")
        database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        with database:
            database.execute("UPDATE running SET log_needed = 0")
    finally:
        database.execute("PRAGMA synchronous = NORMAL")


def close_store(database: sqlite3.Connection) -> None:
    """Write everything into the one file."""
    with contextlib.suppress(sqlite3.Error), database:
        database.execute("DELETE FROM running")
    database.close()


def connect(path: str) -> tuple[sqlite3.Connection, str]:
    """Return an open database that is whole, and why the one before it was set aside, if it was.

    The ranks hold the truth about what they serve, so a service without its history is better than none.
    """
    database = sqlite3.connect(path, timeout=5.0, check_same_thread=False)
    try:
        (state,) = database.execute("PRAGMA quick_check(1)").fetchone()
        reason = "" if state == "ok" else str(state)
    except sqlite3.OperationalError:
        # Locked, unreadable, or on a full disk: this says nothing about the file.
        database.close()
        raise
    except sqlite3.DatabaseError as error:
        reason = str(error)
    if not reason:
        return database, ""
    database.close()
    with Path(path).open("rb") as file:
        was_ours = b"TABLE deployments" in file.read(_LOOKED_AT_BYTES)
    if not was_ours:
        raise StoreError(f"{path!r} is no store of eplb ({reason}); name another, or move it away")
    aside = f"{path}.damaged-{_now()}"
    for suffix in ("", "-wal", "-shm"):
        if Path(path + suffix).exists():
            Path(path + suffix).rename(aside + suffix)
    _log.error("store_damaged", path=path, set_aside=aside, reason=reason)
    notice = f"the store was damaged ({reason}) and set aside as {aside}: pauses and history are lost"
    return sqlite3.connect(path, timeout=5.0, check_same_thread=False), notice


def _check_kind(database: sqlite3.Connection, path: str) -> None:
    """Create the tables that are missing; raises ``StoreError`` if the database is not a store of this schema."""
    (application,) = database.execute("PRAGMA application_id").fetchone()
    (version,) = database.execute("PRAGMA user_version").fetchone()
    (tables,) = database.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    if tables and application != _APPLICATION_ID:
        raise StoreError(f"{path!r} is a database of something else; name another store")
    if tables and version != _SCHEMA_VERSION:
        raise StoreError(
            f"{path!r} has schema version {version}, this release reads {_SCHEMA_VERSION}; "
            "use the release that wrote it, or name another store"
        )
    database.executescript(
        f"BEGIN; {_SCHEMA} PRAGMA application_id = {_APPLICATION_ID}; "
        f"PRAGMA user_version = {_SCHEMA_VERSION}; COMMIT;"
    )


def _lost_changes(path: str) -> str:
    """Return why the newest changes of a store that was not closed are lost with its write-ahead log, or nothing.

    SQLite itself ignores a log that is missing, and the rest of one from the first damaged page on.
    """
    log, index = Path(f"{path}-wal"), Path(f"{path}-shm")
    if path == MEMORY or not Path(path).is_file():
        return ""
    content = log.read_bytes() if log.is_file() else b""
    if not content:
        reason = "is missing" if _log_is_needed(path, has_index=index.exists()) else ""
    else:
        valid, written = _log_frames(content)
        committed = _committed_frames(index.read_bytes() if index.is_file() else b"", content)
        reason = "is damaged" if valid < (written if committed is None else committed) else ""
    if not reason:
        return ""
    aside = f"{log}.damaged-{_now()}"
    if content:
        shutil.copy(log, aside)
    _log.error(
        "store_log_lost", path=path, reason=f"its write-ahead log {reason}", set_aside=content and aside
    )
    return (
        f"the store's write-ahead log {reason}, and the newest changes with it: "
        "check which deployments are paused" + (f"; the log was kept as {aside}" if content else "")
    )


def _log_is_needed(path: str, *, has_index: bool) -> bool:
    """Return whether the file says that a service was stopped before it had written everything into the file."""
    try:
        with contextlib.closing(
            sqlite3.connect(f"{Path(path).absolute().as_uri()}?mode=ro&immutable=1", uri=True)
        ) as file:
            return bool(file.execute("SELECT MAX(log_needed) FROM running").fetchone()[0])
    except sqlite3.Error:
        # Stores of older releases do not say; the log's index is deleted together with it.
        return has_index


def _log_frames(log: bytes) -> tuple[int, int]:
    """Return how many frames of a write-ahead log SQLite will read, and how many belong to it by their salts.

    The format is that of https://www.sqlite.org/fileformat2.html#walformat.
    """
    if len(log) < 32:
        return 0, 1
    magic, _, page_bytes, _, _, _, *checksum = struct.unpack(">8I", log[:32])
    order = ">" if magic & 1 else "<"
    sums = _checksum(log[:24], (0, 0), order)
    if magic & ~1 != 0x377F0682 or list(sums) != checksum:
        return 0, 1
    valid, written, frame_bytes = 0, 0, 24 + page_bytes
    for number, start in enumerate(range(32, len(log) - frame_bytes + 1, frame_bytes)):
        head, page = log[start : start + 24], log[start + 24 : start + frame_bytes]
        if head[8:16] != log[16:24]:
            continue
        written = number + 1
        if valid == number:
            sums = _checksum(head[:8] + page, sums, order)
            valid += sums == struct.unpack(">2I", head[16:])
    # SQLite writes whole frames: a part of one is all that is left of it, and of those after it.
    return valid, written + ((len(log) - 32) % frame_bytes > 0)


def _checksum(content: bytes, sums: tuple[int, int], order: str) -> tuple[int, int]:
    """Return the running checksum of a write-ahead log after ``content``."""
    integers_32 = iter(struct.unpack(f"{order}{len(content) // 4}I", content))
    first, second = sums
    for even, odd in zip(integers_32, integers_32, strict=True):
        first = (first + even + second) & 0xFFFFFFFF
        second = (second + odd + first) & 0xFFFFFFFF
    return first, second


def _committed_frames(index: bytes, log: bytes) -> int | None:
    """Return how many frames were committed by the log's index, which outlives a killed process; ``None``: unknown."""
    head = index[:48]
    if len(index) < 96 or head != index[48:96] or head[32:40] != log[16:24]:
        return None
    committed: int = struct.unpack_from("=I", head, 16)[0]
    return committed


def _now() -> str:
    return time.strftime("%Y%m%dT%H%M%S", time.gmtime())
