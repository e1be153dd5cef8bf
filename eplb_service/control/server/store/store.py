"""What outlives a service: its term, every deployment's placements, and every plan with its outcome.

One SQLite file, written in transactions with a write-ahead log, so that a kill at any moment leaves it whole.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from dataclasses import asdict

import numpy as np

from eplb_service.control.core.errors import ConflictError
from eplb_service.control.core.first_layout import FirstLayout
from eplb_service.control.core.leader_term import RANDOM_BITS, term_above, term_at
from eplb_service.control.core.live_placement import LivePlacement
from eplb_service.control.core.offer import Offer
from eplb_service.control.core.plan_tracker import Outcome
from eplb_service.control.core.totals import Totals
from eplb_service.control.server.store.first_layouts import first_layout, save_first_layout
from eplb_service.control.server.store.store_file import open_store_file
from eplb_service.control.server.store.stored import StoredDeployment, StoredPlacement, StoredPlan
from eplb_service.placement import Int32, Placement
from eplb_service.planner.plan import LayerVerdict

_PLANS_KEPT = 10_000
_LAYERS_PER_SNAPSHOT = 1024
_SNAPSHOTS_KEPT = 4


class Store:
    """An open store; not for use by two threads at a time.

    Parameters
    ----------
    path
        A file, made where there is none, or ``MEMORY``.

    above
        Leader term that this start's must be past; 0 where no other service is known of.

    Raises ``StoreError`` where the file is something else, or cannot be written. ``leader_term`` is this start's:
    past that of the last start on the same file, and the clock, and never equal to another service's; so is the one of
    each deployment for which it was raised. Plans that were under way are marked interrupted.
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
                    self._raise_term(name, higher_term(term))
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
        """A number that no plan of this file has, and no plan of a service without one is likely to have had."""
        self._last_plan_id += 1
        return self._last_plan_id

    # Written

    def save_deployment(self, deployment: StoredDeployment) -> None:
        """Remember what is not about one placement or plan."""
        with self._db:
            self._name(deployment.name)
            self._db.execute(
                "UPDATE deployments SET paused = ?, totals = ?, last_decision = ? WHERE name = ?",
                (
                    deployment.paused,
                    json.dumps(asdict(deployment.totals)),
                    deployment.last_decision,
                    deployment.name,
                ),
            )

    def save_placement(self, name: str, live: LivePlacement) -> None:
        """Remember what a deployment serves, unless that is what was remembered last."""
        known = self.latest_placement(name)
        if known is not None and (known.epoch, known.digest) == (live.epoch, live.digest):
            return
        with self._db:
            self._name(name)
            self._insert_snapshot(name, live)

    def save_layer(self, name: str, live: LivePlacement, layer: int) -> None:
        """Remember that one layer has switched, which led to ``live``."""
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

    def save_first_layout(self, name: str, first: FirstLayout) -> None:
        """Remember what a deployment's ranks came with."""
        with self._db:
            self._name(name)
            save_first_layout(self._db, name, first)

    def begin_plan(self, name: str, offer: Offer, leader_term: int) -> None:
        """Remember a plan of this term before any rank hears of it."""
        verdicts = json.dumps([asdict(verdict) for verdict in offer.decision.verdicts])
        with self._db:
            self._name(name)
            self._db.execute(
                "INSERT INTO plans (id, deployment, at, leader_term, base_epoch, verdicts) VALUES (?, ?, ?, ?, ?, ?)",
                (offer.plan_id, name, time.time(), leader_term, offer.base_epoch, verdicts),
            )
            self._db.execute(
                "DELETE FROM plans WHERE deployment = ?1 AND id <= (SELECT id FROM plans WHERE deployment = ?1 "
                "ORDER BY id DESC LIMIT 1 OFFSET ?2)",
                (name, _PLANS_KEPT),
            )

    def end_plan(self, plan_id: int, outcome: Outcome, reason: str, committed: int) -> None:
        """Remember what became of a plan."""
        with self._db:
            self._db.execute(
                "UPDATE plans SET outcome = ?, reason = ?, committed = ? WHERE id = ?",
                (outcome.value, reason, committed, plan_id),
            )

    def raise_term(self, name: str, term: int) -> None:
        """Remember that a deployment's leader term is past that of the service."""
        with self._db:
            self._name(name)
            self._raise_term(name, term)

    def forget(self, name: str) -> None:
        """Remove a deployment and all of its history."""
        with self._db:
            self._db.execute("DELETE FROM deployments WHERE name = ?", (name,))

    # Read

    def deployments(self) -> list[StoredDeployment]:
        """All that were ever known, by name."""
        rows = self._db.execute(
            "SELECT name, paused, totals, last_decision, COALESCE(raised_terms.leader_term, 0) FROM deployments "
            "LEFT JOIN raised_terms ON raised_terms.deployment = name ORDER BY name"
        )
        return [
            StoredDeployment(name, bool(paused), Totals(**json.loads(totals)), last, term)
            for name, paused, totals, last, term in rows
        ]

    def latest_placement(self, name: str) -> StoredPlacement | None:
        """What a deployment served when it was last heard of."""
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

    def first_layout(self, name: str) -> FirstLayout | None:
        """What the ranks came with that a deployment was last seen with."""
        return first_layout(self._db, name)

    def plans(self, name: str, limit: int = 100) -> list[StoredPlan]:
        """The newest plans of a deployment, newest first."""
        rows = self._db.execute(
            "SELECT id, at, leader_term, base_epoch, verdicts, outcome, reason, committed FROM plans "
            "WHERE deployment = ? ORDER BY id DESC LIMIT ?",
            (name, limit),
        )
        return [
            StoredPlan(
                plan_id,
                at,
                term,
                base_epoch,
                tuple(LayerVerdict(**verdict) for verdict in json.loads(verdicts)),
                Outcome(outcome) if outcome else None,
                reason,
                committed,
            )
            for plan_id, at, term, base_epoch, verdicts, outcome, reason, committed in rows
        ]

    # Rows

    def _name(self, name: str) -> None:
        self._db.execute("INSERT OR IGNORE INTO deployments (name) VALUES (?)", (name,))

    def _raise_term(self, name: str, term: int) -> None:
        self._db.execute("INSERT OR REPLACE INTO raised_terms VALUES (?, ?)", (name, term))

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
        self._db.execute(
            "INSERT INTO placements (deployment, at, epoch, digest, experts, layers, ranks, slots, layer, phy2log) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                name,
                time.time(),
                live.epoch,
                live.digest,
                placement.experts,
                placement.layers,
                placement.ranks,
                placement.slots,
                layer,
                np.ascontiguousarray(slots, dtype="<i4").tobytes(),
            ),
        )


def higher_term(term: int) -> int:
    """A term above ``term`` that no other service has; raises ``ConflictError`` where there is none."""
    return term_above(term, secrets.randbits(RANDOM_BITS))


def _from_blob(blob: bytes) -> Int32:
    return np.frombuffer(blob, dtype="<i4").astype(np.int32)
