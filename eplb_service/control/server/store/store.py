"""Facts that outlive a service: its term, every deployment's placements, and every plan with its outcome.

One SQLite file, written in transactions with a write-ahead log, so that a kill at any moment leaves it whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import structlog

from eplb_service.control.core.deployment import Totals
from eplb_service.control.core.errors import ConflictError
from eplb_service.control.core.leader import RANDOM_BITS, term_above, term_at
from eplb_service.control.core.live_placement import LivePlacement
from eplb_service.control.core.plan_tracker import Outcome, PlanTracker
from eplb_service.control.server.store.store_file import open_store_file
from eplb_service.placement import Int32, Placement
from eplb_service.planner.plan import Serving
from eplb_service.wire.operator import LayerVerdict, PastPlan


@dataclass(frozen=True)
class StoredDeployment:
    """A deployment as the last service left it; ``leader_term`` is 0 unless it was raised for this deployment."""

    name: str
    paused: bool
    totals: Totals
    last_decision: str
    leader_term: int = 0


@dataclass(frozen=True)
class StoredPlacement:
    """The newest placement known of a deployment."""

    epoch: int
    digest: int
    placement: Placement


T = TypeVar("T")

_log = structlog.get_logger(__name__)

_RAISE = "INSERT OR REPLACE INTO raised_terms VALUES (?, ?)"
_PLANS_KEPT = 10_000
_LAYERS_PER_SNAPSHOT = 1024
_SNAPSHOTS_KEPT = 4
_MOST_TABLE_BYTES = 256 << 20
"""Where tables are larger the layout is not kept, and a restarted service measures from the one that it meets."""


class Store:
    """Leader term, placements and plans in an open file; not for use by two threads at a time.

    ``path`` is made where there is none; ``above`` is a leader term that this start's must be past. Raises
    ``StoreError`` where the file is something else, or cannot be written. ``leader_term`` is this start's: past that of
    the last start on the same file, and the clock, and never equal to another service's; so is the one of each
    deployment for which it was raised. Plans that were under way are marked interrupted.
    """

    def __init__(self, path: str, above: int = 0) -> None:
        self._db = open_store_file(path)
        with self._db:
            # At least the clock: ranks follow a service that has lost its store, or has another, if it started last.
            fresh = term_at(time.time(), secrets.randbits(RANDOM_BITS))
            if above >= fresh:
                fresh = higher_term(above)
            self._db.execute("UPDATE service SET leader_term = MAX(leader_term + 1, ?)", (fresh,))
            for name, term in self._db.execute("SELECT deployment, leader_term FROM raised_terms").fetchall():
                with contextlib.suppress(ConflictError):
                    self._db.execute(_RAISE, (name, higher_term(term)))
            self._db.execute(
                "UPDATE plans SET outcome = ?, reason = 'the service stopped' WHERE outcome IS NULL",
                (Outcome.INTERRUPTED.value,),
            )
        (term,) = self._db.execute("SELECT leader_term FROM service").fetchone()
        self.leader_term: int = term
        (last,) = self._db.execute("SELECT COALESCE(MAX(id), 0) FROM plans").fetchone()
        # Agents outlive services: where no file remembers the last number, the clock is past it.
        self._last_plan_id: int = max(last, int(time.time()))

    def close(self) -> None:
        """Write everything into the one file."""
        self._db.close()

    def new_plan_id(self) -> int:
        """Return a number that no plan of this file has, and no plan of a service without one is likely to have had."""
        self._last_plan_id += 1
        return self._last_plan_id

    # Written

    def save_deployment(self, deployment: StoredDeployment) -> None:
        """Save the facts that are not about one placement or plan."""
        self._write(
            deployment.name,
            "UPDATE deployments SET paused = ?, totals = ?, last_decision = ? WHERE name = ?",
            (
                deployment.paused,
                json.dumps(asdict(deployment.totals)),
                deployment.last_decision,
                deployment.name,
            ),
        )

    def save_placement(self, name: str, live: LivePlacement) -> None:
        """Save the placement in force, unless it is the one that was saved last."""
        known = self.latest_placement(name)
        if known is not None and (known.epoch, known.digest) == (live.epoch, live.digest):
            return
        with self._db:
            self._name(name)
            self._insert_snapshot(name, live)

    def save_layer(self, name: str, live: LivePlacement, layer: int) -> None:
        """Save the switch of one layer, which led to ``live``."""
        with self._db:
            self._name(name)
            self._insert_placement(name, live, layer)
            (since,) = self._db.execute(
                "SELECT COUNT(*) FROM placements WHERE deployment = ?1 AND id > COALESCE((SELECT MAX(id) "
                "FROM placements WHERE deployment = ?1 AND layer IS NULL), 0)",
                (name,),
            ).fetchone()
            if since >= _LAYERS_PER_SNAPSHOT:
                self._insert_snapshot(name, live)

    def save_first_layout(self, name: str, group_id: str, layout: Serving) -> None:
        """Save the layout that a group of ranks came with, in place of an earlier group's."""
        placement, log2phy_RLE = layout.placement, layout.log2phy_RLE
        by_rule = log2phy_RLE.ndim == 3 and np.array_equal(log2phy_RLE, placement.default_log2phy())
        sizes = placement.experts, placement.layers, placement.ranks, placement.slots
        entries = log2phy_RLE.shape[3] if log2phy_RLE.ndim == 4 else 0
        with self._db:
            self._name(name)
            self._db.execute("DELETE FROM first_layouts WHERE deployment = ?", (name,))
            if log2phy_RLE.nbytes <= _MOST_TABLE_BYTES:
                tables = None if by_rule else _packed(log2phy_RLE)
                self._db.execute(
                    "INSERT INTO first_layouts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (name, group_id, *sizes, entries, _packed(placement.phy2log_LRS), tables),
                )

    def begin_plan(self, name: str, plan: PlanTracker, leader_term: int) -> None:
        """Save a plan of this term before any rank hears of it."""
        verdicts = json.dumps([asdict(verdict) for verdict in plan.decision.verdicts])
        with self._db:
            self._name(name)
            self._db.execute(
                "INSERT INTO plans (id, deployment, at, leader_term, base_epoch, verdicts) VALUES (?, ?, ?, ?, ?, ?)",
                (plan.plan_id, name, time.time(), leader_term, plan.base_epoch, verdicts),
            )
            self._db.execute(
                "DELETE FROM plans WHERE deployment = ?1 AND id <= (SELECT id FROM plans WHERE deployment = ?1 "
                "ORDER BY id DESC LIMIT 1 OFFSET ?2)",
                (name, _PLANS_KEPT),
            )

    def end_plan(self, plan_id: int, outcome: Outcome, reason: str, committed: int) -> None:
        """Save the outcome of a plan."""
        with self._db:
            self._db.execute(
                "UPDATE plans SET outcome = ?, reason = ?, committed = ? WHERE id = ?",
                (outcome.value, reason, committed, plan_id),
            )

    def raise_term(self, name: str, term: int) -> None:
        """Save a deployment's leader term, which is past that of the service."""
        self._write(name, _RAISE, (name, term))

    def forget(self, name: str) -> None:
        """Remove a deployment and all of its history."""
        with self._db:
            self._db.execute("DELETE FROM deployments WHERE name = ?", (name,))

    # Read

    def deployments(self) -> list[StoredDeployment]:
        """Return all that were ever known, by name."""
        rows = self._db.execute(
            "SELECT name, paused, totals, last_decision, COALESCE(raised_terms.leader_term, 0) FROM deployments "
            "LEFT JOIN raised_terms ON raised_terms.deployment = name ORDER BY name"
        )
        return [
            StoredDeployment(name, bool(paused), Totals(**json.loads(totals)), last, term)
            for name, paused, totals, last, term in rows
        ]

    def latest_placement(self, name: str) -> StoredPlacement | None:
        """Return the placement that a deployment served when it was last heard of."""
        whole = self._db.execute(
            "SELECT id, epoch, digest, experts, layers, ranks, slots, phy2log FROM placements "
            "WHERE deployment = ? AND layer IS NULL ORDER BY id DESC LIMIT 1",
            (name,),
        ).fetchone()
        if whole is None:
            return None
        since, epoch, digest, experts, layers, ranks, slots, blob = whole
        phy2log_LRS = _from_blob(blob).reshape(layers, ranks, slots).copy()
        later = self._db.execute(
            "SELECT epoch, digest, layer, phy2log FROM placements WHERE deployment = ? AND id > ? ORDER BY id",
            (name, since),
        ).fetchall()
        for _, _, layer, blob in later:
            phy2log_LRS[layer] = _from_blob(blob).reshape(ranks, slots)
        if later:
            epoch, digest = later[-1][:2]
        return StoredPlacement(epoch, digest, Placement(phy2log_LRS, experts))

    def first_layout(self, name: str) -> tuple[str, Serving] | None:
        """Return the last group's identity and first layout; raises ``ValueError`` where that is no layout."""
        row = self._db.execute(
            "SELECT group_id, experts, layers, ranks, slots, entries, phy2log, log2phy FROM first_layouts "
            "WHERE deployment = ?",
            (name,),
        ).fetchone()
        if row is None:
            return None
        group_id, experts, layers, ranks, slots, entries, phy2log, log2phy = row
        placement = Placement(_unpacked(phy2log, (layers, ranks, slots)), experts)
        if log2phy is None:
            return group_id, Serving(placement, placement.default_log2phy())
        behind = (entries,) if entries else ()
        log2phy_RLE = _unpacked(log2phy, (ranks, layers, experts, *behind))
        placement.check_log2phy(log2phy_RLE)
        return group_id, Serving(placement, log2phy_RLE)

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

    # Rows

    def _write(self, name: str, statement: str, values: tuple[Any, ...]) -> None:
        """Execute a statement about a deployment, which need not be known yet."""
        with self._db:
            self._name(name)
            self._db.execute(statement, values)

    def _name(self, name: str) -> None:
        self._db.execute("INSERT OR IGNORE INTO deployments (name) VALUES (?)", (name,))

    def _insert_snapshot(self, name: str, live: LivePlacement) -> None:
        self._insert_placement(name, live, None)
        self._db.execute(
            "DELETE FROM placements WHERE deployment = ?1 AND id < (SELECT id FROM placements "
            "WHERE deployment = ?1 AND layer IS NULL ORDER BY id DESC LIMIT 1 OFFSET ?2)",
            (name, _SNAPSHOTS_KEPT - 1),
        )

    def _insert_placement(self, name: str, live: LivePlacement, layer: int | None) -> None:
        placement = live.placement
        slots = placement.phy2log_LRS if layer is None else placement.phy2log_LRS[layer]
        sizes = placement.experts, placement.layers, placement.ranks, placement.slots
        blob = np.ascontiguousarray(slots, dtype="<i4").tobytes()
        self._db.execute(
            "INSERT INTO placements (deployment, at, epoch, digest, experts, layers, ranks, slots, layer, phy2log) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (name, time.time(), live.epoch, live.digest, *sizes, layer, blob),
        )


