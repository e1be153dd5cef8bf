"""The file behind a store: its tables, and how it is told from any other file."""

from __future__ import annotations

import sqlite3
from pathlib import Path

MEMORY = ":memory:"
"""A store that keeps nothing."""

_APPLICATION_ID = 0x45504C42  # "EPLB"
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


class StoreError(Exception):
    """A file that cannot be this service's store; the message says why and what to do."""


def open_store_file(path: str) -> sqlite3.Connection:
    """Open ``path``, made where there is none; raises ``StoreError`` where it is something else or cannot be used."""
    if path != MEMORY and not Path(path).parent.is_dir():
        raise StoreError(f"cannot make the store {path!r}: its directory does not exist")
    database = None
    try:
        database = sqlite3.connect(path, timeout=5.0, check_same_thread=False)
        _check_kind(database, path)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("PRAGMA foreign_keys = ON")
    except (sqlite3.Error, StoreError) as error:
        if database is not None:
            database.close()
        if isinstance(error, StoreError):
            raise
        raise StoreError(
            f"cannot use {path!r} as the store: {error}; name a writable path that is new or was made by eplb"
        ) from error
    return database


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
