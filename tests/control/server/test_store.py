"""What the store was given must be there after any end of the service, and nothing else may pass for a store."""

from __future__ import annotations

import sqlite3
import subprocess
import sys

import numpy as np
import pytest

from eplb_service.control.core.deployment import Totals
from eplb_service.control.core.plan_tracker import Outcome, PlanTracker
from eplb_service.control.server.service import running_service
from eplb_service.control.server.store import store as store_module
from eplb_service.control.server.store.store import Store, StoredDeployment
from eplb_service.planner.plan import Serving
from eplb_service.wire.generated import operator_pb2
from tests.control.core.story import decision_of, swap_of
from tests.control.fake_group import FakeGroup, first_placement, live_of
from tests.control.server.test_service import settings, until

LIVE = live_of(first_placement())


def switched(layer: int, live=LIVE):  # type: ignore[no-untyped-def]
    update = swap_of(live, layer)
    return live.with_layer(layer, update.phy2log_RS, update.log2phy_RE)


def test_plan_numbers_grow_over_starts(path: str) -> None:
    store = Store(path)
    first = store.new_plan_id()
    store.begin_plan("decode", PlanTracker.of(first + 10_000, LIVE, decision_of(LIVE, 0)), 1)
    store.close()
    assert Store(path).new_plan_id() == first + 10_001


def test_what_is_served_is_found_again_layer_by_layer(path: str) -> None:
    store = Store(path)
    store.save_placement("decode", LIVE)
    one = switched(1)
    two = switched(2, one)
    store.save_layer("decode", one, 1)
    store.save_layer("decode", two, 2)
    store.close()
    found = Store(path).latest_placement("decode")
    assert found is not None
    assert (found.epoch, found.digest) == (2, two.digest)
    np.testing.assert_array_equal(found.placement.phy2log_LRS, two.placement.phy2log_LRS)
    assert Store(path).latest_placement("prefill") is None


@pytest.mark.parametrize("entries", [0, 1, 3])
def test_what_ranks_came_with_is_found_again_with_its_tables(path: str, entries: int) -> None:
    placement = LIVE.placement
    log2phy_RLE = placement.default_log2phy()
    if entries:
        # The last replica of each expert in place of the rule's, and in turn where there are several entries.
        for layer, row_RS in enumerate(placement.phy2log_LRS):
            for slot, expert in enumerate(row_RS.ravel()):
                log2phy_RLE[:, layer, expert] = slot
        log2phy_RLE = np.repeat(log2phy_RLE[..., None], entries, axis=3)
    store = Store(path)
    store.save_first_layout("decode", "before", Serving(placement, placement.default_log2phy()))
    store.save_first_layout("decode", "first", Serving(placement, log2phy_RLE))
    store.close()
    store = Store(path)
    found = store.first_layout("decode")
    assert found is not None
    assert found[0] == "first"
    np.testing.assert_array_equal(found[1].placement.phy2log_LRS, placement.phy2log_LRS)
    np.testing.assert_array_equal(found[1].log2phy_RLE, log2phy_RLE)
    assert store.first_layout("prefill") is None
    store.forget("decode")
    assert store.first_layout("decode") is None


def test_a_store_of_an_older_release_knows_no_first_layouts(path: str) -> None:
    Store(path).close()
    with sqlite3.connect(path) as database:
        database.execute("DROP TABLE first_layouts")
    database.close()
    assert Store(path).first_layout("decode") is None


