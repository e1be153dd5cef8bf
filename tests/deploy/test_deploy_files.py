"""Tests of the compose file and the image: their ports, settings and files match the service."""

import re
import runpy
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from eplb_core.wire.generated import operator_pb2, operator_pb2_grpc
from eplb_service.control.server.service import run_service
from eplb_service.control.server.settings import SettingsError, load_settings
from tests.control.server.grpc_calls import bearer, code_of
from tests.deploy.files import DEPLOY, DOCKERFILE, GRPC_PORT, METRICS_PORT, ROOT, load, settings_from


def test_compose_ports_and_scrape_target_match_the_service():
    compose = load("compose.yaml")
    published = [mapping.rpartition(":")[2] for mapping in compose["services"]["eplb"]["ports"]]
    page = compose["services"]["eplb"]["environment"]["EPLB_PAGE"].rpartition(":")[2]
    assert published == [str(GRPC_PORT), page, str(METRICS_PORT)]
    # Metrics are not encrypted, so the port is bound to this host.
    assert compose["services"]["eplb"]["ports"][-1].startswith("127.0.0.1:")
    scrape = load("prometheus/prometheus.yml")
    [job] = scrape["scrape_configs"]
    assert job["job_name"] == "eplb"
    assert job["static_configs"] == [{"targets": [f"eplb:{METRICS_PORT}"]}]
    assert [DEPLOY / "prometheus" / name for name in scrape["rule_files"]] == [
        DEPLOY / "prometheus/rules.yml"
    ]
    [datasource] = load("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert datasource["url"] == "http://prometheus:9090"


def test_grafana_has_a_secret_password_and_local_ports():
    grafana = load("compose.yaml")["services"]["grafana"]
    [secret] = grafana["secrets"]
    assert grafana["environment"]["GF_SECURITY_ADMIN_PASSWORD__FILE"] == f"/run/secrets/{secret}"
    assert [mapping for mapping in grafana["ports"] if not mapping.startswith("127.0.0.1:")] == []


def test_the_image_listens_on_its_exposed_ports(monkeypatch):
    environment = dict(re.findall(r"^\s*(?:ENV )?(EPLB_\w+)=(\S+)", DOCKERFILE, flags=re.MULTILINE))
    with pytest.raises(SettingsError, match="is reachable from other hosts"):
        settings_from(environment, monkeypatch)
    environment |= load("compose.yaml")["services"]["eplb"]["environment"]
    settings = settings_from(environment, monkeypatch)
    assert settings.listen == f"0.0.0.0:{GRPC_PORT}"
    assert settings.metrics == f"0.0.0.0:{METRICS_PORT}"
    assert settings.page == "0.0.0.0:9465"
    assert settings.tls_cert is not None
    assert f"EXPOSE {GRPC_PORT} {METRICS_PORT}" in DOCKERFILE
    assert settings.store.startswith("/var/lib/eplb/")


def test_the_build_context_contains_everything_that_the_image_copies():
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert "deploy/healthcheck.py" in sent
    assert {
        "eplb_core",
        "eplb_lab",
        "eplb_service",
        "worker_agent",
        "proto",
        "pyproject.toml",
        "setup.py",
    } <= sent
    assert [name for name in sent if not (ROOT / name).exists()] == []


@pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl is not installed; it makes the certificates"
)
async def test_generated_credentials_authorise_each_role(tmp_path):
    command = [str(DEPLOY / "make-credentials.sh"), str(tmp_path / "secrets"), "eplb"]
    for _ in range(2):
        subprocess.run(command, check=True, timeout=300)
    secrets = tmp_path / "secrets"
    files = {"tls_cert": "tls.crt", "tls_key": "tls.key", "credentials": "credentials.yaml"}
    compose = load("compose.yaml")
    assert set(files.values()) == set(compose["services"]["eplb"]["secrets"])
    for name, secret in compose["secrets"].items():
        assert secret["file"] == f"./secrets/{name}"
        assert (secrets / name).stat().st_mode & 0o777 == 0o444
    assert len((secrets / "grafana.password").read_text()) == 32
    assert secrets.stat().st_mode & 0o077 == 0
    flags = {"listen": "127.0.0.1:0", "metrics": "127.0.0.1:0", "store": ":memory:", "threads": 1}
    flags |= {name: secrets / file for name, file in files.items()}
    async with run_service(load_settings(flags)) as service:
        address = service.address.replace("127.0.0.1", "localhost")
        credentials = grpc.ssl_channel_credentials((secrets / "ca.pem").read_bytes())
        async with grpc.aio.secure_channel(address, credentials) as channel:
            stub = operator_pb2_grpc.OperatorServiceStub(channel)
            for role, code in (("reader", grpc.StatusCode.OK), ("agent", grpc.StatusCode.PERMISSION_DENIED)):
                proof = bearer((secrets / f"{role}.token").read_text())
                call = stub.ListDeployments(operator_pb2.ListDeploymentsRequest(), metadata=proof)
                assert await code_of(call) is code


@pytest.fixture
def health_server():
    server = grpc.server(ThreadPoolExecutor(max_workers=1))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port, servicer
    server.stop(grace=None).wait()


def test_the_healthchecks_exit_code_is_0_only_if_the_service_is_healthy(health_server, monkeypatch, capsys):
    port, servicer = health_server
    monkeypatch.setenv("EPLB_LISTEN", f"0.0.0.0:{port}")

    def exit_code():
        with pytest.raises(SystemExit) as exit_info:
            runpy.run_path(str(DEPLOY / "healthcheck.py"), run_name="__main__")
        return int(exit_info.value.code)

    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    assert exit_code() == 0
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert exit_code() == 1
    monkeypatch.setenv("EPLB_LISTEN", "0.0.0.0:1")
    monkeypatch.setenv("EPLB_HEALTH", f"0.0.0.0:{port}")
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    assert exit_code() == 0
    monkeypatch.delenv("EPLB_HEALTH")
    assert exit_code() == 1
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_the_image_and_the_probes_run_the_same_healthcheck():
    installed = re.search(r"COPY deploy/healthcheck.py (\S+)", DOCKERFILE)[1]
    assert f'CMD ["python", "{installed}"]' in DOCKERFILE
    sidecar = load("kubernetes/examples/sidecar.yaml")["spec"]["template"]["spec"]["containers"][1]
    assert sidecar["startupProbe"]["exec"]["command"] == ["python", installed]
    assert sidecar["livenessProbe"]["exec"]["command"] == ["python", installed]
