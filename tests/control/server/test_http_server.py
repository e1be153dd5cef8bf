"""Metrics, the web page and its JSON documents over HTTP, and access control for them."""

from __future__ import annotations

import gzip
import http.client
import math
import shutil
import socket
import ssl
from pathlib import Path

import grpc
import pytest

from eplb_core.wire.generated import agent_pb2, operator_pb2, operator_pb2_grpc
from eplb_core.wire.plan import RankPlan
from eplb_service.control.core.health import mean_measured_par, measured_par
from eplb_service.control.server.service import RunningService, run_service
from eplb_service.control.server.web import http_server
from tests.control.fake_group import BYTES_PER_EXPERT, LAYERS, RANKS, FakeGroup, skewed_heat
from tests.control.server.certificates import Authority
from tests.control.server.http_client import get, scrape
from tests.control.server.service_under_test import settings, tick, until

CREDENTIALS = """
- {name: looker, role: reader, deployments: [decode], token: reader-0123456789}
- {name: ranks, role: agent, deployments: ['*'], token: agent-0123456789}
"""


async def carry_out_plan(service: RunningService, group: FakeGroup) -> list[RankPlan]:
    """Carry out a plan, then send heat, and return every rank's plan."""
    await group.fill_window()
    plans = await group.hear_plan()
    await group.carry_out(plans)
    await group.send_heat(skewed_heat(8, seed=1))
    deployment = service.plane.deployments["decode"]
    await until(lambda: deployment.ended_plan is not None and deployment.totals.steps_received == 40)
    tick(service.plane)
    # The newest point may be up to a second older than the current figure, so wait until both agree.
    points = service.plane.observer.of("decode").series.points
    await until(lambda: points[-1].par == mean_measured_par(measured_par(deployment)))
    return plans


async def test_the_page_shows_the_figures_of_the_service(service: RunningService, group: FakeGroup) -> None:
    await carry_out_plan(service, group)
    address = service.metrics_address
    assert (await get(address, "/api/v1/deployments")).document["deployments"][0]["deployment"] == "decode"
    status = (await get(address, "/api/v1/deployments/decode")).document
    figures = (await get(address, "/api/v1/deployments/decode/figures")).document
    balance = (await get(address, "/api/v1/deployments/decode/balance")).document
    plans = (await get(address, "/api/v1/deployments/decode/history")).document["plans"]
    assert status["status"]["agents_connected"] == RANKS
    assert (figures["balance"][0]["name"], figures["balance"][0]["value"]) == (
        "PAR now",
        f"{status['status']['par']:.3f}",
    )
    assert [layer["layer"] for layer in status["layers"]] == list(range(LAYERS))
    assert all(0 <= agent["silent_seconds"] < 60 for agent in status["agents"])
    assert len(balance["rank_loads"]) == LAYERS
    for row in balance["rank_loads"]:
        assert sum(row) == pytest.approx(1000 * RANKS, abs=RANKS)
    point = balance["points"][-1]
    assert point["par"] == pytest.approx(status["status"]["par"])
    assert 1 <= point["noise_floor"] < point["par_planned"] or point["par_planned"] >= 1
    plan = balance["last_plan"]
    assert (plan["plan_id"], plan["outcome"]) == (plans[0]["plan_id"], "done")
    assert plan["committed"] == len(plan["moves"])
    for layer_moves in plan["moves"]:
        assert len(layer_moves["moves"]) == plan["verdicts"][layer_moves["layer"]]["moves"]


async def test_every_response_has_restrictive_security_headers(service: RunningService) -> None:
    address = service.metrics_address
    for path in ("/", "/main.js", "/metrics", "/api/v1/service", "/nowhere"):
        answer = await get(address, path)
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'")
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in answer.headers
    page = await get(address, "/")
    assert page.headers["Content-Type"] == "text/html"
    assert (await get(address, "/", method="HEAD")).body == b""
    compressed = await get(address, "/metrics", **{"Accept-Encoding": "gzip"})
    assert gzip.decompress(compressed.body).startswith(b"# HELP eplb_")


async def test_unknown_paths_and_methods_other_than_get_are_rejected(service: RunningService) -> None:
    for path, status in {
        "/nowhere": 404,
        "/../settings.py": 404,
        "/%2e%2e/settings.py": 404,
        "/api/v1/": 404,
        "/api/v1/deployments/absent": 404,
        "/api/v1/deployments/absent/balance": 404,
        "/api/v1/deployments/decode/pause": 404,
        "/api/v1/deployments/%00": 400,
    }.items():
        answer = await get(service.metrics_address, path)
        assert (path, answer.status) == (path, status)
        if "absent" in path or status == 400:
            assert answer.document["error"]
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert (await get(service.metrics_address, "/api/v1/deployments", method=method)).status == 405


