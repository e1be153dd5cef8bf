"""State that survives a restart of the service: its leader term, all deployments, and all plans with their outcomes.

The store is one SQLite file. Transactions and a write-ahead log keep it consistent even if the process is killed.
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
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import structlog

from eplb_core.placement import Placement
from eplb_core.planner.plan import Layout
from eplb_core.planner.verdicts import LayerVerdict
from eplb_core.wire.codec import encode
from eplb_core.wire.fields import (
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_LINE,
    MAX_RANKS,
    MAX_SLOTS,
    MAX_VERSION,
    check_count,
    check_deployment,
    printable,
)
from eplb_core.wire.operator import PastPlan
from eplb_service.control.core.deployment import Totals
from eplb_service.control.core.errors import ConflictError
from eplb_service.control.core.leader import RANDOM_BITS, term_above, term_at
from eplb_service.control.core.plan_tracker import Outcome, PlanTracker
from eplb_service.control.server.store_file import (
    MEMORY,
    StoreError,
    close_store,
    copy_log_into_file,
    open_store,
)

T = TypeVar("T")

_log = structlog.get_logger(__name__)

_PLANS_KEPT = 10_000
"""Maximum number of plans kept per deployment."""
_MAX_OWED = 4096
"""Maximum number of writes kept pending while the disk is failing."""
_MAX_WRITES_IN_LOG = 256
"""Number of writes after which the write-ahead log, by then a few megabytes, is copied into the file."""
_MAX_TABLE_BYTES = 256 << 20
"""Maximum size of the tables of a stored layout, in bytes. An initial layout with larger tables is not stored, so a
restarted service uses the current layout as the initial one."""
_MAX_ROWS_SET_ASIDE = 1000
_MAX_ROW_CHARACTERS = 1 << 20
_SETTLE_SECONDS = 10.0
"""Maximum time that an operator's command waits for the disk."""
_NOTICES_KEPT = 8
_NOTICE_SECONDS = 86400.0
"""How long operators see a notice about lost data."""
_BOUNDS = {
    "digest": 1 << 64,
    "layers": MAX_LAYERS + 1,
    "experts": MAX_EXPERTS + 1,
    "ranks": MAX_RANKS + 1,
    "slots": MAX_SLOTS + 1,
}
"""Exclusive upper bounds on a stored deployment's integers, keyed by field. The default is ``MAX_VERSION + 1``."""
_MAX_PLAN_ID = MAX_VERSION // 2
_MAX_TIMESTAMP = 1e11
"""Latest valid time of a plan, in seconds since 1970 (the year 5138)."""