def higher_term(term: int) -> int:
    """Return a term above ``term`` that no other service has; raises ``ConflictError`` where there is none."""
    return term_above(term, secrets.randbits(RANDOM_BITS))


def _verdicts(text: str) -> tuple[LayerVerdict, ...]:
    return tuple(LayerVerdict(**verdict) for verdict in json.loads(text))


def _from_blob(blob: bytes) -> Int32:
    return np.frombuffer(blob, dtype="<i4").astype(np.int32)


def _packed(values: Int32) -> bytes:
    return zlib.compress(np.ascontiguousarray(values, dtype="<i4").tobytes(), 1)


def _unpacked(blob: bytes, shape: tuple[int, ...]) -> Int32:
    try:
        content = zlib.decompressobj().decompress(blob, 4 * int(np.prod(shape)) + 1)
    except zlib.error as error:
        raise ValueError(f"a stored layout is damaged: {error}") from error
    return _from_blob(content).reshape(shape)


class StoreWriter:
    """Runs a store's methods on a thread of its own. Balancing goes on where the disk does not.

    ``failures`` counts writes that failed; ``failing`` is the error of the last one, empty where it succeeded.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.failures = 0
        self.failing = ""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="eplb-store")

    def post(self, write: Callable[..., None], *arguments: Any) -> None:
        """Write some time soon; a failure is logged."""
        self._thread.submit(write, *arguments).add_done_callback(self._note)

    async def write(self, write: Callable[..., None], *arguments: Any) -> None:
        """Write, and wait until it is done; a failure is logged."""
        written = self._thread.submit(write, *arguments)
        written.add_done_callback(self._note)
        await asyncio.gather(asyncio.wrap_future(written), return_exceptions=True)

    async def run(self, call: Callable[..., T], *arguments: Any) -> T:
        """Read or write, and wait for it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def close(self) -> None:
        """Finish what was asked for, then close the store."""
        self._thread.shutdown(wait=True)
        self.store.close()

    def _note(self, written: Future[None]) -> None:
        error = written.exception()
        if error is not None:
            self.failures += 1
            if not self.failing:
                _log.error("store_write_failed", error=str(error))
        self.failing = str(error) if error is not None else ""
