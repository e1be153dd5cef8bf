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
_MAX_OWED = 4096
_MAX_WRITES_IN_LOG = 256
"""Writes after which the write-ahead log, then of some megabytes, is copied into the file."""
_MAX_TABLE_BYTES = 256 << 20
"""Where tables are larger the layout is not kept, and a restarted service measures from the one that it meets."""
_ROWS_SET_ASIDE = 1000
_MAX_ROW_CHARACTERS = 1 << 20
_SETTLE_SECONDS = 10.0
"""Longest time that an operator's command waits for the disk."""
_NOTICES_KEPT = 8
_NOTICE_SECONDS = 86400.0
"""Time for which operators see that something of the store was lost."""
_BOUNDS = {
    "digest": 1 << 64,
    "layers": MAX_LAYERS + 1,
    "experts": MAX_EXPERTS + 1,
    "ranks": MAX_RANKS + 1,
    "slots": MAX_SLOTS + 1,
}
"""Bounds on numbers of a stored deployment, by field; ``MAX_VERSION`` for the others."""
_MAX_PLAN_ID = MAX_VERSION // 2
_MAX_TIMESTAMP = 1e11
"""Bound on a time in seconds since 1970: the year 5138."""


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
        self._path = path
        self._db, lost = open_store(path)
        self._opened_at = time.monotonic()
        self._writes_in_log = 0
        self._notices = lost
        self._file = self._identity()
        try:
            self.leader_term = self._begun(above)
            self.make_durable()
        except sqlite3.Error as error:
            raise StoreError(
                f"cannot write the store {path!r}: {error}; make room, or name another"
            ) from error
        (last,) = self._db.execute("SELECT COALESCE(MAX(id), 0) FROM plans").fetchone()
        # Agents outlive services: where no file remembers the last number, the clock is past it.
        self._last_plan_id: int = max(last, int(time.time()))

    def _begun(self, above: int) -> int:
        """Leader term of this start, written with all that follows from it."""
        self._check_terms()
        impossible = "SELECT rowid, * FROM plans WHERE id NOT BETWEEN 1 AND ?"
        for row in self._db.execute(impossible, (_MAX_PLAN_ID,)).fetchall():
            self._set_aside("plans", row, ValueError("no plan has such a number"))
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

    def _check_terms(self) -> None:
        """Leave one leader term that can be one."""
        rows = self._db.execute("SELECT rowid, leader_term FROM service").fetchall()
        terms = [term for _, term in rows if isinstance(term, int) and 0 <= term < MAX_VERSION]
        if len(rows) == 1 and terms:
            return
        for row in rows:
            self._set_aside("service", row, ValueError("this is not one leader term"))
        with self._db:
            self._db.execute("INSERT INTO service (leader_term) VALUES (?)", (max(terms, default=0),))

    @property
    def notices(self) -> list[str]:
        """Losses that operators should know of, for a day after the start."""
        return self._notices if time.monotonic() - self._opened_at < _NOTICE_SECONDS else []

    def make_durable(self) -> None:
        """Have all that was written outlive a power cut, and a lost write-ahead log."""
        copy_log_into_file(self._db)
        self._writes_in_log = 0

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
        close_store(self._db)

    def new_plan_id(self) -> int:
        """Return a number that no plan of this file has, and no plan of a service without one is likely to have had."""
        self._last_plan_id += 1
        return self._last_plan_id

    def save_deployment(self, deployment: StoredDeployment) -> None:
        """Save a deployment as it is now."""
        state = json.dumps(asdict(deployment))
        row = (deployment.name, state)
        self._write(("INSERT OR REPLACE INTO deployments (name, state) VALUES (?, ?)", row))

    def deployments(self) -> list[StoredDeployment]:
        """Return all that were ever known, by name."""
        rows = self._db.execute("SELECT rowid, name, state FROM deployments ORDER BY name").fetchall()
        return self._readable("deployments", rows, lambda row: _stored_deployment(*row[1:]))

    def forget(self, name: str) -> None:
        """Remove a deployment and all of its history."""
        self._write(
            ("DELETE FROM deployments WHERE name = ?", (name,)),
            ("DELETE FROM first_layouts WHERE deployment = ?", (name,)),
            ("DELETE FROM plans WHERE deployment = ?", (name,)),
        )

    def save_first_layout(self, name: str, group_id: str, layout: Layout) -> None:
        """Save the layout that a group of ranks came with, in place of an earlier group's."""
        placement, log2phy_RLE = layout.placement, layout.log2phy_RLE
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

    def first_layout(self, name: str) -> tuple[str, Layout] | None:
        """Return the last group's identity and first layout, if they are known."""
        rows = self._db.execute(
            "SELECT rowid, group_id, layout FROM first_layouts WHERE deployment = ?", (name,)
        ).fetchall()
        found = self._readable("first_layouts", rows, lambda row: (str(row[1]), _layout(row[2])))
        return found[0] if found else None

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
        return self._readable("plans", rows.fetchall(), _past_plan)

    def _readable(
        self, table: str, rows: Sequence[tuple[Any, ...]], read: Callable[[tuple[Any, ...]], T]
    ) -> list[T]:
        """Return what ``read`` makes of the rows, each with its rowid first; set aside those of which it makes nothing.

        A row may be damaged, or of a release that writes it in another way; one such row must not cost the others.
        """
        found = []
        for row in rows:
            try:
                found.append(read(row))
            except Exception as error:
                # Any error that parsers and decompression raise for damage.
                self._set_aside(table, row, error)
        return found

    def _set_aside(self, table: str, row: tuple[Any, ...], error: Exception) -> None:
        """Move a row that cannot be read out of the way, and report it."""
        reason = printable(str(error) or type(error).__name__)
        key = row[0] if table == "plans" else printable(str(row[1]), 64)
        notice = f"the row {key!r} of {table} in the store could not be read and was set aside: {reason}"
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
                (f"DELETE FROM {table} WHERE rowid = ?", (row[0],)),  # noqa: S608 - one of our four tables
                (
                    "DELETE FROM set_aside WHERE rowid <= (SELECT MAX(rowid) FROM set_aside) - ?",
                    (_ROWS_SET_ASIDE,),
                ),
            )

    def _write(self, *statements: tuple[str, tuple[Any, ...]]) -> None:
        """Carry out statements with their values in one transaction: all of them, or none."""
        with self._db:
            for statement, values in statements:
                self._db.execute(statement, values)
        self._writes_in_log += 1
        if self._writes_in_log >= _MAX_WRITES_IN_LOG:
            self.make_durable()