@dataclass(frozen=True)
class StoredDeployment:
    """The last known state of a deployment, shown to operators until its ranks reconnect.

    Parameters
    ----------
    name
        Name of the deployment.
    paused
        True if an operator has paused planning.
    leader_term
        Leader term of the service that last led the deployment.
    totals
        Totals over all groups of the deployment.
    last_decision
        Message of the last decision, for operators.
    epoch
        Epoch of the last layout; 0 if it is unknown.
    digest
        Digest of the last layout; 0 if it is unknown.
    layers
        Number of layers; 0 if it is unknown.
    experts
        Number of logical experts per layer; 0 if it is unknown.
    ranks
        Number of ranks; 0 if it is unknown.
    slots
        Number of slots per rank; 0 if it is unknown.
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
    """Leader term, deployments and plans in an open SQLite file. Only one thread may use the store at a time.

    Opening the store begins a new leader term, ``leader_term``. The term is at least the one for the current
    time, exceeds that of the previous start on the same file, and never equals another service's. A deployment whose
    own term is not lower than this one gets a new, even higher term. Plans that were in progress are marked as
    interrupted.

    Raises ``StoreError`` if the file is not a store or cannot be written.

    Parameters
    ----------
    path
        Path of the store's file, which is created if necessary, or ``MEMORY``.
    above
        Leader term that the new term must exceed.
    """

    def __init__(self, path: str, above: int = 0) -> None:
        self._path = path
        self._db, losses = open_store(path)
        self._opened_at = time.monotonic()
        self._writes_in_log = 0
        self._notices = losses
        self._file = self._identity()
        try:
            self.leader_term = self._begin_term(above)
            self.make_durable()
        except sqlite3.Error as error:
            raise StoreError(
                f"cannot write to the store {path!r}: {error}; free disk space, or specify another file with --store"
            ) from error
        (last,) = self._db.execute("SELECT COALESCE(MAX(id), 0) FROM plans").fetchone()
        # Agents remember plan ids even after a store is lost, so the ids of a new store start at the current time.
        self._last_plan_id: int = max(last, int(time.time()))

    def _begin_term(self, above: int) -> int:
        """Begin a new leader term and return it.

        Also mark open plans as interrupted, and raise each deployment's own term that is not below the new term.
        """
        self._check_terms()
        impossible = "SELECT rowid, * FROM plans WHERE id NOT BETWEEN 1 AND ?"
        for row in self._db.execute(impossible, (_MAX_PLAN_ID,)).fetchall():
            self._set_aside("plans", row, ValueError("the plan id is out of range"))
        with self._db:
            # With a term from the clock, ranks follow the service that started last even if it uses a different store.
            clock_term = term_at(time.time(), secrets.randbits(RANDOM_BITS))
            if above >= clock_term:
                clock_term = higher_term(above)
            self._db.execute("UPDATE service SET leader_term = MAX(leader_term + 1, ?)", (clock_term,))
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

    def _check_terms(self) -> None:
        """Ensure that the file contains exactly one leader term: the highest valid one, or 0 if none is valid."""
        rows = self._db.execute("SELECT rowid, leader_term FROM service").fetchall()
        terms = [term for _, term in rows if isinstance(term, int) and 0 <= term < MAX_VERSION]
        if len(rows) == 1 and terms:
            return
        for row in rows:
            self._set_aside(
                "service", row, ValueError("the table must contain exactly one valid leader term")
            )
        with self._db:
            self._db.execute("INSERT INTO service (leader_term) VALUES (?)", (max(terms, default=0),))

    @property
    def notices(self) -> list[str]:
        """Notices about lost data, shown to operators for a day after the start."""
        return self._notices if time.monotonic() - self._opened_at < _NOTICE_SECONDS else []

    def make_durable(self) -> None:
        """Make all writes survive a power failure or the loss of the write-ahead log."""
        copy_log_into_file(self._db)
        self._writes_in_log = 0

    def check_file(self) -> None:
        """Raise ``StoreError`` if the file at the path was replaced or is read-only."""
        if self._identity() != self._file:
            raise StoreError(
                f"{self._path!r} was deleted or replaced while in use; restart the service to create a new store there"
            )
        if self._path != MEMORY and not os.access(self._path, os.W_OK):
            raise StoreError(f"{self._path!r} is read-only; make it writable")

    def _identity(self) -> tuple[int, int] | None:
        """Return the device and inode of the file at the path; ``None`` if there is no file."""
        with contextlib.suppress(OSError):
            status = Path(self._path).stat()
            return status.st_dev, status.st_ino
        return None

    def close(self) -> None:
        """Close the store, leaving all changes in the file and no write-ahead log."""
        close_store(self._db)

    def new_plan_id(self) -> int:
        """Return a new plan id. Ids start at the current time, so a new store is unlikely to reuse a lost one's ids."""
        self._last_plan_id += 1
        return self._last_plan_id

    def save_deployment(self, deployment: StoredDeployment) -> None:
        """Save the state of a deployment, replacing the previous one."""
        state = json.dumps(asdict(deployment))
        row = (deployment.name, state)
        self._write(("INSERT OR REPLACE INTO deployments (name, state) VALUES (?, ?)", row))

    def deployments(self) -> list[StoredDeployment]:
        """Return all stored deployments, sorted by name."""
        rows = self._db.execute("SELECT rowid, name, state FROM deployments ORDER BY name").fetchall()
        return self._readable("deployments", rows, lambda row: _stored_deployment(*row[1:]))

    def forget(self, name: str) -> None:
        """Delete a deployment and its history."""
        self._write(
            ("DELETE FROM deployments WHERE name = ?", (name,)),
            ("DELETE FROM first_layouts WHERE deployment = ?", (name,)),
            ("DELETE FROM plans WHERE deployment = ?", (name,)),
        )

    def save_initial_layout(self, name: str, group_id: str, layout: Layout) -> None:
        """Save a group's initial layout, replacing that of an earlier group of the deployment."""
        placement = layout.placement
        log2phy_RLE = layout.log2phy_RLE
        arrays: dict[str, Any] = {"phy2log_LRS": placement.phy2log_LRS, "experts": placement.experts}
        if not np.array_equal(log2phy_RLE, placement.default_log2phy()):
            arrays["log2phy_RLE"] = log2phy_RLE
        if log2phy_RLE.nbytes > _MAX_TABLE_BYTES:
            self._write(("DELETE FROM first_layouts WHERE deployment = ?", (name,)))
            return
        content = io.BytesIO()
        np.savez_compressed(content, **arrays)
        row = (name, group_id, content.getvalue())
        insert = "INSERT OR REPLACE INTO first_layouts (deployment, group_id, layout) VALUES (?, ?, ?)"
        self._write((insert, row))

    def initial_layout(self, name: str) -> tuple[str, Layout] | None:
        """Return the group id and initial layout of the deployment's last group; ``None`` if they are not stored."""
        rows = self._db.execute(
            "SELECT rowid, group_id, layout FROM first_layouts WHERE deployment = ?", (name,)
        ).fetchall()
        layouts = self._readable("first_layouts", rows, lambda row: (str(row[1]), _layout(row[2])))
        return layouts[0] if layouts else None

    def begin_plan(self, name: str, plan: PlanTracker, leader_term: int, began: float | None = None) -> None:
        """Save a new plan, before it is sent to any rank.

        Parameters
        ----------
        name
            Name of the deployment.
        plan
            The plan.
        leader_term
            Leader term under which it is offered.
        began
            Time of the offer in seconds since 1970; defaults to the current time.
        """
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
        """Return the newest plans of a deployment, newest first. The outcome of a plan in progress is empty."""
        rows = self._db.execute(
            "SELECT id, at, COALESCE(outcome, ''), reason, committed, verdicts, leader_term, base_epoch FROM plans "
            "WHERE deployment = ? ORDER BY id DESC LIMIT ?",
            (name, limit),
        )
        return self._readable("plans", rows.fetchall(), _past_plan)

    def _readable(
        self, table: str, rows: Sequence[tuple[Any, ...]], read: Callable[[tuple[Any, ...]], T]
    ) -> list[T]:
        """Return the parsed rows and set unreadable rows aside, so that one bad row does not hide the others.

        A row is unreadable if it is damaged or if another release wrote it in a different format.

        Parameters
        ----------
        table
            Table of the rows.
        rows
            Rows, each starting with its rowid.
        read
            Parser of a row. Any exception marks the row as unreadable.
        """
        records = []
        for row in rows:
            try:
                records.append(read(row))
            except Exception as error:
                # Damaged content can make parsers and decompression raise any exception.
                self._set_aside(table, row, error)
        return records

    def _set_aside(self, table: str, row: tuple[Any, ...], error: Exception) -> None:
        """Move an unreadable row to the table ``set_aside`` and add a notice for operators."""
        reason = printable(str(error) or type(error).__name__)
        key = row[0] if table == "plans" else printable(str(row[1]), 64)
        notice = f"the row {key!r} of the store's table {table} could not be read and was set aside: {reason}"
        if notice not in self._notices:
            self._notices = [*self._notices, notice][-_NOTICES_KEPT:]
            _log.error("store_row_set_aside", path=self._path, table=table, row=key, reason=reason)
        content = repr(row)[:_MAX_ROW_CHARACTERS]
        with contextlib.suppress(sqlite3.Error):
            self._write(
                (
                    "INSERT INTO set_aside (at, origin, reason, content) VALUES (?, ?, ?, ?)",
                    (time.time(), table, reason, content),
                ),
                (f"DELETE FROM {table} WHERE rowid = ?", (row[0],)),  # noqa: S608 - the table is one of four constants
                (
                    "DELETE FROM set_aside WHERE rowid <= (SELECT MAX(rowid) FROM set_aside) - ?",
                    (_MAX_ROWS_SET_ASIDE,),
                ),
            )

    def _write(self, *statements: tuple[str, tuple[Any, ...]]) -> None:
        """Execute SQL statements, each with its values, in one transaction."""
        with self._db:
            for statement, values in statements:
                self._db.execute(statement, values)
        self._writes_in_log += 1
        if self._writes_in_log >= _MAX_WRITES_IN_LOG:
            self.make_durable()


