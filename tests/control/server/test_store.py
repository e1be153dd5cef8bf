"""What the store was given must be there after any end of the service, and nothing else may pass for a store."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from eplb_service.control.core.errors import ConflictError
from eplb_service.control.core.first_layout import FirstLayout
from eplb_service.control.core.leader_term import clock_of, term_above, term_at
from eplb_service.control.core.offer import Offer
from eplb_service.control.core.plan_tracker import Outcome
from eplb_service.control.core.totals import Totals
from eplb_service.control.server.service import running_service
from eplb_service.control.server.store import store as store_module
from eplb_service.control.server.store.store import Store, higher_term
from eplb_service.control.server.store.store_file import MEMORY, StoreError
from eplb_service.control.server.store.stored import StoredDeployment
from eplb_service.planner.outlook import Serving
from eplb_service.wire.fields import LAST_VERSION
from eplb_service.wire.generated import operator_pb2, operator_pb2_grpc
from tests.control.core.story import decision_of, swap_of
from tests.control.fake_group import FakeGroup, first_placement, live_of, skewed_heat
from tests.control.server.test_service import settings, until

LIVE = live_of(first_placement())
_IN_2106 = 1 << 32
"""What a clock may say that was never set, in seconds."""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "state.sqlite3")


def switched(layer: int, live=LIVE):  # type: ignore[no-untyped-def]
    update = swap_of(live, layer)
    return live.with_layer(layer, update.phy2log_RS, update.log2phy_RE)


def test_the_term_grows_with_every_start(path: str) -> None:
    terms = []
    for _ in range(3):
        store = Store(path)
        terms.append(store.leader_term)
        store.close()
    assert terms == sorted(set(terms))


def test_a_service_that_lost_its_store_is_not_taken_for_an_older_one(path: str) -> None:
    store = Store(path)
    lost = store.leader_term
    store.close()
    Path(path).unlink()
    store = Store(path)
    # The clock in seconds comes first; within one of them the order is by chance.
    assert store.leader_term >> 20 >= lost >> 20
    store.close()


def test_a_term_that_was_raised_for_a_deployment_is_kept_and_grows_with_every_start(path: str) -> None:
    store = Store(path)
    raised = higher_term(term_at(_IN_2106, 0))
    store.raise_term("decode", raised)
    store.save_deployment(StoredDeployment("prefill", False, Totals(), ""))
    store.close()
    store = Store(path)
    decode, prefill = store.deployments()
    assert decode.leader_term > raised > store.leader_term
    assert prefill.leader_term == 0, "a wrong clock is no other deployment's"
    store.forget("decode")
    store.save_deployment(StoredDeployment("decode", False, Totals(), ""))
    assert [stored.leader_term for stored in store.deployments()] == [0, 0]
    store.close()


def test_a_store_of_an_older_release_knows_no_raised_terms(path: str) -> None:
    Store(path).close()
    with sqlite3.connect(path) as database:
        database.execute("DROP TABLE raised_terms")
    database.close()
    store = Store(path)
    assert store.deployments() == []
    store.raise_term("decode", LAST_VERSION - 1)
    store.close()
    # There is no higher one: the service starts all the same.
    (decode,) = Store(path).deployments()
    assert decode.leader_term == LAST_VERSION - 1


def test_terms_are_the_clock_and_chance_and_have_an_end() -> None:
    term = term_at(_IN_2106, 7)
    assert clock_of(term) == "2106-02-07 06:28:16 UTC"
    above = [term_above(term, chance) for chance in (0, 7, (1 << 20) - 1)]
    assert min(above) > term | ((1 << 20) - 1)
    assert term_at(1e300, 0) == term_at(1 << 36, 0) < LAST_VERSION
    assert "4147" in clock_of(LAST_VERSION - 1)
    with pytest.raises(ConflictError, match="start the engines again"):
        term_above(LAST_VERSION - 1, 0)


def test_plan_numbers_grow_over_starts(path: str) -> None:
    store = Store(path)
    first = store.new_plan_id()
    store.begin_plan("decode", Offer.of(first + 10_000, LIVE, decision_of(LIVE, 0)), 1)
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
    store.save_first_layout("decode", FirstLayout("before", Serving(placement, placement.default_log2phy())))
    store.save_first_layout("decode", FirstLayout("first", Serving(placement, log2phy_RLE)))
    store.close()
    store = Store(path)
    found = store.first_layout("decode")
    assert found is not None
    assert found.group_id == "first"
    np.testing.assert_array_equal(found.layout.placement.phy2log_LRS, placement.phy2log_LRS)
    np.testing.assert_array_equal(found.layout.log2phy_RLE, log2phy_RLE)
    assert store.first_layout("prefill") is None
    store.forget("decode")
    assert store.first_layout("decode") is None


@pytest.mark.parametrize("content", [b"no zlib", zlib.compress(b"short"), zlib.compress(bytes(1 << 20))])
def test_a_first_layout_that_is_damaged_is_said(path: str, content: bytes) -> None:
    store = Store(path)
    store.save_first_layout("decode", FirstLayout("first", LIVE.serving))
    store.close()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE first_layouts SET phy2log = ?", (content,))
    database.close()
    with pytest.raises(ValueError, match=r"damaged|buffer|reshape"):
        Store(path).first_layout("decode")


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
        store.begin_plan("decode", Offer.of(plan_id, live, decision_of(live, plan_id % 3)), 1)
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
    done, open_ = (Offer.of(plan_id, LIVE, decision_of(LIVE, 0)) for plan_id in (5, 6))
    store.begin_plan("decode", done, 1)
    store.end_plan(5, Outcome.DONE, "", 1)
    store.begin_plan("decode", open_, 1)
    store.close()
    newest, oldest = Store(path).plans("decode")
    assert (oldest.plan_id, oldest.outcome, oldest.committed) == (5, Outcome.DONE, 1)
    assert oldest.verdicts == done.decision.verdicts
    assert (newest.outcome, newest.reason) == (Outcome.INTERRUPTED, "the service stopped")


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


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("not a database, but long enough to be taken for one" * 100)
    with pytest.raises(StoreError, match="file is not a database"):
        Store(str(text))
    other = tmp_path / "other"
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE things (id)")
    database.close()
    with pytest.raises(StoreError, match="database of something else"):
        Store(str(other))
    with pytest.raises(StoreError, match="directory does not exist"):
        Store(str(tmp_path / "nowhere" / "file"))


def test_a_store_of_a_later_release_is_refused(path: str) -> None:
    Store(path).close()
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(StoreError, match="schema version 99"):
        Store(path)


def test_no_store_at_all() -> None:
    store = Store(MEMORY)
    assert store.leader_term > 0
    assert store.deployments() == []
    store.close()


async def test_a_restarted_service_shows_the_history_and_goes_on(path: str) -> None:
    async with running_service(settings(store=path)) as running, FakeGroup(running.address) as group:
        await group.join()
        for _ in range(4):
            await group.send_heat(skewed_heat(8))
        await group.carry_out(await group.hear_plan())
        deployment = running.plane.deployments["decode"]
        await until(lambda: deployment.ended_plan is not None)
        live, totals = group.live, deployment.totals
    async with running_service(settings(store=path)) as running, FakeGroup(running.address, live) as group:
        operator = operator_pb2_grpc.OperatorServiceStub(group.channel)
        (before,) = (await operator.ListDeployments(operator_pb2.ListDeploymentsRequest())).deployments
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


@pytest.mark.parametrize("damage", ["truncated", "middle", "magic"])
def test_a_damaged_store_is_set_aside_and_begun_again(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "state.sqlite3"
    store = Store(str(path))
    term = store.leader_term
    for number in range(200):
        store.save_deployment(StoredDeployment(f"deployment-{number}", True, Totals(), "x" * 500))
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


def test_two_services_never_have_the_same_term(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1.8e9)
    terms = [Store(MEMORY).leader_term for _ in range(8)]
    assert len(set(terms)) == len(terms)
    assert all(term >> 20 == 1_800_000_000 for term in terms)