def higher_term(term: int) -> int:
    """Return a term above ``term`` that no other service has; raises ``ConflictError`` where there is none."""
    return term_above(term, secrets.randbits(RANDOM_BITS))


def _stored_deployment(name: str, text: str) -> StoredDeployment:
    """Return the deployment in a row; raises ``ValueError`` if it is none."""
    state = json.loads(text)
    if not isinstance(state, dict) or state.get("name") != name:
        raise ValueError("the state is not one of this deployment")
    check_deployment(name, "name")
    totals = _known_fields(Totals, state.get("totals", {}))
    stored = StoredDeployment(**{**_known_fields(StoredDeployment, state), "totals": Totals(**totals)})
    return replace(stored, last_decision=printable(stored.last_decision, MAX_LINE))


def _known_fields(kind: type[Any], values: Any) -> dict[str, Any]:
    """Return the fields of ``kind`` among ``values``, which a newer release may have written with more of them.

    Raises ``ValueError`` for a value of another type than the field's default, or a number out of bounds.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{kind.__name__} is not an object")
    found = {}
    for field in fields(kind):
        if field.name not in values or is_dataclass(field.default):
            continue
        value, expected = values[field.name], str if field.default is MISSING else type(field.default)
        if type(value) is not expected:
            raise ValueError(f"{field.name} is a {type(value).__name__}, not a {expected.__name__}")
        if isinstance(value, int):
            check_count(value, field.name, _BOUNDS.get(field.name, MAX_VERSION + 1))
        found[field.name] = value
    return found


def _layout(content: bytes) -> Layout:
    """Return a layout as ``save_first_layout`` has written it; raises some exception if it is none."""
    with np.load(io.BytesIO(content), allow_pickle=False) as held:
        placement = Placement(held["phy2log_LRS"], int(held["experts"]))
        log2phy_RLE = held["log2phy_RLE"] if "log2phy_RLE" in held else placement.default_log2phy()
    placement.check_log2phy(log2phy_RLE)
    return Layout(placement, log2phy_RLE)


def _past_plan(row: tuple[Any, ...]) -> PastPlan:
    """Return the plan in a row; raises some exception if it is none."""
    id_, at, outcome, reason, committed, verdicts, term, epoch = row
    known = {field.name for field in fields(LayerVerdict)}
    # Other releases keep more of a layer.
    layers = tuple(
        LayerVerdict(**{name: verdict[name] for name in known & verdict.keys()})
        for verdict in json.loads(verdicts)
    )
    if not 0 <= at < _MAX_TIMESTAMP:
        raise ValueError(f"the plan was made at {at}, which is no time")
    if not (isinstance(outcome, str) and isinstance(reason, str)):
        raise ValueError("its outcome is no text")
    plan = PastPlan(id_, at, outcome, reason, committed, layers, term, epoch)
    # The message has a type and a range for each field.
    encode(plan)
    return plan


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
        self._dropped = ""
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

    async def settle(self) -> str:
        """Have everything that was posted outlive a power cut; returns why that failed, or nothing."""
        settling = asyncio.wrap_future(self._thread.submit(self._settle))
        try:
            return await asyncio.wait_for(asyncio.shield(settling), _SETTLE_SECONDS)
        except asyncio.TimeoutError:
            return self.failing or "the disk is too slow"

    def _settle(self) -> str:
        self._carry_out()
        dropped, self._dropped = self._dropped, ""
        if self.failing or dropped:
            return self.failing or dropped
        try:
            self.store.make_durable()
        except sqlite3.Error as error:
            self._on_failure()
            return str(error)
        return ""

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
        except Exception as error:
            # No disk is at fault, and no repetition would help.
            self._dropped = str(error)
            self._on_failure()
            _log.exception("store_write_dropped")
        del self._owed[0]

    def _owe(self, write: partial[None]) -> None:
        """Put a write after those that are owed; a deployment's newest state takes the place of the one before."""
        newest = write.args[0]
        if isinstance(newest, StoredDeployment):
            self._owed = [one for one in self._owed if getattr(one.args[0], "name", None) != newest.name]
        self._owed.append(write)
        if len(self._owed) > _MAX_OWED:
            oldest = next(one for one in self._owed if not isinstance(one.args[0], StoredDeployment))
            self._owed.remove(oldest)
            _log.error("store_write_dropped", error=f"more than {_MAX_OWED} writes are owed")