def test_history_is_bounded(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_LAYERS_PER_SNAPSHOT", 4)
    monkeypatch.setattr(store_module, "_SNAPSHOTS_KEPT", 2)
    monkeypatch.setattr(store_module, "_PLANS_KEPT", 3)
    store = Store(path)
    live = LIVE
    store.save_placement("decode", live)
    for plan_id in range(1, 41):
        store.begin_plan("decode", PlanTracker.of(plan_id, live, decision_of(live, plan_id % 3)), 1)
        live = switched(plan_id % 3, live)
        store.save_layer("decode", live, plan_id % 3)
    store.close()
    with sqlite3.connect(path) as database:
        (rows,) = database.execute("SELECT COUNT(*) FROM placements").fetchone()
    database.close()
    assert rows <= 2 * (4 + 1)
    again = Store(path)
    assert [plan.plan_id for plan in again.plans("decode")] == [40, 39, 38]
    found = again.latest_placement("decode")
    assert found is not None
    assert found.digest == live.digest
    again.close()


def test_a_plan_is_found_with_its_outcome_and_verdicts(path: str) -> None:
    store = Store(path)
    done, open_ = (PlanTracker.of(plan_id, LIVE, decision_of(LIVE, 0)) for plan_id in (5, 6))
    store.begin_plan("decode", done, 1)
    store.end_plan(5, Outcome.DONE, "", 1)
    store.begin_plan("decode", open_, 1)
    store.close()
    newest, oldest = Store(path).plans("decode")
    assert (oldest.plan_id, oldest.outcome, oldest.committed) == (5, Outcome.DONE.value, 1)
    assert oldest.verdicts == done.decision.verdicts
    assert (newest.outcome, newest.reason) == (Outcome.INTERRUPTED.value, "the service stopped")


def test_what_a_deployment_has_been_through_is_remembered(path: str) -> None:
    stored = StoredDeployment("decode", True, Totals(3, 4, 5, 6, 7), "kept")
    store = Store(path)
    store.save_deployment(stored)
    store.close()
    store = Store(path)
    assert store.deployments() == [stored]
    store.forget("decode")
    assert store.deployments() == []
    store.close()


def test_a_killed_writer_leaves_a_whole_store(path: str) -> None:
    script = (
        "import os, sys\n"
        "from tests.control.server.test_store import LIVE, Store, switched\n"
        f"store = Store({path!r})\n"
        "store.save_placement('decode', LIVE)\n"
        "store.save_layer('decode', switched(0), 0)\n"
        "store._db.execute('BEGIN'); store._db.execute('DELETE FROM placements')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script], check=False, timeout=300)
    assert killed.returncode == -9
    store = Store(path)
    found = store.latest_placement("decode")
    assert found is not None
    assert found.digest == switched(0).digest
    assert store.leader_term > 1
    store.close()


async def test_a_restarted_service_shows_the_history_and_goes_on(path: str) -> None:
    async with running_service(settings(store=path)) as running, FakeGroup(running.address) as group:
        await group.join()
        await group.fill_window()
        await group.carry_out(await group.hear_plan())
        deployment = running.plane.deployments["decode"]
        await until(lambda: deployment.ended_plan is not None)
        live, totals = group.live, deployment.totals
    async with running_service(settings(store=path)) as running, FakeGroup(running.address, live) as group:
        (before,) = (await group.operator.ListDeployments(operator_pb2.ListDeploymentsRequest())).deployments
        assert (before.epoch, before.digest, before.agents_connected) == (live.epoch, live.digest, 0)
        assert before.layers_switched == totals.layers_switched > 0
        assert list(before.problems) == ["no agent has connected since the service started"]
        welcomes = await group.join()
        assert {welcome.leader_term for welcome in welcomes} == {running.plane.leader_term}
        assert running.plane.deployments["decode"].live is not None
        assert running.plane.deployments["decode"].live.epoch == live.epoch
        found = running.plane.deployments["decode"].found
        assert found is not None
        # Left alone is what the ranks came with, not what a service met that started later.
        np.testing.assert_array_equal(found.placement.phy2log_LRS, first_placement().phy2log_LRS)
    async with running_service(settings(store=path)) as running, FakeGroup(running.address, live) as group:
        await group.join(group_id="another")
        found = running.plane.deployments["decode"].found
        assert found is not None
        np.testing.assert_array_equal(found.placement.phy2log_LRS, live.placement.phy2log_LRS)