def higher_term(term: int) -> int:
    """Return a unique leader term above ``term``; raises ``ConflictError`` if ``term`` is the highest possible one."""
    return term_above(term, secrets.randbits(RANDOM_BITS))


def _stored_deployment(name: str, text: str) -> StoredDeployment:
    """Parse a deployment; raises ``ValueError`` if ``text`` is not the state of this deployment."""
    state = json.loads(text)
    if not isinstance(state, dict) or state.get("name") != name:
        raise ValueError("the state belongs to a different deployment")
    check_deployment(name, "name")
    totals = _known_fields(Totals, state.get("totals", {}))
    stored = StoredDeployment(**{**_known_fields(StoredDeployment, state), "totals": Totals(**totals)})
    return replace(stored, last_decision=printable(stored.last_decision, MAX_LINE))


def _known_fields(kind: type[Any], values: Any) -> dict[str, Any]:
    """Return the values of the fields of dataclass ``kind``, ignoring fields that only newer releases have.

    Raises ``ValueError`` if a value has a different type than the field's default, or if a number is out of bounds.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{kind.__name__} is not a JSON object")
    checked = {}
    for field in fields(kind):
        if field.name not in values or is_dataclass(field.default):
            continue
        value = values[field.name]
        expected = str if field.default is MISSING else type(field.default)
        if type(value) is not expected:
            raise ValueError(f"{field.name} is of type {type(value).__name__}; expected {expected.__name__}")
        if isinstance(value, int):
            check_count(value, field.name, _BOUNDS.get(field.name, MAX_VERSION + 1))
        checked[field.name] = value
    return checked


def _layout(content: bytes) -> Layout:
    """Parse a layout written by ``save_initial_layout``. May raise any exception if the layout is invalid."""
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        placement = Placement(arrays["phy2log_LRS"], int(arrays["experts"]))
        log2phy_RLE = arrays["log2phy_RLE"] if "log2phy_RLE" in arrays else placement.default_log2phy()
    placement.check_log2phy(log2phy_RLE)
    return Layout(placement, log2phy_RLE)


def _past_plan(row: tuple[Any, ...]) -> PastPlan:
    """Parse a plan. May raise any exception if the row is invalid."""
    id_, at, outcome, reason, committed, verdicts, term, epoch = row
    names = {field.name for field in fields(LayerVerdict)}
    # Verdicts written by newer releases may have more fields.
    layers = tuple(
        LayerVerdict(**{name: verdict[name] for name in names & verdict.keys()})
        for verdict in json.loads(verdicts)
    )
    if not 0 <= at < _MAX_TIMESTAMP:
        raise ValueError(f"the time of the plan is {at}, which is out of range")
    if not (isinstance(outcome, str) and isinstance(reason, str)):
        raise ValueError("the outcome or its reason is not text")
    plan = PastPlan(id_, at, outcome, reason, committed, layers, term, epoch)
    # Encoding checks the type and range of each field.
    encode(plan)
    return plan


class StoreWriter:
    """Calls a store's methods on a dedicated thread, so that balancing continues if the disk fails.

    Failed writes are retried in their original order, before any later write. The file is therefore complete as soon as
    the disk works again. ``failing`` is the reason why writes fail; empty while they succeed.

    Parameters
    ----------
    store
        The store.
    on_failure
        Function called after each failed attempt to write.
    """

    def __init__(self, store: Store, on_failure: Callable[[], object]) -> None:
        self.store = store
        self.failing = ""
        self._on_failure = on_failure
        self._owed: list[partial[None]] = []
        self._dropped = ""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="eplb-store")
        self._retried: Future[None] | None = None

    def post(self, write: Callable[..., None], *arguments: Any) -> Future[None]:
        """Enqueue a write. If it fails, the failure is logged and the write retried later."""
        return self._thread.submit(self._write_owed, partial(write, *arguments))

    async def write(self, write: Callable[..., None], *arguments: Any) -> None:
        """Enqueue a write, and wait for its first attempt."""
        await asyncio.wrap_future(self.post(write, *arguments))

    async def run(self, call: Callable[..., T], *arguments: Any) -> T:
        """Call a method of the store on the store's thread and return the result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    async def settle(self) -> str:
        """Flush all enqueued writes to the disk; return the reason if that fails, and an empty string otherwise."""
        settling = asyncio.wrap_future(self._thread.submit(self._settle))
        try:
            return await asyncio.wait_for(asyncio.shield(settling), _SETTLE_SECONDS)
        except asyncio.TimeoutError:
            return self.failing or "the disk is too slow"

    def _settle(self) -> str:
        self._write_owed()
        dropped = self._dropped
        self._dropped = ""
        if self.failing or dropped:
            return self.failing or dropped
        try:
            self.store.make_durable()
        except sqlite3.Error as error:
            self._on_failure()
            return str(error)
        return ""

    def retry(self) -> None:
        """Enqueue a retry of the failed writes and a check of the file."""
        if self._retried is None or self._retried.done():
            self._retried = self._thread.submit(self._write_owed)

    def close(self) -> None:
        """Finish all enqueued calls, then close the store."""
        self._thread.shutdown(wait=True)
        self.store.close()

    def _write_owed(self, write: partial[None] | None = None) -> None:
        """Attempt all pending writes in order, after adding ``write`` to them, and update ``failing``."""
        if write is not None:
            self._owe(write)
        failing = ""
        try:
            while self._owed:
                self._write_oldest()
            self.store.check_file()
        except (sqlite3.Error, StoreError) as error:
            failing = str(error)
            if not self.failing:
                _log.error("store_write_failed", error=failing)
        if self.failing and not failing:
            _log.info("store_written_again")
        self.failing = failing

    def _write_oldest(self) -> None:
        """Attempt the oldest pending write; raises ``sqlite3.OperationalError`` if the disk fails.

        A write that fails for any other reason is dropped, because a retry could not succeed.
        """
        try:
            self._owed[0]()
        except (sqlite3.OperationalError, OSError) as error:
            self._on_failure()
            raise sqlite3.OperationalError(str(error)) from error
        except Exception as error:
            self._dropped = str(error)
            self._on_failure()
            _log.exception("store_write_dropped")
        del self._owed[0]

    def _owe(self, write: partial[None]) -> None:
        """Append a pending write. A deployment's new state replaces a pending older one.

        If too many writes are pending, drop the oldest one that is not the state of a deployment.
        """
        saved = write.args[0]
        if isinstance(saved, StoredDeployment):
            self._owed = [owed for owed in self._owed if getattr(owed.args[0], "name", None) != saved.name]
        self._owed.append(write)
        if len(self._owed) > _MAX_OWED:
            oldest = next(owed for owed in self._owed if not isinstance(owed.args[0], StoredDeployment))
            self._owed.remove(oldest)
            _log.error("store_write_dropped", error=f"more than {_MAX_OWED} writes are pending")
