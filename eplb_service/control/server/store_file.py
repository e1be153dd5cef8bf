"""SQLite file of the store: opening it, setting a damaged file aside, and detecting a lost write-ahead log."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import struct
import time
from pathlib import Path

import structlog

MEMORY = ":memory:"
"""Path of a store that is kept in memory and lost with the process."""

_log = structlog.get_logger(__name__)

_APPLICATION_ID = 0x45504C42  # "EPLB"
_INSPECTED_BYTES = 1 << 16
_SCHEMA_VERSION = 2
_SCHEMA = """
CREATE TABLE IF NOT EXISTS service (leader_term INTEGER NOT NULL);
-- state: a StoredDeployment as JSON.
CREATE TABLE IF NOT EXISTS deployments (name TEXT PRIMARY KEY, state TEXT NOT NULL);
-- layout: an npz file with the placement and, unless they are the default ones, the tables.
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
-- Unreadable rows of the other tables.
CREATE TABLE IF NOT EXISTS set_aside (
    at REAL NOT NULL, origin TEXT NOT NULL, reason TEXT NOT NULL, content TEXT NOT NULL
);
-- Has a row while a service runs. log_needed is 1 in the file itself and 0 in the write-ahead log.
CREATE TABLE IF NOT EXISTS running (log_needed INTEGER NOT NULL);
"""


class StoreError(Exception):
    """Raised when a file cannot be used as the store. The error message names the reason and the remedy."""


def open_store(path: str) -> tuple[sqlite3.Connection, list[str]]:
    """Open the store at ``path``, creating it if necessary.

    Raises ``StoreError`` if the file is not a store or cannot be used.

    Returns
    -------
    database : sqlite3.Connection
        The open store.
    losses : list of str
        Descriptions of the data that was lost since the store was last opened, for operators.
    """
    if path != MEMORY and not Path(path).parent.is_dir():
        raise StoreError(f"cannot create the store {path!r}: its directory does not exist")
    database = None
    try:
        log_loss = _describe_log_loss(path)
        database, damage = connect(path)
        _check_kind(database, path)
        # Text that is not valid UTF-8 must make only its own row unreadable instead of failing the whole query.
        database.text_factory = lambda text: text.decode("utf-8", "replace")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        # Only ``copy_log_into_file`` may checkpoint, because it keeps ``log_needed`` correct.
        database.execute("PRAGMA wal_autocheckpoint = 0")
        with database:
            # If the file is read-only, fail now with an explanation, not at the first real write.
            database.execute("UPDATE service SET leader_term = leader_term")
    except (sqlite3.Error, StoreError) as error:
        if database is not None:
            database.close()
        if isinstance(error, StoreError):
            raise
        raise StoreError(
            f"cannot use {path!r} as the store: {error}; specify a writable path for a new or existing store"
        ) from error
    loss = damage or log_loss
    return database, [loss] if loss else []


def copy_log_into_file(database: sqlite3.Connection) -> None:
    """Flush all changes to the disk and copy them from the write-ahead log into the file.

    If the log is lost later, only the changes after this call are lost. The column ``log_needed`` reveals such a loss.
    It is 1 in the file, and only the log sets it to 0. If another program, such as a backup tool, copies the log into
    the file after a crash, it copies the 0 as well. This is correct, because nothing is lost in that case.
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
    """Close the store, leaving all changes in the file and no write-ahead log."""
    with contextlib.suppress(sqlite3.Error), database:
        database.execute("DELETE FROM running")
    database.close()


def connect(path: str) -> tuple[sqlite3.Connection, str]:
    """Open the database, replacing it with a new one if it is damaged.

    A service without its history is better than no service, because the ranks themselves hold their current layout.
    Raises ``StoreError`` if the file is not an eplb store.

    Returns
    -------
    database : sqlite3.Connection
        An undamaged database.
    notice : str
        Reason why the existing file was set aside, for operators; empty if it is used.
    """
    database = sqlite3.connect(path, timeout=5.0, check_same_thread=False)
    try:
        (state,) = database.execute("PRAGMA quick_check(1)").fetchone()
        reason = "" if state == "ok" else str(state)
    except sqlite3.OperationalError:
        # The file is locked, unreadable, or on a full disk, but not necessarily damaged.
        database.close()
        raise
    except sqlite3.DatabaseError as error:
        reason = str(error)
    if not reason:
        return database, ""
    database.close()
    with Path(path).open("rb") as file:
        is_store = b"TABLE deployments" in file.read(_INSPECTED_BYTES)
    if not is_store:
        raise StoreError(
            f"{path!r} is not an eplb store ({reason}); move it elsewhere, or specify another file with --store"
        )
    aside = f"{path}.damaged-{_now()}"
    for suffix in ("", "-wal", "-shm"):
        if Path(path + suffix).exists():
            Path(path + suffix).rename(aside + suffix)
    _log.error("store_damaged", path=path, set_aside=aside, reason=reason)
    notice = f"the store was damaged ({reason}) and set aside as {aside}: pauses and history are lost"
    return sqlite3.connect(path, timeout=5.0, check_same_thread=False), notice


