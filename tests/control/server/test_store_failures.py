"""Writes that fail temporarily are not lost, and operator commands report if they could not be stored."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sqlite3
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from eplb_core.wire.generated import operator_pb2
from eplb_service.control.core.health import problems
from eplb_service.control.core.plan_tracker import Outcome, PlanTracker
from eplb_service.control.server import store as store_module
from eplb_service.control.server.service import run_service
from eplb_service.control.server.store import Store, StoredDeployment, StoreWriter
from eplb_service.control.server.store_file import StoreError
from tests.control.core.story import decision_of
from tests.control.fake_group import FakeGroup, first_placement, live_of
from tests.control.server.service_under_test import settings, until

LIVE = live_of(first_placement())


class Failures:
    """A store writer with a count of its failed attempts."""

    def __init__(self, path: str) -> None:
        self.count = 0
        self.store = Store(path)
        self.writer = StoreWriter(self.store, self._failed)

    def _failed(self) -> None:
        self.count += 1

    def write(self, method: str, *arguments: Any) -> None:
        self.writer.post(getattr(self.store, method), *arguments).result(60)

    def retry(self) -> str:
        self.writer.retry()
        assert self.writer._retried is not None
        self.writer._retried.result(60)
        return self.writer.failing

    def pragma(self, statement: str) -> None:
        self.writer._thread.submit(self.store._db.execute, f"PRAGMA {statement}").result(60)


@pytest.fixture
def failures(path: str) -> Iterator[Failures]:
    failures_writer = Failures(path)
    yield failures_writer
    failures_writer.writer.close()


def full(failures: Failures) -> None:
    """Prevent the store from growing, as on a full disk."""
    (pages,) = failures.store._db.execute("PRAGMA page_count").fetchone()
    failures.pragma(f"max_page_count = {pages}")


FAULTS: dict[str, tuple[Callable[[Failures], None], str, str]] = {
    "full": (full, "max_page_count = 100000", "database or disk is full"),
    "read-only": (
        lambda failures: failures.pragma("query_only = ON"),
        "query_only = OFF",
        "readonly database",
    ),
}
"""For each fault: the function that starts it, the pragma that ends it, and SQLite's error message."""


@pytest.mark.parametrize("fault", FAULTS)
def test_failed_writes_are_retried_until_the_disk_accepts_them(failures: Failures, fault: str) -> None:
    begin, end, message = FAULTS[fault]
    layers = decision_of(LIVE, 0)
    failures.write("save_deployment", StoredDeployment("left", epoch=82))
    failures.write("save_deployment", StoredDeployment("gone"))
    begin(failures)
    failures.write("save_initial_layout", "left", "group", LIVE.serving)
    for number in range(5):
        failures.write("begin_plan", "left", PlanTracker.of(1 + number, LIVE, layers), 1, 100.0 + number)
        failures.write("end_plan", 1 + number, Outcome.DONE, "x" * 3000, 1)
        failures.write("save_deployment", StoredDeployment("left", epoch=83 + number))
    failures.write("forget", "gone")
    assert message in failures.writer.failing
    assert message in failures.retry()
    assert failures.count >= 2
    assert failures.store.deployments() != [StoredDeployment("left", epoch=87)]
    failures.pragma(end)
    assert failures.retry() == ""
    reopened = Store(failures.store._path)
    assert reopened.deployments() == [StoredDeployment("left", epoch=87)]
    plans = reopened.plans("left")
    assert [(plan.plan_id, plan.at, plan.outcome) for plan in plans] == [
        (1 + number, 100.0 + number, Outcome.DONE.value) for number in reversed(range(5))
    ]
    assert reopened.initial_layout("left") is not None
    reopened.close()


def test_a_write_that_fails_without_a_disk_fault_does_not_block_other_writes(failures: Failures) -> None:
    failures.write("end_plan", 1 << 70, Outcome.DONE, "", 1)
    failures.write("save_deployment", StoredDeployment("decode"))
    assert (failures.count, failures.writer.failing) == (1, "")
    assert failures.store.deployments() == [StoredDeployment("decode")]


