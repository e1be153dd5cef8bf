"""With a real Prometheus, every dashboard panel has data, and every alert fires during its fault and then resolves."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from eplb_core.planner.decision import DecisionInputs
from eplb_core.wire.generated import operator_pb2, operator_pb2_grpc
from eplb_service.control.server.deciding import decider
from eplb_service.control.server.plane import deployments
from eplb_service.control.server.service import RunningService, run_service
from eplb_service.control.server.store import Store
from eplb_service.control.server.validity import Validity
from tests.control.server.service_under_test import settings
from tests.observability.prometheus import RATE_SECONDS, RULES, Alert, Prometheus, prometheus
from tests.observability.scene import TOKEN, Faults, no_heat, other_heat, rejoin, serving
from tools.dashboard.layout import dashboard
from tools.prometheus_binaries import find

pytestmark = [pytest.mark.observability, pytest.mark.e2e]

_FAILING_LAYERS = 2


@pytest.fixture
def program() -> str:
    path = find("prometheus")
    if path is None:
        pytest.skip(
            "DASHBOARD AND ALERTS ARE NOT TESTED: prometheus is not installed and cannot be downloaded"
        )
    return path


def alerts() -> set[str]:
    return {rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}


async def order(service: RunningService, call: str, request: Any, token: str = TOKEN) -> None:
    metadata = (("authorization", f"Bearer {token}"),)
    async with grpc.aio.insecure_channel(service.address) as channel:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await getattr(operator_pb2_grpc.OperatorServiceStub(channel), call)(request, metadata=metadata)


async def test_every_panel_has_data_with_two_services_for_one_deployment(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        services = [
            await stack.enter_async_context(run_service(settings(auth_token=TOKEN))) for _ in range(2)
        ]
        for service in services:
            use_certificate(service, monkeypatch, valid_seconds=30 * 86400)
            await stack.enter_async_context(serving(service.address, "decode"))
            await order(service, "Pause", operator_pb2.PauseRequest(deployment="absent"))
        targets = [service.metrics_address for service in services]
        with prometheus(program, tmp_path, targets) as server:
            missing: list[str] = []
            for _ in range(30):
                await asyncio.sleep(2)
                missing = await asyncio.to_thread(without_data, server)
                if not missing:
                    break
    assert missing == []


_ONCE_MEASURED = re.compile(
    r"eplb_(gain_(low_|high_)?seconds|gain_(ranks|tokens_per_second)|(move|switch)_cost_seconds)"
)
"""Series that are absent until enough switches have been measured. This short scene has too few switches."""


def without_data(server: Prometheus) -> list[str]:
    """Return the panels' queries that unexpectedly have no data. Raises ``AssertionError`` if a query fails."""
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    empty = []
    for panel in panels:
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", f"{RATE_SECONDS}s")
            query = re.sub(r"\$(?:deployment|instance)", ".+", query)
            if not server.query(query) and not _ONCE_MEASURED.search(query):
                empty.append(f"{panel['title']}: {query}")
    return empty


