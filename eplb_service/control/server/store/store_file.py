"""The file behind a store: its tables, and how it is distinguished from any other file."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import structlog

_log = structlog.get_logger(__name__)

MEMORY = ":memory:"
"""A store that keeps nothing."""

_APPLICATION_ID = 0x45504C42  # "EPLB"
_APPLICATION_ID_AT = 68
"""Where SQLite's header has it."""
_LOOKED_AT_BYTES = 1 << 16
_SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE service (leader_term INTEGER NOT NULL);
INSERT INTO service VALUES (0);
CREATE TABLE deployments (
    name TEXT PRIMARY KEY,
    paused INTEGER NOT NULL DEFAULT 0,
    totals TEXT NOT NULL DEFAULT '{}',
    last_decision TEXT NOT NULL DEFAULT ''
);
-- layer NULL: all layers, [layers, ranks, slots]; otherwise that layer alone, [ranks, slots].
CREATE TABLE placements (
    id INTEGER PRIMARY KEY,
    deployment TEXT NOT NULL REFERENCES deployments (name) ON DELETE CASCADE,
    at REAL NOT NULL,
    epoch INTEGER NOT NULL,
    digest INTEGER NOT NULL,
    experts INTEGER NOT NULL,
    layers INTEGER NOT NULL,
    ranks INTEGER NOT NULL,
    slots INTEGER NOT NULL,
    layer INTEGER,
    phy2log BLOB NOT NULL
);
CREATE INDEX placements_of ON placements (deployment, id);
CREATE TABLE plans (
    id INTEGER PRIMARY KEY,
    deployment TEXT NOT NULL REFERENCES deployments (name) ON DELETE CASCADE,
    at REAL NOT NULL,
    leader_term INTEGER NOT NULL,
    base_epoch INTEGER NOT NULL,
    verdicts TEXT NOT NULL,
    outcome TEXT,
    reason TEXT NOT NULL DEFAULT '',
    committed INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX plans_of ON plans (deployment, id);
"""
_RAISED_TERMS = """
-- Deployments whose ranks have followed a service of a higher term, until an operator had this one lead.
CREATE TABLE IF NOT EXISTS raised_terms (
    deployment TEXT PRIMARY KEY REFERENCES deployments (name) ON DELETE CASCADE,
    leader_term INTEGER NOT NULL
)
"""
_FIRST_LAYOUTS = """
-- log2phy: zlib, [ranks, layers, experts] or with entries behind; NULL where it follows from the placement by the rule.
CREATE TABLE IF NOT EXISTS first_layouts (
    deployment TEXT PRIMARY KEY REFERENCES deployments (name) ON DELETE CASCADE,
    group_id TEXT NOT NULL,
    experts INTEGER NOT NULL,
    layers INTEGER NOT NULL,
    ranks INTEGER NOT NULL,
    slots INTEGER NOT NULL,
    entries INTEGER NOT NULL,
    phy2log BLOB NOT NULL,
    log2phy BLOB
)
"""
_ADDED = (_RAISED_TERMS, _FIRST_LAYOUTS)
"""What older releases of the same schema do not know, and do not need."""


class StoreError(Exception):
    """A file that cannot be this service's store; the message says why and what to do."""


def open_store_file(path: str) -> sqlite3.Connection:
    """Open ``path``, made where there is none; raises ``StoreError`` where it is something else or cannot be used."""
    if path != MEMORY and not Path(path).parent.is_dir():
        raise StoreError(f"cannot make the store {path!r}: its directory does not exist")
    database = None
    try:
        database = _connect(path)
        _check_kind(database, path)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("PRAGMA foreign_keys = ON")
        for table in _ADDED:
            database.execute(table)
    except (sqlite3.Error, StoreError) as error:
        if database is not None:
            database.close()
        if isinstance(error, StoreError):
            raise
        raise StoreError(
            f"cannot use {path!r} as the store: {error}; name a writable path that is new or was made by eplb"
        ) from error
    return database


def _connect(path: str) -> sqlite3.Connection:
    """An open database that is whole; one of ours that is damaged is set aside, and a new one begun.

    The ranks hold the truth about what they serve, so that a service without its history is better than none.
    """
    database = sqlite3.connect(path, timeout=5.0, check_same_thread=False)
    try:
        (state,) = database.execute("PRAGMA quick_check(1)").fetchone()
        reason = "" if state == "ok" else str(state)
    except sqlite3.OperationalError:
        # Locked, unreadable, or on a full disk: nothing is said of the file.
        database.close()
        raise
    except sqlite3.DatabaseError as error:
        reason = str(error)
    if not reason:
        return database
    database.close()
    if not _was_ours(Path(path)):
        raise StoreError(f"{path!r} is no store of eplb ({reason}); name another, or move it away")
    aside = f"{path}.damaged-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}"
    for suffix in ("", "-wal", "-shm"):
        if Path(path + suffix).exists():
            Path(path + suffix).rename(aside + suffix)
    _log.error("store_damaged", path=path, set_aside=aside, reason=reason)
    return sqlite3.connect(path, timeout=5.0, check_same_thread=False)


def _was_ours(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(_LOOKED_AT_BYTES)
    application = start[_APPLICATION_ID_AT : _APPLICATION_ID_AT + 4]
    return application == _APPLICATION_ID.to_bytes(4, "big") or b"CREATE TABLE deployments" in start


def _check_kind(database: sqlite3.Connection, path: str) -> None:
    (application,) = database.execute("PRAGMA application_id").fetchone()
    (version,) = database.execute("PRAGMA user_version").fetchone()
    (tables,) = database.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    if not tables:
        database.executescript(
            f"BEGIN; {_SCHEMA} PRAGMA application_id = {_APPLICATION_ID}; "
            f"PRAGMA user_version = {_SCHEMA_VERSION}; COMMIT;"
        )
    elif application != _APPLICATION_ID:
        raise StoreError(f"{path!r} is a database of something else; name another store")
    elif version != _SCHEMA_VERSION:
        raise StoreError(
            f"{path!r} has schema version {version}, this release reads {_SCHEMA_VERSION}; "
            "use the release that wrote it, or name another store"
        )