def _check_kind(database: sqlite3.Connection, path: str) -> None:
    """Create missing tables; raises ``StoreError`` if the database is not a store or has a different schema version."""
    (application,) = database.execute("PRAGMA application_id").fetchone()
    (version,) = database.execute("PRAGMA user_version").fetchone()
    (tables,) = database.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    if tables and application != _APPLICATION_ID:
        raise StoreError(f"{path!r} belongs to another application; specify another file with --store")
    if tables and version != _SCHEMA_VERSION:
        raise StoreError(
            f"{path!r} has schema version {version}, but this release reads version {_SCHEMA_VERSION}; "
            "use the release that wrote it, or specify another file with --store"
        )
    database.executescript(
        f"BEGIN; {_SCHEMA} PRAGMA application_id = {_APPLICATION_ID}; "
        f"PRAGMA user_version = {_SCHEMA_VERSION}; COMMIT;"
    )


def _describe_log_loss(path: str) -> str:
    """Return a description of the loss if the write-ahead log is missing or damaged; empty if nothing is lost.

    The log contains the newest changes if the store was not closed. SQLite itself silently ignores a missing log, and
    the part of a damaged log that starts at the first damaged page.
    """
    log = Path(f"{path}-wal")
    index = Path(f"{path}-shm")
    if path == MEMORY or not Path(path).is_file():
        return ""
    content = log.read_bytes() if log.is_file() else b""
    reason = ""
    if not content:
        if _is_log_needed(path, has_index=index.exists()):
            reason = "is missing"
    else:
        valid_frames, written_frames = _count_frames(content)
        committed_frames = _committed_frames(index.read_bytes() if index.is_file() else b"", content)
        if valid_frames < (written_frames if committed_frames is None else committed_frames):
            reason = "is damaged"
    if not reason:
        return ""
    aside = f"{log}.damaged-{_now()}"
    if content:
        shutil.copy(log, aside)
    _log.error(
        "store_log_lost", path=path, reason=f"its write-ahead log {reason}", set_aside=content and aside
    )
    return (
        f"the store's write-ahead log {reason}, so the newest changes are lost: "
        "check which deployments are paused" + (f"; the log was kept as {aside}" if content else "")
    )


def _is_log_needed(path: str, *, has_index: bool) -> bool:
    """Return True if the file shows that its service stopped before copying all changes into it."""
    try:
        with contextlib.closing(
            sqlite3.connect(f"{Path(path).absolute().as_uri()}?mode=ro&immutable=1", uri=True)
        ) as file:
            return bool(file.execute("SELECT MAX(log_needed) FROM running").fetchone()[0])
    except sqlite3.Error:
        # Stores created by older releases do not have this table. SQLite deletes the log and its index together, so an
        # index without a log means that the log was lost.
        return has_index


def _count_frames(log: bytes) -> tuple[int, int]:
    """Count the frames of a write-ahead log in SQLite's format.

    Returns
    -------
    valid : int
        Number of frames that SQLite will read, up to the first damaged one.
    written : int
        Number of frames that were written since the log was last reset, as shown by their salts.

    References
    ----------
    https://www.sqlite.org/fileformat2.html#walformat
    """
    if len(log) < 32:
        return 0, 1
    magic, _, page_bytes, _, _, _, *checksum = struct.unpack(">8I", log[:32])
    order = ">" if magic & 1 else "<"
    sums = _checksum(log[:24], (0, 0), order)
    if magic & ~1 != 0x377F0682 or list(sums) != checksum:
        return 0, 1
    valid = 0
    written = 0
    frame_bytes = 24 + page_bytes
    for number, start in enumerate(range(32, len(log) - frame_bytes + 1, frame_bytes)):
        head = log[start : start + 24]
        page = log[start + 24 : start + frame_bytes]
        if head[8:16] != log[16:24]:
            continue
        written = number + 1
        if valid == number:
            sums = _checksum(head[:8] + page, sums, order)
            valid += sums == struct.unpack(">2I", head[16:])
    # SQLite writes entire frames, so an incomplete one at the end is the remainder of a truncated log.
    return valid, written + ((len(log) - 32) % frame_bytes > 0)


def _checksum(content: bytes, sums: tuple[int, int], order: str) -> tuple[int, int]:
    """Return the running checksum of a write-ahead log after ``content``.

    Parameters
    ----------
    content
        Bytes to add, a multiple of eight.
    sums
        Checksum of the preceding bytes.
    order
        Byte order of the 32-bit integers, as in ``struct``.

    Examples
    --------
    >>> _checksum((1).to_bytes(4, "big") + (2).to_bytes(4, "big"), (0, 0), ">")
    (1, 3)
    """
    integers_32 = iter(struct.unpack(f"{order}{len(content) // 4}I", content))
    first, second = sums
    for even, odd in zip(integers_32, integers_32, strict=True):
        first = (first + even + second) & 0xFFFFFFFF
        second = (second + odd + first) & 0xFFFFFFFF
    return first, second


def _committed_frames(index: bytes, log: bytes) -> int | None:
    """Return the number of committed frames according to the log's index; ``None`` if the index does not match the log.

    The index survives if the process is killed.
    """
    head = index[:48]
    if len(index) < 96 or head != index[48:96] or head[32:40] != log[16:24]:
        return None
    committed: int = struct.unpack_from("=I", head, 16)[0]
    return committed


def _now() -> str:
    return time.strftime("%Y%m%dT%H%M%S", time.gmtime())