async def test_the_page_learns_without_an_error_response_that_it_needs_a_token(tmp_path: Path) -> None:
    """A browser logs every error response to its console."""
    (tmp_path / "credentials.yaml").write_text(CREDENTIALS)
    async with run_service(settings(credentials=tmp_path / "credentials.yaml")) as service:
        answer = await get(service.metrics_address, "/api/v1/service")
        assert (answer.status, answer.document) == (200, {"token_required": True})
        wrong = await get(service.metrics_address, "/api/v1/service", Authorization="Bearer wrong")
        assert wrong.status == 401
        sample = service.plane._metrics.registry.get_sample_value
        assert sample("eplb_refusals_total", {"code": "unauthenticated"}) == 1


async def test_readers_see_only_their_deployments_and_other_callers_see_nothing(tmp_path: Path) -> None:
    (tmp_path / "credentials.yaml").write_text(CREDENTIALS)
    async with run_service(settings(credentials=tmp_path / "credentials.yaml")) as service:
        address = service.metrics_address
        path = "/api/v1/deployments"
        assert (await get(address, path)).status == 401
        assert (await get(address, path, token="wrong-0123456789")).status == 401
        assert (await get(address, path, token="agent-0123456789")).status == 403
        assert (await get(address, path, token="reader-0123456789")).document == {"deployments": []}
        assert (await get(address, f"{path}/prefill", token="reader-0123456789")).status == 403
        assert (await get(address, f"{path}/decode", token="reader-0123456789")).status == 404
        # Metrics and the page's own files are public to any client that can reach the port.
        assert (await get(address, "/metrics")).status == 200
        assert (await get(address, "/")).status == 200
        metrics = (await get(address, "/metrics")).body.decode()
    assert 'eplb_refusals_total{code="unauthenticated"} 2.0' in metrics


async def test_a_token_in_plain_text_from_another_host_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_host_of", lambda _: "192.0.2.7")
    async with run_service(settings(auth_token="right")) as service:
        answer = await get(service.metrics_address, "/api/v1/deployments", token="right")
        assert answer.status == 403
        assert "plain text" in answer.document["error"]
        assert (await get(service.metrics_address, "/api/v1/deployments")).status == 401


async def test_requests_for_a_different_host_name_are_rejected(service: RunningService) -> None:
    address = service.metrics_address
    path = "/api/v1/deployments"
    assert (await get(address, path, Host="rebound.example")).status == 403
    for name in (address, "localhost", "localhost:9464", "[::1]:9464"):
        assert (await get(address, path, Host=name)).status == 200


@pytest.mark.skipif(
    shutil.which("openssl") is None, reason="the test requires openssl to generate a certificate"
)
async def test_the_page_can_have_a_separate_address_with_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.sign("localhost")
    context = ssl.create_default_context(cafile=str(authority.ca))
    tls_settings = settings(tls_cert=cert, tls_key=key, page="127.0.0.1:0", auth_token="right")
    async with run_service(tls_settings) as service:
        assert service.page_url.startswith("https://127.0.0.1:")
        page = service.page_url.removeprefix("https://").rstrip("/")
        path = "/api/v1/deployments"
        assert (await get(page, path, token="right", context=context)).document == {"deployments": []}
        assert (await get(page, "/metrics", context=context)).status == 404
        assert (await get(service.metrics_address, "/metrics")).status == 200
        assert "a separate address" in (await get(service.metrics_address, "/")).document["error"]
        with pytest.raises((OSError, http.client.HTTPException)):
            await get(page, path)
        credentials = grpc.ssl_channel_credentials(authority.ca.read_bytes())
        async with grpc.aio.secure_channel(
            service.address.replace("127.0.0.1", "localhost"), credentials
        ) as channel:
            stub = operator_pb2_grpc.OperatorServiceStub(channel)
            bearer = (("authorization", "Bearer right"),)
            assert await stub.ListDeployments(operator_pb2.ListDeploymentsRequest(), metadata=bearer)


Samples = dict[tuple[str, tuple[str, ...]], float]