async def test_every_alert_fires_during_its_fault_and_resolves_after_the_repair(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide = decider.decide

    def fail(inputs: DecisionInputs) -> Any:
        if inputs.layout.placement.layers == _FAILING_LAYERS:
            raise RuntimeError("the fault of this test")
        return decide(inputs)

    monkeypatch.setattr(deployments, "_PLAN_SECONDS", 5)
    seen_firing: set[str] = set()
    async with contextlib.AsyncExitStack() as stack:
        service = await stack.enter_async_context(run_service(settings(auth_token=TOKEN)))
        with prometheus(program, tmp_path, [service.metrics_address]) as server:
            names = ("missing", "gone", "well", *FAULTS)
            scenes = {name: serving(service.address, name) for name in names}
            scenes["failing"] = serving(service.address, "failing", layers=_FAILING_LAYERS)
            groups = {name: await stack.enter_async_context(scene) for name, scene in scenes.items()}
            # Wait until the first plans have restored balance and the first lost steps have left the rate windows.
            await asyncio.sleep(8)
            await server.until(end={(alert, name) for alert in alerts() for name in groups})
            faulty = await break_groups(groups, monkeypatch, fail)
            await server.until(fire=faulty)
            # On a busy host, even this deployment may make no decision for a while.
            await server.until(end={(alert, "well") for alert in alerts()})
            await repair_groups(groups, monkeypatch, decide, service)
            await server.until(end=faulty)
            seen_firing |= {name for name, _ in faulty}

            faulty = {("EplbStoreFails", ""), ("EplbCallsRefused", ""), ("EplbCertificateExpires", "")}
            with trouble(service, monkeypatch) as keep_busy:
                await server.until(fire=faulty)
                # A slow loop answers some scrapes too late, and each gap restarts the waiting period of alerts on
                # gauges.
                keep_busy()
                faulty.add(("EplbServiceSlow", ""))
                await server.until(fire={("EplbServiceSlow", "")})
            await server.until(end=faulty)
            seen_firing |= {name for name, _ in faulty}

            await stack.aclose()
            await server.until(fire={("EplbServiceDown", "")})
            async with run_service(settings(metrics=service.metrics_address)):
                await server.until(end={("EplbServiceDown", "")})
            seen_firing.add("EplbServiceDown")
    assert seen_firing == alerts()


def use_certificate(
    service: RunningService, monkeypatch: pytest.MonkeyPatch, *, valid_seconds: float
) -> None:
    """Have the service report a certificate, although these ranks connect without TLS."""
    ticking = service.plane.ticking
    now = time.time()
    validity = Validity(now - 90 * 86400, now + valid_seconds)
    monkeypatch.setattr(service.plane, "ticking", lambda _: ticking({"tls_cert": validity}))


FAULTS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "lost": ({"half_silent_ranks": (2,)}, {"EplbStepsLost"}),
    "aborting": ({"abort_plans": True, "heat": other_heat}, {"EplbPlansFail", "EplbImbalanced"}),
    "halted": ({"halted": "the fault of this test"}, {"EplbAgentsHalted", "EplbNoDecision"}),
    "empty": ({"heat": no_heat}, {"EplbNoHeat"}),
    "dummies": ({"dummies": True}, {"EplbDummyStepsOnly"}),
}
"""For each group: the changes to its ``Faults``, and the alerts that must fire for them."""


async def break_groups(groups: Any, monkeypatch: pytest.MonkeyPatch, fail: Any) -> set[Alert]:
    """Break every group in one way and return the alerts that must fire."""
    groups["missing"][0].ranks[3].call.cancel()
    await groups["gone"][0].leave()
    monkeypatch.setattr(decider, "decide", fail)
    expected = {
        ("EplbAgentsMissing", "missing"),
        ("EplbProblems", "missing"),
        ("EplbAgentsGone", "gone"),
        ("EplbSolverFails", "failing"),
    }
    for name, (changes, alerts_of_fault) in FAULTS.items():
        vars(groups[name][1]).update(changes)
        expected |= {(alert, name) for alert in alerts_of_fault}
    return expected


async def repair_groups(
    groups: Any, monkeypatch: pytest.MonkeyPatch, decide: Any, service: RunningService
) -> None:
    """Repair every fault, as an operator would."""
    await rejoin(*groups["missing"], 3)
    for name in FAULTS:
        vars(groups[name][1]).update(vars(Faults(name)))
    monkeypatch.setattr(decider, "decide", decide)
    await order(service, "Forget", operator_pb2.ForgetRequest(deployment="gone"))


@contextlib.contextmanager
def trouble(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Reject store writes and call with a wrong token. The yielded function also keeps the event loop busy."""

    def full(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    async def call_with_wrong_token() -> None:
        while True:
            request = operator_pb2.ListDeploymentsRequest()
            # A call takes several iterations of the event loop, which runs about one per second here, so send many
            # calls at once.
            await asyncio.gather(
                *(order(service, "ListDeployments", request, token="wrong") for _ in range(16))
            )
            await asyncio.sleep(0.1)

    async def block_loop() -> None:
        while True:
            time.sleep(0.8)
            await asyncio.sleep(0.1)

    with monkeypatch.context() as patched:
        patched.setattr(Store, "_write", full)
        use_certificate(service, patched, valid_seconds=3600)
        pausing = order(service, "Pause", operator_pb2.PauseRequest(deployment="well"))
        tasks = [asyncio.create_task(call_with_wrong_token()), asyncio.create_task(pausing)]
        try:
            yield lambda: tasks.append(asyncio.create_task(block_loop()))
        finally:
            for task in tasks:
                task.cancel()
