"""The store holds what it was given after any end of the service; damaged files are set aside, others refused."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from eplb_service.control.core.deployment import Totals
from eplb_service.control.core.plan_tracker import Outcome, PlanTracker
from eplb_service.control.server import store as store_module
from eplb_service.control.server.service import running_service
from eplb_service.control.server.store import Store, StoredDeployment, StoreError
from eplb_service.planner.plan import Serving
from eplb_service.wire.generated import operator_pb2
from tests.control.core.story import decision_of
from tests.control.fake_group import FakeGroup, first_placement, live_of
from tests.control.server.test_service import settings, until

LIVE = live_of(first_placement())


def test_plan_numbers_grow_over_starts(path: str) -> None:
    store = Store(path)
    first = store.new_plan_id()
    store.begin_plan("decode", PlanTracker.of(first + 10_000, LIVE, decision_of(LIVE, 0)), 1)
    store.close()
    assert Store(path).new_plan_id() == first + 10_001


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


def test_history_is_bounded(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_PLANS_KEPT", 3)
    store = Store(path)
    for plan_id in range(1, 41):
        name = "prefill" if plan_id == 20 else "decode"
        store.begin_plan(name, PlanTracker.of(plan_id, LIVE, decision_of(LIVE, 0)), 1)
    assert [plan.plan_id for plan in store.plans("decode")] == [40, 39, 38]
    assert [plan.plan_id for plan in store.plans("prefill")] == [20]
    store.close()


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


STORED = StoredDeployment("decode", True, 9, Totals(3, 4, 5, 6, 7), "kept", 12, (1 << 64) - 1, 3, 8, 4, 3)


def test_a_deployment_is_found_as_it_was_left(path: str) -> None:
    store = Store(path)
    store.save_deployment(StoredDeployment("decode"))
    store.save_deployment(STORED)
    store.begin_plan("decode", PlanTracker.of(5, LIVE, decision_of(LIVE, 0)), 1)
    store.close()
    store = Store(path)
    assert store.deployments() == [STORED]
    store.forget("decode")
    assert (store.deployments(), store.plans("decode")) == ([], [])
    store.close()


def test_a_killed_writer_leaves_a_whole_store(path: str) -> None:
    script = (
        "import os, sys\n"
        "from tests.control.server.test_store import STORED, Store\n"
        f"store = Store({path!r})\n"
        "store.save_deployment(STORED)\n"
        "store._db.execute('BEGIN'); store._db.execute('DELETE FROM deployments')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script], check=False, timeout=300)
    assert killed.returncode == -9
    store = Store(path)
    assert store.deployments() == [STORED]
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


def test_a_store_of_the_first_release_opens_with_all_that_it_holds(path: str) -> None:
    shutil.copy(Path(__file__).parents[2] / "data" / "store-0.1.0.sqlite3", path)
    store = Store(path)
    assert store.deployments() == [STORED]
    (plan,) = store.plans("decode")
    assert (plan.plan_id, plan.at, plan.outcome) == (5, 1.5e9, Outcome.DONE.value)
    assert plan.verdicts == decision_of(LIVE, 0).verdicts
    found = store.first_layout("decode")
    assert found is not None
    assert found[0] == "first"
    np.testing.assert_array_equal(found[1].log2phy_RLE, LIVE.serving.log2phy_RLE)
    store.close()


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("not a database, but long enough to be taken for one" * 100)
    with pytest.raises(StoreError, match="file is not a database"):
        Store(str(text))
    other = tmp_path / "other"
    with contextlib.closing(sqlite3.connect(other)) as database:
        database.execute("CREATE TABLE things (id)")
    with pytest.raises(StoreError, match="database of something else"):
        Store(str(other))
    with pytest.raises(StoreError, match="directory does not exist"):
        Store(str(tmp_path / "nowhere" / "file"))


def test_a_store_of_a_later_release_is_refused(path: str) -> None:
    Store(path).close()
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match="schema version 99"):
        Store(path)


@pytest.mark.parametrize("damage", ["truncated", "middle", "magic"])
def test_a_damaged_store_is_set_aside_and_begun_again(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "state.sqlite3"
    store = Store(str(path))
    term = store.leader_term
    for number in range(200):
        store.save_deployment(StoredDeployment(f"deployment-{number}", last_decision="x" * 500))
    store.close()
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        content = content[: len(content) // 2]
    elif damage == "middle":
        content[4096 : len(content) - 4096] = bytes(len(content) - 2 * 4096)
    else:
        content[:16] = bytes(16)
    path.write_bytes(content)
    again = Store(str(path))
    assert again.deployments() == []
    assert again.leader_term > term >> 20 << 20
    again.close()
    (aside,) = tmp_path.glob("state.sqlite3.damaged-*")
    assert aside.read_bytes() == content


@pytest.mark.parametrize("part", [slice(0, 100), slice(100, None), slice(0, 0)])
def test_a_first_layout_that_is_damaged_is_said(path: str, part: slice) -> None:
    store = Store(path)
    store.save_first_layout("decode", "first", LIVE.serving)
    store.close()
    with sqlite3.connect(path) as database:
        (content,) = database.execute("SELECT layout FROM first_layouts").fetchone()
        database.execute("UPDATE first_layouts SET layout = ?", (content[part],))
    database.close()
    with pytest.raises(ValueError, match="a stored layout is damaged"):
        Store(path).first_layout("decode")


def test_a_start_that_cannot_write_says_so(path: str) -> None:
    with contextlib.closing(Store(path)) as store:
        store.begin_plan("decode", PlanTracker.of(5, LIVE, decision_of(LIVE, 0)), 1)
        store._db.execute(
            "CREATE TRIGGER f BEFORE UPDATE ON plans BEGIN SELECT RAISE(ABORT, 'disk is full'); END"
        )
    with pytest.raises(StoreError, match="disk is full; make room"):
        Store(path)