async def test_metrics_show_the_plan_and_its_effects(service: RunningService, group: FakeGroup) -> None:
    plans = await carry_out_plan(service, group)
    for calls in (100, 120):
        beat = agent_pb2.Heartbeat(
            step=group.step,
            epoch=group.live.epoch,
            digest=group.live.digest,
            calls=calls,
            call_micros=300 * calls,
            vote_micros=100 * calls,
            staging_bytes=50 * calls,
            ring_bytes=4096,
        )
        await group.ranks[1].say(heartbeat=beat)
        beat.staging_bytes = 7
        await group.ranks[2].say(heartbeat=beat)
    beats_R = service.plane.observer.of("decode").beats_R
    await until(lambda: {1, 2} <= set(beats_R) and all(beats_R[rank].calls == 120 for rank in (1, 2)))
    tick(service.plane)
    samples = await scrape(service)

    layers = plans[0].layers
    decode = ("decode",)
    moves = sum(len(layer.moves_M5) for layer in layers)
    counted = {
        "agents_connected": 4,
        "epoch": len(layers),
        "steps_received_total": 40,
        "steps_lost_total": 0,
        "layers_switched_total": len(layers),
        "moves_total": moves,
        "moved_bytes_total": moves * BYTES_PER_EXPERT,
        "solve_seconds_count": 1,
        "problems": 0,
        "agent_calls_total": 40,
        "agent_staging_bytes": 50 * 120,  # the maximum over the ranks
        "agent_heat_ring_bytes": 4096,
    }
    assert {name: samples[f"eplb_{name}", decode] for name in counted} == counted
    assert samples["eplb_plans_total", ("decode", "done")] == 1
    assert samples["eplb_decisions_total", ("decode", "plan")] == 1
    assert math.isclose(samples["eplb_agent_call_seconds_total", decode], 0.012)
    assert math.isclose(samples["eplb_agent_vote_seconds_total", decode], 0.004)
    seen, planned = (samples[f"eplb_deployment_par_{kind}", decode] for kind in ("seen", "planned"))
    assert 1.0 <= planned < seen
    for layer in range(LAYERS):
        assert 1.0 <= samples["eplb_par_realised", ("decode", str(layer))] < seen
    assert set(samples) >= {("eplb_par_planned", ("decode", str(layer.layer))) for layer in layers}


def host_address() -> str:
    """Return this host's network address. Calls to it do not count as coming from loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))
        except OSError:
            pytest.skip("CANNOT SIMULATE ANOTHER HOST: this host has no network")
        return str(probe.getsockname()[0])


PAGE_PATHS = (
    "/",
    "/main.js",
    "/api/v1/service",
    "/api/v1/deployments",
    "/api/v1/deployments/decode",
    "/api/v1/deployments/decode/figures",
    "/metrics/..",
)


@pytest.mark.parametrize("setting", ["metrics", "page"])
async def test_without_credentials_other_hosts_get_only_the_metrics(setting: str) -> None:
    host = host_address()
    async with (
        run_service(settings(**{setting: "0.0.0.0:0"})) as service,
        FakeGroup(service.address) as group,
    ):
        await group.join()
        url = service.page_url.removeprefix("http://").rstrip("/")
        assert url.startswith("127.0.0.1:")
        port = url.rpartition(":")[2]
        for path in PAGE_PATHS:
            answer = await get(f"{host}:{port}", path, Host="localhost")
            assert (path, answer.status) == (path, 403)
            assert b"decode" not in answer.body
        if setting == "metrics":
            assert (await get(f"{host}:{port}", "/metrics")).status == 200
        assert (await get(url, "/api/v1/deployments")).document["deployments"]
        assert (await get(url, "/")).status == 200
        # Another site's host name can resolve to this host.
        assert (await get(url, "/api/v1/deployments", Host="rebound.example")).status == 403


@pytest.mark.parametrize("protection", ["credentials", "trusted network"])
async def test_other_hosts_get_the_page_with_credentials_or_on_a_trusted_network(
    tmp_path: Path, protection: str
) -> None:
    host = host_address()
    path = tmp_path / "credentials.yaml"
    path.write_text(CREDENTIALS)
    trust = {"insecure": True} if protection == "trusted network" else {"credentials": path}
    async with run_service(settings(metrics="0.0.0.0:0", **trust)) as service:
        port = service.metrics_address.rpartition(":")[2]
        assert (await get(f"{host}:{port}", "/")).status == 200
        answer = await get(f"{host}:{port}", "/api/v1/deployments")
        assert answer.status == (200 if protection == "trusted network" else 401)
