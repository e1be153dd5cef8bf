"""Facts that outlive a service: its term, every deployment as it was left, and every plan with its outcome.

One SQLite file, written in transactions with a write-ahead log, so that a kill at any moment leaves it whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import secrets
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import structlog

from eplb_service.control.core.deployment import Totals
from eplb_service.control.core.errors import ConflictError
from eplb_service.control.core.leader import RANDOM_BITS, term_above, term_at
from eplb_service.control.core.plan_tracker import Outcome, PlanTracker
from eplb_service.placement import Placement
from eplb_service.planner.plan import Serving
from eplb_service.wire.operator import LayerVerdict, PastPlan

MEMORY = ":memory:"
"""A store that keeps nothing."""
T = TypeVar("T")

_log = structlog.get_logger(__name__)

_PLANS_KEPT = 10_000
_MOST_OWED = 4096
_MOST_TABLE_BYTES = 256 << 20
"""Where tables are larger the layout is not kept, and a restarted service measures from the one that it meets."""
_APPLICATION_ID = 0x45504C42  # "EPLB"
_LOOKED_AT_BYTES = 1 << 16
_SCHEMA_VERSION = 2
_SCHEMA = """
CREATE TABLE service (leader_term INTEGER NOT NULL);
INSERT INTO service VALUES (0);
-- state: a StoredDeployment as JSON.
CREATE TABLE deployments (name TEXT PRIMARY KEY, state TEXT NOT NULL);
-- layout: an npz file of the placement and, where they do not follow from it by the rule, the tables.
CREATE TABLE first_layouts (deployment TEXT PRIMARY KEY, group_id TEXT NOT NULL, layout BLOB NOT NULL);
CREATE TABLE plans (
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
CREATE INDEX plans_of ON plans (deployment, id);
"""


class StoreError(Exception):
    """A file that cannot be this service's store; the message says why and what to do."""


@dataclass(frozen=True)
class StoredDeployment:
    """A deployment as it was left: what is shown of it until its ranks return, and its leader term.

    Version and sizes of what it serves are 0 while they are not known.
    """

    name: str
    paused: bool = False
    leader_term: int = 0
    totals: Totals = Totals()  # noqa: RUF009 - immutable
    last_decision: str = ""
    epoch: int = 0
    digest: int = 0
    layers: int = 0
    experts: int = 0
    ranks: int = 0
    slots: int = 0


class Store:
    """Leader term, deployments and plans in an open file; not for use by two threads at a time.

    ``path`` is made where there is none; ``above`` is a leader term that this start's must be past. Raises
    ``StoreError`` where the file is something else, or cannot be written. ``leader_term`` is this start's: past that of
    the last start on the same file, and the clock, and never equal to another service's; so is the one of each
    deployment that has a higher one. Plans that were under way are marked interrupted.
    """

    def __init__(self, path: str, above: int = 0) -> None:
        self._path, self._db = path, _open(path)
        self._file = self._identity()
        try:
            self.leader_term = self._begun(above)
        except sqlite3.Error as error:
            raise StoreError(
                f"cannot write the store {path!r}: {error}; make room, or name another"
            ) from error
        (last,) = self._db.execute("SELECT COALESCE(MAX(id), 0) FROM plans").fetchone()
        # Agents outlive services: where no file remembers the last number, the clock is past it.
        self._last_plan_id: int = max(last, int(time.time()))

    def _begun(self, above: int) -> int:
        """Leader term of this start, written with all that follows from it."""
        with self._db:
            # At least the clock: ranks follow a service that has lost its store, or has another, if it started last.
            fresh = term_at(time.time(), secrets.randbits(RANDOM_BITS))
            if above >= fresh:
                fresh = higher_term(above)
            self._db.execute("UPDATE service SET leader_term = MAX(leader_term + 1, ?)", (fresh,))
            self._db.execute(
                "UPDATE plans SET outcome = ?, reason = 'the service stopped' WHERE outcome IS NULL",
                (Outcome.INTERRUPTED.value,),
            )
        term: int = self._db.execute("SELECT leader_term FROM service").fetchone()[0]
        for stored in self.deployments():
            if stored.leader_term >= term:
                with contextlib.suppress(ConflictError):
                    self.save_deployment(replace(stored, leader_term=higher_term(stored.leader_term)))
        return term

    def check_file(self) -> None:
        """Raise ``StoreError`` where the open file is no longer the one at its path, or may not be written."""
        if self._identity() != self._file:
            raise StoreError(
                f"{self._path!r} was deleted or replaced while in use; restart the service to begin a new one there"
            )
        if self._path != MEMORY and not os.access(self._path, os.W_OK):
            raise StoreError(f"{self._path!r} is read-only; make it writable")

    def _identity(self) -> tuple[int, int] | None:
        """Device and inode of the file, which change where it is replaced; ``None`` where there is none."""
        with contextlib.suppress(OSError):
            found = Path(self._path).stat()
            return found.st_dev, found.st_ino
        return None

    def close(self) -> None:
        """Write everything into the one file."""
        self._db.close()

    def new_plan_id(self) -> int:
        """Return a number that no plan of this file has, and no plan of a service without one is likely to have had."""
        self._last_plan_id += 1
        return self._last_plan_id

    def save_deployment(self, deployment: StoredDeployment) -> None:
        """Save a deployment as it is now."""
        state = json.dumps(asdict(deployment))
        self._write(("INSERT OR REPLACE INTO deployments VALUES (?, ?)", (deployment.name, state)))

    def deployments(self) -> list[StoredDeployment]:
        """Return all that were ever known, by name."""
        rows = self._db.execute("SELECT state FROM deployments ORDER BY name").fetchall()
        states = [json.loads(state) for (state,) in rows]
        return [StoredDeployment(**{**state, "totals": Totals(**state["totals"])}) for state in states]

    def forget(self, name: str) -> None:
        """Remove a deployment and all of its history."""
        self._write(
            ("DELETE FROM deployments WHERE name = ?", (name,)),
            ("DELETE FROM first_layouts WHERE deployment = ?", (name,)),
            ("DELETE FROM plans WHERE deployment = ?", (name,)),
        )

    def save_first_layout(self, name: str, group_id: str, layout: Serving) -> None:
        """Save the layout that a group of ranks came with, in place of an earlier group's."""
        placement, log2phy_RLE = layout.placement, layout.log2phy_RLE
        arrays: dict[str, Any] = {"phy2log_LRS": placement.phy2log_LRS, "experts": placement.experts}
        if not np.array_equal(log2phy_RLE, placement.default_log2phy()):
            arrays["log2phy_RLE"] = log2phy_RLE
        if log2phy_RLE.nbytes > _MOST_TABLE_BYTES:
            self._write(("DELETE FROM first_layouts WHERE deployment = ?", (name,)))
            return
        content = io.BytesIO()
        np.savez_compressed(content, **arrays)
        row = (name, group_id, content.getvalue())
        self._write(("INSERT OR REPLACE INTO first_layouts VALUES (?, ?, ?)", row))

    def first_layout(self, name: str) -> tuple[str, Serving] | None:
        """Return the last group's identity and first layout; raises ``ValueError`` where that is no layout."""
        row = self._db.execute(
            "SELECT group_id, layout FROM first_layouts WHERE deployment = ?", (name,)
        ).fetchone()
        if row is None:
            return None
        group_id, content = row
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as held:
                placement = Placement(held["phy2log_LRS"], int(held["experts"]))
                if "log2phy_RLE" not in held:
                    return group_id, Serving(placement, placement.default_log2phy())
                log2phy_RLE = held["log2phy_RLE"]
            placement.check_log2phy(log2phy_RLE)
        except Exception as error:
            # Whatever numpy and its decompression make of damage.
            raise ValueError(f"a stored layout is damaged: {error}") from error
        return group_id, Serving(placement, log2phy_RLE)

    def begin_plan(self, name: str, plan: PlanTracker, leader_term: int, began: float | None = None) -> None:
        """Save a plan of this term before any rank hears of it; ``began`` in seconds since 1970, by default now."""
        verdicts = json.dumps([asdict(verdict) for verdict in plan.decision.verdicts])
        row = (plan.plan_id, name, began or time.time(), leader_term, plan.base_epoch, verdicts)
        self._write(
            (
                "INSERT INTO plans (id, deployment, at, leader_term, base_epoch, verdicts) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                row,
            ),
            (
                "DELETE FROM plans WHERE deployment = ?1 AND id <= (SELECT id FROM plans "
                "WHERE deployment = ?1 ORDER BY id DESC LIMIT 1 OFFSET ?2)",
                (name, _PLANS_KEPT),
            ),
        )

    def end_plan(self, plan_id: int, outcome: Outcome, reason: str, committed: int) -> None:
        """Save the outcome of a plan."""
        values = (outcome.value, reason, committed, plan_id)
        self._write(("UPDATE plans SET outcome = ?, reason = ?, committed = ? WHERE id = ?", values))

    def plans(self, name: str, limit: int = 100) -> list[PastPlan]:
        """Return the newest plans of a deployment, newest first; one under way has no outcome."""
        rows = self._db.execute(
            "SELECT id, at, COALESCE(outcome, ''), reason, committed, verdicts, leader_term, base_epoch FROM plans "
            "WHERE deployment = ? ORDER BY id DESC LIMIT ?",
            (name, limit),
        )
        return [
            PastPlan(id_, at, outcome, reason, committed, _verdicts(verdicts), term, epoch)
            for id_, at, outcome, reason, committed, verdicts, term, epoch in rows
        ]

    def _write(self, *statements: tuple[str, tuple[Any, ...]]) -> None:
        """Carry out statements with their values in one transaction: all of them, or none."""
        with self._db:
            for statement, values in statements:
                self._db.execute(statement, values)


def higher_term(term: int) -> int:
    """Return a term above ``term`` that no other service has; raises ``ConflictError`` where there is none."""
    return term_above(term, secrets.randbits(RANDOM_BITS))


def _verdicts(text: str) -> tuple[LayerVerdict, ...]:
    known = {field.name for field in fields(LayerVerdict)}
    verdicts = json.loads(text)
    # Older releases kept more of a layer.
    return tuple(
        LayerVerdict(**{name: verdict[name] for name in known & verdict.keys()}) for verdict in verdicts
    )


def _open(path: str) -> sqlite3.Connection:
    """Open ``path``, made where there is none; raises ``StoreError`` where it is something else or cannot be used."""
    if path != MEMORY and not Path(path).parent.is_dir():
        raise StoreError(f"cannot make the store {path!r}: its directory does not exist")
    database = None
    try:
        database = _connect(path)
        _check_kind(database, path)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
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
    with Path(path).open("rb") as file:
        was_ours = b"CREATE TABLE deployments" in file.read(_LOOKED_AT_BYTES)
    if not was_ours:
        raise StoreError(f"{path!r} is no store of eplb ({reason}); name another, or move it away")
    aside = f"{path}.damaged-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}"
    for suffix in ("", "-wal", "-shm"):
        if Path(path + suffix).exists():
            Path(path + suffix).rename(aside + suffix)
    _log.error("store_damaged", path=path, set_aside=aside, reason=reason)
    return sqlite3.connect(path, timeout=5.0, check_same_thread=False)


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


class StoreWriter:
    """Runs a store's methods on a thread of its own. Balancing goes on where the disk does not.

    Writes that failed are owed: they are carried out in order before any later one, so that the file has all once the
    disk takes writes again. ``on_failure`` is called for each attempt that failed; ``failing`` is the reason why the
    store cannot be written now, empty where it can.
    """

    def __init__(self, store: Store, on_failure: Callable[[], object]) -> None:
        self.store = store
        self.failing = ""
        self._on_failure = on_failure
        self._owed: list[partial[None]] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="eplb-store")
        self._retried: Future[None] | None = None

    def post(self, write: Callable[..., None], *arguments: Any) -> Future[None]:
        """Write some time soon; a failure is logged, and the write owed."""
        return self._thread.submit(self._carry_out, partial(write, *arguments))

    async def write(self, write: Callable[..., None], *arguments: Any) -> None:
        """Write, and wait until it is done or owed."""
        await asyncio.wrap_future(self.post(write, *arguments))

    async def run(self, call: Callable[..., T], *arguments: Any) -> T:
        """Read or write, and wait for it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def retry(self) -> None:
        """Carry out what is owed, and look after the file, some time soon."""
        if self._retried is None or self._retried.done():
            self._retried = self._thread.submit(self._carry_out)

    def close(self) -> None:
        """Finish what was asked for, then close the store."""
        self._thread.shutdown(wait=True)
        self.store.close()

    def _carry_out(self, write: partial[None] | None = None) -> None:
        if write is not None:
            self._owe(write)
        failing = ""
        try:
            while self._owed:
                self._carry_out_oldest()
            self.store.check_file()
        except (sqlite3.Error, StoreError) as error:
            failing = str(error)
            if not self.failing:
                _log.error("store_write_failed", error=failing)
        if self.failing and not failing:
            _log.info("store_written_again")
        self.failing = failing

    def _carry_out_oldest(self) -> None:
        """Carry out the oldest write that is owed; raises ``sqlite3.Error`` where the disk is to blame."""
        try:
            self._owed[0]()
        except (sqlite3.OperationalError, OSError) as error:
            self._on_failure()
            raise sqlite3.OperationalError(str(error)) from error
        except Exception:
            # No disk is at fault, and no repetition would help.
            self._on_failure()
            _log.exception("store_write_dropped")
        del self._owed[0]

    def _owe(self, write: partial[None]) -> None:
        """Put a write after those that are owed; a deployment's newest state takes the place of the one before."""
        newest = write.args[0]
        if isinstance(newest, StoredDeployment):
            self._owed = [one for one in self._owed if getattr(one.args[0], "name", None) != newest.name]
        self._owed.append(write)
        if len(self._owed) > _MOST_OWED:
            oldest = next(one for one in self._owed if not isinstance(one.args[0], StoredDeployment))
            self._owed.remove(oldest)
            _log.error("store_write_dropped", error=f"more than {_MOST_OWED} writes are owed")
