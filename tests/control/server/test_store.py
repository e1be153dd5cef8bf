"""The store keeps its content no matter how the service ends, sets damaged data aside, and reports losses."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from eplb_core.planner.plan import Layout
from eplb_core.wire.generated import operator_pb2
from eplb_service.control.core.health import problems
from eplb_service.control.core.plan_tracker import Outcome, PlanTracker
from eplb_service.control.server import store as store_module
from eplb_service.control.server.service import run_service
from eplb_service.control.server.store import Store, StoredDeployment
from eplb_service.control.server.store_file import MEMORY, StoreError
from tests.control.core.story import decision_of
from tests.control.fake_group import FakeGroup, first_placement, live_of
from tests.control.server.service_under_test import settings, tick, until
from tests.control.server.stored_deployment import STORED

LIVE = live_of(first_placement())


def test_plan_ids_increase_across_restarts(path: str) -> None:
    store = Store(path)
    first = store.new_plan_id()
    store.begin_plan("decode", PlanTracker.of(first + 10_000, LIVE, decision_of(LIVE, 0)), 1)
    store.close()
    assert Store(path).new_plan_id() == first + 10_001


def test_plan_ids_without_a_store_file_are_higher_than_those_of_earlier_services() -> None:
    """Agents outlive services and remember plan ids, so without a store, ids start from the clock."""
    before = int(time.time())
    store = Store(MEMORY)
    assert before < store.new_plan_id() <= int(time.time()) + 1
    store.close()


@pytest.mark.parametrize("entries", [0, 1, 3])
def test_the_initial_layout_is_restored_with_its_tables(path: str, entries: int) -> None:
    placement = LIVE.placement
    log2phy_RLE = placement.default_log2phy()
    if entries:
        # Dispatch to each expert's last replica instead of the default one, in all entries of a dealing table.
        for layer, row_RS in enumerate(placement.phy2log_LRS):
            for slot, expert in enumerate(row_RS.ravel()):
                log2phy_RLE[:, layer, expert] = slot
        log2phy_RLE = np.repeat(log2phy_RLE[..., None], entries, axis=3)
    store = Store(path)
    store.save_initial_layout("decode", "before", Layout(placement, placement.default_log2phy()))
    store.save_initial_layout("decode", "first", Layout(placement, log2phy_RLE))
    store.close()
    store = Store(path)
    first_layout = store.initial_layout("decode")
    assert first_layout is not None
    assert first_layout[0] == "first"
    np.testing.assert_array_equal(first_layout[1].placement.phy2log_LRS, placement.phy2log_LRS)
    np.testing.assert_array_equal(first_layout[1].log2phy_RLE, log2phy_RLE)
    assert store.initial_layout("prefill") is None
    store.forget("decode")
    assert store.initial_layout("decode") is None


def test_the_plan_history_is_bounded(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_PLANS_KEPT", 3)
    store = Store(path)
    for plan_id in range(1, 41):
        name = "prefill" if plan_id == 20 else "decode"
        store.begin_plan(name, PlanTracker.of(plan_id, LIVE, decision_of(LIVE, 0)), 1)
    assert [plan.plan_id for plan in store.plans("decode")] == [40, 39, 38]
    assert [plan.plan_id for plan in store.plans("prefill")] == [20]
    store.close()


def test_plans_are_restored_with_outcome_and_verdicts(path: str) -> None:
    store = Store(path)
    done, interrupted = (PlanTracker.of(plan_id, LIVE, decision_of(LIVE, 0)) for plan_id in (5, 6))
    store.begin_plan("decode", done, 1)
    store.end_plan(5, Outcome.DONE, "", 1)
    store.begin_plan("decode", interrupted, 1)
    store.close()
    newest, oldest = Store(path).plans("decode")
    assert (oldest.plan_id, oldest.outcome, oldest.committed) == (5, Outcome.DONE.value, 1)
    assert oldest.verdicts == done.decision.verdicts
    assert (newest.outcome, newest.reason) == (Outcome.INTERRUPTED.value, "the service stopped")


def test_a_deployment_is_restored_as_it_was_saved(path: str) -> None:
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


def test_a_killed_writer_leaves_a_consistent_store(path: str) -> None:
    script = (
        "import os, sys\n"
        "from eplb_service.control.server.store import Store\n"
        "from tests.control.server.stored_deployment import STORED\n"
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


async def test_a_restarted_service_restores_the_history_and_continues(path: str) -> None:
    async with run_service(settings(store=path)) as running, FakeGroup(running.address) as group:
        await group.join()
        await group.fill_window()
        await group.carry_out(await group.hear_plan())
        deployment = running.plane.deployments["decode"]
        await until(lambda: deployment.ended_plan is not None)
        live = group.live
        totals = deployment.totals
    async with run_service(settings(store=path)) as running, FakeGroup(running.address, live) as group:
        (before,) = (await group.operator.ListDeployments(operator_pb2.ListDeploymentsRequest())).deployments
        assert (before.epoch, before.digest, before.agents_connected) == (live.epoch, live.digest, 0)
        assert before.layers_switched == totals.layers_switched > 0
        assert list(before.problems) == ["no agent has connected since the service started"]
        welcomes = await group.join()
        assert {welcome.leader_term for welcome in welcomes} == {running.plane.leader_term}
        assert running.plane.deployments["decode"].live is not None
        assert running.plane.deployments["decode"].live.epoch == live.epoch
        first_layout = running.plane.deployments["decode"].initial_layout
        assert first_layout is not None
        # The initial layout is the one with which the ranks first joined, not the one that the second service saw.
        np.testing.assert_array_equal(first_layout.placement.phy2log_LRS, first_placement().phy2log_LRS)
    async with run_service(settings(store=path)) as running, FakeGroup(running.address, live) as group:
        await group.join(group_id="another")
        first_layout = running.plane.deployments["decode"].initial_layout
        assert first_layout is not None
        np.testing.assert_array_equal(first_layout.placement.phy2log_LRS, live.placement.phy2log_LRS)


def test_a_store_written_by_the_first_release_opens_with_all_its_content(path: str) -> None:
    shutil.copy(Path(__file__).parents[2] / "data" / "store-0.1.0.sqlite3", path)
    store = Store(path)
    assert store.deployments() == [STORED]
    (plan,) = store.plans("decode")
    assert (plan.plan_id, plan.at, plan.outcome) == (5, 1.5e9, Outcome.DONE.value)
    assert plan.verdicts == decision_of(LIVE, 0).verdicts
    first_layout = store.initial_layout("decode")
    assert first_layout is not None
    assert first_layout[0] == "first"
    np.testing.assert_array_equal(first_layout[1].log2phy_RLE, LIVE.serving.log2phy_RLE)
    store.close()


def test_files_that_are_not_stores_are_rejected(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("not a database, but long enough to be taken for one" * 100)
    with pytest.raises(StoreError, match="file is not a database"):
        Store(str(text))
    database_path = tmp_path / "other"
    with contextlib.closing(sqlite3.connect(database_path)) as database:
        database.execute("CREATE TABLE things (id)")
    with pytest.raises(StoreError, match="belongs to another application"):
        Store(str(database_path))
    with pytest.raises(StoreError, match="directory does not exist"):
        Store(str(tmp_path / "nowhere" / "file"))


def test_a_store_with_a_later_schema_version_is_rejected(path: str) -> None:
    Store(path).close()
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match="schema version 99"):
        Store(path)


@pytest.mark.parametrize("damage", ["truncated", "middle", "magic"])
def test_a_damaged_store_is_set_aside_and_replaced_by_a_new_one(tmp_path: Path, damage: str) -> None:
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


@pytest.mark.parametrize("remainder", [slice(0, 100), slice(100, None), slice(0, 0)])
def test_a_damaged_initial_layout_is_set_aside(path: str, remainder: slice) -> None:
    store = Store(path)
    store.save_initial_layout("decode", "first", LIVE.serving)
    store.close()
    with sqlite3.connect(path) as database:
        (content,) = database.execute("SELECT layout FROM first_layouts").fetchone()
        database.execute("UPDATE first_layouts SET layout = ?", (content[remainder],))
    database.close()
    store = Store(path)
    assert store.initial_layout("decode") is None
    assert_set_aside(store, "first_layouts")
    store.close()


def assert_set_aside(store: Store, table: str, rows: int = 1) -> None:
    """Check that ``rows`` rows of ``table`` were moved to ``set_aside`` and that each has a notice with its reason."""
    rows_aside = store._db.execute(
        "SELECT reason, content FROM set_aside WHERE origin = ?", (table,)
    ).fetchall()
    assert len(rows_aside) == len(store.notices) == rows
    assert all(
        f"of the store's table {table} could not be read and was set aside: " in notice
        for notice in store.notices
    )
    assert all(reason and content.startswith("(") for reason, content in rows_aside)


def state_with(**changes: object) -> str:
    return json.dumps({**asdict(STORED), **changes})


BAD_STATES: dict[str, object] = {
    "invalid JSON": state_with()[:-9],
    "JSON of the wrong type": "[1, 2]",
    "null": "null",
    "deeply nested JSON": "[" * 100_000,
    "invalid UTF-8": state_with().encode().replace(b"kept", b"\xff\xfe").replace(b"12", b"\xff"),
    "bytes": b"\x00\xff\x80",
    "a number as text": state_with(epoch="12"),
    "a fraction": state_with(epoch=1.5),
    "a boolean as a number": state_with(paused=1),
    "a number as a boolean": state_with(layers=True),
    "a negative number": state_with(epoch=-1),
    "a number above its limit": state_with(experts=10**30),
    "NaN": state_with(leader_term=float("nan")),
    "totals of the wrong type": state_with(totals=[3]),
    "a total of the wrong type": state_with(totals={"bytes_moved": "5"}),
    "a different name": state_with(name="prefill"),
}


@pytest.mark.parametrize("state", BAD_STATES.values(), ids=BAD_STATES)
async def test_an_unreadable_deployment_is_set_aside_and_the_other_deployments_are_kept(
    path: str, state: object
) -> None:
    store = Store(path)
    for name in ("decode", "other"):
        store.save_deployment(replace(STORED, name=name))
    store._db.execute("UPDATE deployments SET state = ? WHERE name = 'decode'", (state,))
    store.close()
    async with run_service(settings(store=path)) as running:
        assert running.plane.remembered.keys() == {"other"}
        assert running.plane.deployments["other"].paused
        tick(running.plane)
        message = "the row 'decode' of the store's table deployments could not be read"
        assert any(problem.startswith(message) for problem in problems(running.plane.deployments["other"]))
        assert_set_aside(running.plane._writer.store, "deployments")
    store = Store(path)
    assert [deployment.name for deployment in store.deployments()] == ["other"]
    assert store.notices == []
    store.close()


@pytest.mark.parametrize("name", ["../x", "", "x" * 64, "a b"])
def test_a_deployment_with_an_invalid_name_is_set_aside(path: str, name: str) -> None:
    store = Store(path)
    store.save_deployment(StoredDeployment(name))
    assert store.deployments() == []
    assert_set_aside(store, "deployments")
    store.close()


def test_fields_and_columns_added_by_a_newer_release_are_ignored(path: str) -> None:
    store = Store(path)
    store.save_deployment(STORED)
    store.begin_plan("decode", PlanTracker.of(5, LIVE, decision_of(LIVE, 0)), 1)
    newer = {**asdict(STORED), "colour": "green", "totals": {**asdict(STORED.totals), "steps_skipped": 3}}
    store._db.execute("UPDATE deployments SET state = ?", (json.dumps(newer),))
    verdicts = json.loads(store._db.execute("SELECT verdicts FROM plans").fetchone()[0])
    verdicts = json.dumps([{**verdict, "why_not": "x"} for verdict in verdicts])
    store._db.execute("UPDATE plans SET verdicts = ?", (verdicts,))
    for table in ("service", "deployments", "first_layouts", "plans"):
        store._db.execute(f"ALTER TABLE {table} ADD COLUMN added TEXT NOT NULL DEFAULT 'x'")
    store._db.execute("CREATE TABLE added (id INTEGER)")
    store.close()
    store = Store(path)
    assert store.deployments() == [STORED]
    assert len(store.plans("decode")) == 1
    store.save_deployment(replace(STORED, epoch=13))
    store.save_initial_layout("decode", "first", LIVE.serving)
    store.begin_plan("decode", PlanTracker.of(6, LIVE, decision_of(LIVE, 0)), 1)
    assert (store.deployments()[0].epoch, len(store.plans("decode"))) == (13, 2)
    assert store.initial_layout("decode") is not None
    assert store.notices == []
    store.close()


BAD_PLANS: dict[str, tuple[str, object]] = {
    "verdicts that are invalid JSON": ("verdicts", "[{"),
    "verdicts of the wrong type": ("verdicts", "[3]"),
    "a verdict without its layer": ("verdicts", "[{}]"),
    "a verdict with fields of the wrong types": (
        "verdicts",
        '[{"layer": "x", "par_seen": 1, "par_planned": 1, "noise_floor": 1, "moves": 0, "changed": 1, "reason": ""}]',
    ),
    "a time as text": ("at", "yesterday"),
    "an infinite time": ("at", float("inf")),
    "a number as text": ("committed", "one"),
    "a number below its limit": ("leader_term", -5),
    "an outcome that is not text": ("outcome", b"\x00"),
}


@pytest.mark.parametrize(("column", "value"), BAD_PLANS.values(), ids=BAD_PLANS)
def test_an_unreadable_plan_is_set_aside_and_the_other_plans_are_listed(
    path: str, column: str, value: object
) -> None:
    store = Store(path)
    for plan_id in (5, 6, 7):
        store.begin_plan("decode", PlanTracker.of(plan_id, LIVE, decision_of(LIVE, 0)), 1)
    store._db.execute(f"UPDATE plans SET {column} = ? WHERE id = 6", (value,))
    assert [plan.plan_id for plan in store.plans("decode")] == [7, 5]
    assert_set_aside(store, "plans")
    assert [plan.plan_id for plan in store.plans("decode")] == [7, 5]
    store.close()


@pytest.mark.parametrize("number", [-1, 0, (1 << 63) - 1])
def test_a_plan_with_an_invalid_id_is_set_aside_and_later_plans_get_valid_ids(path: str, number: int) -> None:
    store = Store(path)
    store.begin_plan("decode", PlanTracker.of(5, LIVE, decision_of(LIVE, 0)), 1)
    store._db.execute("UPDATE plans SET id = ?", (number,))
    store.close()
    store = Store(path)
    assert_set_aside(store, "plans")
    assert 0 < store.new_plan_id() < 1 << 40
    store.close()


@pytest.mark.parametrize("terms", [[], [3, 4], ["text"], [1.5], [-1], [(1 << 63) - 1]])
def test_invalid_leader_terms_are_set_aside(path: str, terms: list[object]) -> None:
    Store(path).close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("DELETE FROM service")
        database.executemany("INSERT INTO service VALUES (?)", [(term,) for term in terms])
    store = Store(path)
    assert 0 < store.leader_term < 1 << 60
    assert store._db.execute("SELECT leader_term FROM service").fetchall() == [(store.leader_term,)]
    assert_set_aside(store, "service", len(terms))
    store.close()


def killed_after_writes(path: str, *, order: bool = False) -> None:
    """Store twelve paused deployments in a subprocess, make them durable if ``order`` is set, and kill the process."""
    script = (
        "import os\n"
        "from dataclasses import replace\n"
        "from eplb_service.control.server.store import Store\n"
        "from tests.control.server.stored_deployment import STORED\n"
        f"store = Store({path!r})\n"
        "for number in range(12): store.save_deployment(replace(STORED, name=f'deployment-{number}'))\n"
        f"if {order}: store.make_durable()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=300).returncode == -9


def with_flipped_bit(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :]


LOG_DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda log: None,
    "empty": lambda log: b"",
    "a flipped bit in the header": lambda log: with_flipped_bit(log, 5),
    "a flipped bit in the header's salt": lambda log: with_flipped_bit(log, 18),
    "a flipped bit in the first page": lambda log: with_flipped_bit(log, 32 + 24 + 100),
    "a flipped bit in the middle": lambda log: with_flipped_bit(log, len(log) // 2),
    "a flipped bit in the last page": lambda log: with_flipped_bit(log, len(log) - 100),
    "a flipped bit in a frame's salt": lambda log: with_flipped_bit(log, 32 + 9),
    "cut between two frames": lambda log: log[: 32 + (24 + 4096)],
    "cut inside a frame": lambda log: log[: len(log) // 2 + 7],
    "noise": lambda log: bytes(range(256)) * (len(log) // 256),
    "zeros": lambda log: bytes(len(log)),
}


@pytest.mark.parametrize("damage", LOG_DAMAGE.values(), ids=LOG_DAMAGE)
@pytest.mark.parametrize("index", ["with index", "without index"])
async def test_a_lost_write_ahead_log_is_reported(
    path: str, damage: Callable[[bytes], bytes | None], index: str, capsys: pytest.CaptureFixture[str]
) -> None:
    killed_after_writes(path)
    log = Path(f"{path}-wal")
    before = log.read_bytes()
    content = damage(before)
    log.unlink()
    if content is not None:
        log.write_bytes(content)
    if index == "without index":
        Path(f"{path}-shm").unlink()
        if content == before[: 32 + (24 + 4096)]:
            pytest.skip("without its index, a log cut between two frames is a valid log")
    async with run_service(settings(store=path)) as running, FakeGroup(running.address) as group:
        await group.join()
        tick(running.plane)
        (problem, *_) = problems(running.plane.deployments["decode"])
        assert problem.startswith("the store's write-ahead log is ")
        assert "check which deployments are paused" in problem
    assert "store_log_lost" in capsys.readouterr().err
    if content:
        (aside,) = Path(path).parent.glob("*-wal.damaged-*")
        assert aside.read_bytes() == content


@pytest.mark.parametrize("opener", ["next service", "another program"])
def test_an_intact_write_ahead_log_is_applied_without_a_notice(path: str, opener: str) -> None:
    killed_after_writes(path)
    if opener == "another program":
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute("SELECT COUNT(*) FROM plans").fetchone()
        assert not Path(f"{path}-wal").exists()
    store = Store(path)
    assert (len(store.deployments()), store.notices) == (12, [])
    store.close()
    store = Store(path)
    assert (len(store.deployments()), store.notices) == (12, [])
    store.close()


def test_a_durable_command_survives_a_lost_log(path: str) -> None:
    killed_after_writes(path, order=True)
    Path(f"{path}-wal").unlink()
    store = Store(path)
    assert [deployment.paused for deployment in store.deployments()] == [True] * 12
    assert ["write-ahead log is missing" in notice for notice in store.notices] == [True]
    store.close()


def test_the_write_ahead_log_stays_small(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_MAX_WRITES_IN_LOG", 16)
    store = Store(path)
    for number in range(400):
        store.save_deployment(replace(STORED, epoch=number, last_decision="x" * 3000))
    assert Path(f"{path}-wal").stat().st_size < 1 << 20
    store.close()
    assert Store(path).deployments()[0].epoch == 399


def test_a_start_that_cannot_write_reports_the_reason(path: str) -> None:
    with contextlib.closing(Store(path)) as store:
        store.begin_plan("decode", PlanTracker.of(5, LIVE, decision_of(LIVE, 0)), 1)
        store._db.execute(
            "CREATE TRIGGER f BEFORE UPDATE ON plans BEGIN SELECT RAISE(ABORT, 'disk is full'); END"
        )
    with pytest.raises(StoreError, match="disk is full; free disk space"):
        Store(path)