def test_pending_writes_are_bounded_and_keep_every_deployment(
    failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_MAX_OWED", 3)
    failures.pragma("query_only = ON")
    failures.write("save_deployment", StoredDeployment("decode", paused=True))
    for number in range(5):
        failures.write("begin_plan", "decode", PlanTracker.of(1 + number, LIVE, decision_of(LIVE, 0)), 1)
    failures.pragma("query_only = OFF")
    assert failures.retry() == ""
    assert [plan.plan_id for plan in failures.store.plans("decode")] == [5, 4]
    assert failures.store.deployments() == [StoredDeployment("decode", paused=True)]


def test_a_deleted_or_replaced_store_is_reported(failures: Failures, path: str) -> None:
    failures.write("save_deployment", StoredDeployment("decode"))
    assert failures.retry() == ""
    aside = f"{path}.aside"
    Path(path).rename(aside)
    assert "was deleted or replaced while in use" in failures.retry()
    Path(path).write_bytes(b"")
    failures.write("save_deployment", StoredDeployment("decode"))
    assert "was deleted or replaced while in use" in failures.writer.failing
    Path(aside).rename(path)
    assert failures.retry() == ""


def test_a_store_that_becomes_read_only_is_reported(
    failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The open file stays writable until the next start. ``access`` is patched because root can always write."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "is read-only; make it writable" in failures.retry()
    monkeypatch.undo()
    assert failures.retry() == ""


def test_a_read_only_store_is_rejected_at_startup_in_one_line(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store(path).close()
    connect = sqlite3.connect

    def read_only(database: str, **options: Any) -> sqlite3.Connection:
        return connect(f"file:{database}?mode=ro", **{**options, "uri": True})

    monkeypatch.setattr(sqlite3, "connect", read_only)
    with pytest.raises(StoreError) as error:
        Store(path)
    assert "attempt to write a readonly database; specify a writable path" in str(error.value)
    assert "\n" not in str(error.value)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount a 1 MiB file system at ``folder``."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("NO DISK IS FILLED: this user may not mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for block in (4096, 1):
            while True:
                file.write(bytes(block))


async def test_no_write_is_lost_once_a_full_disk_recovers(tmp_path: Path) -> None:
    """The test copies the files in the state that a kill would leave. The runbook states that they are complete."""
    with small_disk(tmp_path / "disk") as disk:
        path = disk / "state.sqlite3"
        filler = disk / "filler"
        async with run_service(settings(store=str(path))) as service, FakeGroup(service.address) as group:
            await group.join()
            deployment = service.plane.deployments["decode"]
            writer = service.plane._writer
            await until(lambda: deployment.known)
            fill(filler)
            await group.fill_window()
            await group.carry_out(await group.hear_plan())
            await until(lambda: deployment.ended_plan is not None)
            await until(lambda: any("disk is full" in problem for problem in problems(deployment)))
            filler.unlink()
            await until(lambda: problems(deployment) == [])
            epoch = group.live.epoch
            assert epoch > 0
            copies = tmp_path / "kept"
            copies.mkdir()
            await writer.run(
                lambda: [shutil.copy(disk / name, copies) for name in (path.name, f"{path.name}-wal")]
            )
    store = Store(str(copies / path.name))
    (stored,) = store.deployments()
    (plan,) = store.plans("decode")
    assert (stored.epoch, plan.outcome) == (epoch, Outcome.DONE.value)
    store.close()


ORDERS = {
    "Pause": (operator_pb2.PauseRequest, "planning for decode is paused"),
    "Resume": (operator_pb2.ResumeRequest, "planning for decode is resumed"),
    "Forget": (operator_pb2.ForgetRequest, "decode is forgotten"),
    "Lead": (operator_pb2.LeadRequest, "the ranks of decode follow this service"),
    "Rebalance": (operator_pb2.RebalanceRequest, "plan "),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("fault", ["rejected", "read-only", "locked", "deleted"])
async def test_an_operator_command_reports_that_it_is_not_stored(path: str, order: str, fault: str) -> None:
    request, confirmation = ORDERS[order]
    async with run_service(settings(store=path)) as service, FakeGroup(service.address) as group:
        writer = service.plane._writer
        plane = service.plane
        await group.join(**({"highest_term": plane.leader_term + (1 << 30)} if order == "Lead" else {}))
        deployment = plane.deployments["decode"]
        await until(lambda: deployment.live is not None)
        if order == "Rebalance":
            deployment.session = replace(deployment.session, decided_at=1 << 40)
            await group.fill_window()
        if order == "Forget":
            for rank in range(4):
                plane.streams.end_all("gone")
                deployment.leave(rank)
        call = getattr(group.operator, order)
        async with unwritable(writer, path, fault):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call(request(deployment="decode"), timeout=60)
        assert error.value.code() is grpc.StatusCode.ABORTED
        details = error.value.details()
        assert details.startswith(confirmation)
        assert ", but this is not stored, so a restart of the service would lose it: " in details


@contextlib.asynccontextmanager
async def unwritable(writer: StoreWriter, path: str, fault: str) -> AsyncIterator[None]:
    """Make the store unwritable inside the block."""
    if fault == "rejected":
        for table, statement in (("deployments", "INSERT"), ("deployments", "DELETE"), ("plans", "INSERT")):
            trigger = f"CREATE TRIGGER no_{table}_{statement} BEFORE {statement} ON {table}"
            action = "BEGIN SELECT RAISE(ABORT, 'no'); END"
            await writer.run(writer.store._db.execute, f"{trigger} {action}")
        yield
    elif fault == "read-only":
        await writer.run(writer.store._db.execute, "PRAGMA query_only = ON")
        yield
        await writer.run(writer.store._db.execute, "PRAGMA query_only = OFF")
    elif fault == "locked":
        await writer.run(writer.store._db.execute, "PRAGMA busy_timeout = 100")
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            yield
    else:
        Path(path).rename(f"{path}.aside")
        yield
        Path(f"{path}.aside").rename(path)


@pytest.mark.parametrize("order", ["Pause", "Lead"])
async def test_an_acknowledged_command_survives_a_kill_and_a_lost_log(
    path: str, tmp_path: Path, order: str
) -> None:
    copy = tmp_path / "copy.sqlite3"
    async with run_service(settings(store=path)) as service, FakeGroup(service.address) as group:
        await group.join(highest_term=service.plane.leader_term + (1 << 30))
        await getattr(group.operator, order)(ORDERS[order][0](deployment="decode"), timeout=60)
        shutil.copy(path, copy)
        term = service.plane.deployments["decode"].leader_term
    store = Store(str(copy))
    (stored,) = store.deployments()
    assert stored.paused is (order == "Pause")
    assert stored.leader_term >= term
    store.close()


async def test_a_command_waits_only_a_limited_time_for_a_slow_disk(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_SETTLE_SECONDS", 0.1)
    async with run_service(settings(store=path)) as service, FakeGroup(service.address) as group:
        await group.join()
        writing = asyncio.ensure_future(service.plane._writer.run(time.sleep, 1.0))
        with pytest.raises(grpc.aio.AioRpcError, match="the disk is too slow"):
            await group.operator.Pause(operator_pb2.PauseRequest(deployment="decode"), timeout=60)
        await writing
        await group.operator.Pause(operator_pb2.PauseRequest(deployment="decode"), timeout=60)
