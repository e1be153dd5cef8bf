"""Tests that ranks keep serving without the service and converge once it is back."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from eplb_service.cli.main import run
from tests.faults.scene import RANKS, RankCrew, Scene
from tests.faults.serving import check_served

pytestmark = [pytest.mark.faults, pytest.mark.e2e, pytest.mark.timeout(900)]

# Transfers are so slow that a plan is in progress for a while.
SLOWLY = {"bytes_per_step": 3000}


def _disturbed(folder: Path, moment: str, disturb: Callable[[Scene], None], *, store: bool = True) -> None:
    """Disturb the service while it is idle or a plan is in progress, and check that it recovers the ranks' layout."""
    with Scene(folder, store=store, **SLOWLY) as scene:
        scene.wait_for_switches()
        under_way = moment != "idle"
        scene.service.wait_until(lambda status: bool(status.status.plan_id) == under_way)
        before = scene.epoch
        disturb(scene)
        scene.wait_for_ranks()
        assert scene.epoch >= before
        scene.wait_for_switches(2)
        scene.wait_for_metric("eplb_plans_total", 1)
        scene.wait_for_metric("eplb_agents_connected", RANKS)
        scene.end_well()


@pytest.mark.parametrize("store", [True, False], ids=["with its store", "without a store"])
@pytest.mark.parametrize("moment", ["idle", "a plan is in progress"])
def test_balancing_resumes_after_the_service_is_killed_and_restarted(
    moment: str, store: bool, tmp_path: Path
) -> None:
    _disturbed(tmp_path, moment, lambda scene: scene.service.restart(1.5), store=store)


@pytest.mark.parametrize("moment", ["idle", "a plan is in progress"])
def test_balancing_resumes_after_the_service_is_frozen(moment: str, tmp_path: Path) -> None:
    _disturbed(tmp_path, moment, lambda scene: scene.service.freeze(4))


def test_balancing_resumes_after_streams_are_cut_delayed_or_blocked(tmp_path: Path) -> None:
    with Scene(tmp_path, **SLOWLY) as scene:
        scene.wait_for_switches()
        for _ in range(5):
            scene.proxy.cut()
            time.sleep(0.7)
        scene.wait_for_ranks()
        scene.proxy.delay = 0.3
        scene.wait_for_switches()
        scene.proxy.delay = 0.0
        scene.proxy.swallow = True
        # The service treats silence as a lost connection, while the ranks keep serving.
        scene.service.wait_until(lambda status: status.status.agents_connected == 0)
        scene.wait_for_problem("missing ranks")
        scene.proxy.swallow = False
        scene.proxy.cut()
        scene.wait_for_ranks()
        scene.wait_for_switches()
        scene.end_well()


def test_the_lead_command_restores_balancing_after_a_clock_was_wrong(tmp_path: Path) -> None:
    with Scene(tmp_path) as scene:
        scene.wait_for_switches()
        store = tmp_path / "state.sqlite3"
        scene.service.kill()
        with sqlite3.connect(store) as database:
            # This simulates a service that once ran with its clock set to the year 2106.
            database.execute("UPDATE service SET leader_term = ?", (1 << 52,))
        database.close()
        scene.service.start()
        scene.wait_for_ranks()
        scene.wait_for_switches()
        scene.service.kill()
        store.unlink()
        scene.service.start()
        scene.wait_for_ranks()
        scene.wait_for_problem("is lower than")
        # The plan that was in progress is still completed.
        before = scene.wait_for_rest()
        time.sleep(2)
        assert scene.epoch == before
        assert run(["lead", "default", "--address", scene.service.address]) == 0
        scene.wait_for_switches()
        scene.service.restart(0.0)
        scene.wait_for_ranks()
        scene.wait_for_switches()
        scene.end_well()


def test_a_group_that_restarts_with_a_different_size_is_balanced_again(tmp_path: Path) -> None:
    with Scene(tmp_path) as scene:
        scene.wait_for_switches()
        first = scene.stop()
        with RankCrew(tmp_path, scene.proxy.address, ranks=2) as smaller:
            scene.service.wait_until(lambda status: status.status.ranks == 2 and status.status.epoch >= 1)
            scene.service.wait_until(lambda status: status.status.agents_connected == 2)
            second = smaller.stop()
    check_served(first, tmp_path)
    check_served(second, tmp_path)
    assert len(second) == 2
