"""Everything under deploy/ parses and speaks of metrics, ports, settings and files that the service really has."""

import json
import re
import runpy
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import yaml
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from eplb_service.control.server.lease.choose import checked_lease
from eplb_service.control.server.lease.kubernetes_lease import LEADS_LABEL
from eplb_service.control.server.listening.probes import LIVENESS, READY
from eplb_service.control.server.service import running_service
from eplb_service.control.server.settings import (
    ENVIRONMENT_PREFIX,
    ServiceSettings,
    SettingsError,
    load_settings,
)
from eplb_service.telemetry.metrics import Metrics
from eplb_service.wire.generated import operator_pb2, operator_pb2_grpc
from tools.dashboard import layout
from tools.dashboard.operator_rules import operator_rules
from worker_agent.settings import AgentSettings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
YAML_FILES = sorted(path for suffix in ("yaml", "yml") for path in DEPLOY.rglob(f"*.{suffix}"))
JSON_FILES = sorted(DEPLOY.rglob("*.json"))
GRPC_PORT = int(ServiceSettings.model_fields["listen"].default.rpartition(":")[2])
METRICS_PORT = int(ServiceSettings.model_fields["metrics"].default.rpartition(":")[2])
HEALTH_PORT = 50552
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def load(name):
    return yaml.safe_load((DEPLOY / name).read_text())


def kubernetes_objects():
    for folder in ("base", "examples"):
        for path in sorted((DEPLOY / "kubernetes" / folder).glob("*.yaml")):
            for document in yaml.safe_load_all(path.read_text()):
                if "kind" in document:
                    yield pytest.param(document, id=f"{folder}/{path.name}")


DEPLOYMENTS = [item for item in kubernetes_objects() if item.values[0]["kind"] == "Deployment"]


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: path.name)
def test_yaml_parses(path):
    assert list(yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("path", JSON_FILES, ids=lambda path: path.name)
def test_json_parses(path):
    assert json.loads(path.read_text())


def metric_series():
    """Every series name that a scrape can bring, with its labels."""
    suffixes = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
    metrics = Metrics()
    known = {}
    for family in metrics.process.collect():
        known[family.name + ("_total" if family.type == "counter" else "")] = set()
    for metric in vars(metrics).values():
        for family in getattr(metric, "describe", list)() if metric is not metrics.process else ():
            for suffix in suffixes[family.type]:
                extra = {"le"} if suffix == "_bucket" else set()
                known[family.name + suffix] = set(metric._labelnames) | extra
    return known


def expressions():
    dashboard = layout.dashboard()
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield pytest.param(target["expr"], target["legendFormat"], id=panel["title"])
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield pytest.param(variable["definition"], "", id=variable["name"])
    for group in load("prometheus/rules.yml")["groups"]:
        for rule in group["rules"]:
            texts = " ".join(rule["annotations"].values()).replace("$labels.", "")
            yield pytest.param(rule["expr"], texts, id=rule["alert"])


@pytest.mark.parametrize(("expression", "shown"), list(expressions()))
def test_expressions_name_metrics_and_labels_that_exist(expression, shown):
    known = metric_series()
    named = set(re.findall(r"\beplb_\w+", expression))
    assert named <= set(known)
    labels = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", shown))
    labels |= set(re.findall(r"(\w+)(?:=~|!~|!=|=)\"", expression))
    for grouping in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
        labels |= set(re.findall(r"\w+", grouping))
    from_prometheus = {"job", "instance", "le"}
    assert labels <= from_prometheus.union(*(known[name] for name in named))


def test_the_dashboard_shows_every_balance_metric():
    text = (DEPLOY / "grafana/dashboards/eplb.json").read_text()
    own = [
        name for name in metric_series() if not name.endswith(("_sum", "_count")) and "_process_" not in name
    ]
    missing = [name for name in own if name not in text]
    assert missing == ["eplb_deployments"]


def test_the_dashboard_is_what_its_code_makes():
    text = (DEPLOY / "grafana/dashboards/eplb.json").read_text()
    assert text == layout.text(), "run `.venv/bin/python -m tools.dashboard`"


def test_the_operator_s_rules_are_those_of_prometheus():
    text = (DEPLOY / "kubernetes/monitoring/rules.yaml").read_text()
    assert text == operator_rules(), "run `.venv/bin/python -m tools.dashboard`"
    assert yaml.safe_load(text)["spec"] == load("prometheus/rules.yml")


def test_the_monitor_finds_the_service():
    monitor, service = load("kubernetes/monitoring/monitor.yaml"), load("kubernetes/base/service.yaml")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    ports = {port["name"] for port in service["spec"]["ports"]}
    assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= ports


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="KUSTOMIZATIONS ARE NOT BUILT: no kubectl here")
@pytest.mark.parametrize("folder", ["base", "ha", "monitoring"])
def test_kustomizations_build(folder):
    command = ["kubectl", "kustomize", str(DEPLOY / "kubernetes" / folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert len(list(yaml.safe_load_all(done.stdout))) >= 2


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="KUSTOMIZATIONS ARE NOT BUILT: no kubectl here")
def test_of_two_replicas_one_is_selected_and_both_may_hold_the_lease():
    command = ["kubectl", "kustomize", str(DEPLOY / "kubernetes/ha")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    built = {item["kind"]: item for item in yaml.safe_load_all(done.stdout)}
    assert "PersistentVolumeClaim" not in built
    assert built["Service"]["spec"]["selector"][LEADS_LABEL] == "true"
    pod = built["Deployment"]["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == built["ServiceAccount"]["metadata"]["name"]
    assert pod["automountServiceAccountToken"]
    [container] = pod["containers"]
    values = {entry["name"]: entry.get("value") for entry in container["env"]}
    kind, _, lease = checked_lease(values["EPLB_LEASE"]).partition(":")
    assert (kind, "POD_NAME" in values) == ("kubernetes", True)
    verbs = {
        (resource, verb): rule.get("resourceNames")
        for rule in built["Role"]["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert verbs == {
        ("leases", "get"): [lease],
        ("leases", "update"): [lease],
        ("leases", "create"): None,
        ("pods", "patch"): None,
    }
    asked = [container[f"{probe}Probe"]["grpc"]["service"] for probe in ("startup", "readiness", "liveness")]
    assert asked == [READY, READY, LIVENESS]
    assert all("persistentVolumeClaim" not in volume for volume in pod["volumes"])


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_compiled_kernels_of_the_image_are_not_hidden_by_the_volume_over_them(deployment):
    pod = deployment["spec"]["template"]["spec"]
    [cache] = re.findall(r"NUMBA_CACHE_DIR=(\S+)", DOCKERFILE)
    [service] = [container for container in pod["containers"] if container["name"] == "eplb"]
    [hiding] = [mount for mount in service["volumeMounts"] if mount["mountPath"] == cache]
    [copying] = [one for one in pod["initContainers"] if one["name"] == "kernels"]
    assert copying["image"] == service["image"]
    [mount] = copying["volumeMounts"]
    assert mount["name"] == hiding["name"]
    # Into a folder of its own: the root of a volume is not the service's, so that its times cannot be set.
    assert copying["command"] == ["cp", "--archive", cache, f"{mount['mountPath']}/"]
    assert hiding["subPath"] == cache.rpartition("/")[2]
    assert service["startupProbe"]["periodSeconds"] * service["startupProbe"]["failureThreshold"] >= 300


def test_panels_do_not_overlap_and_have_a_sentence_each():
    taken = set()
    for panel in layout.dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["description"].endswith("."), panel["title"]


def test_the_dashboard_lies_where_grafana_looks():
    compose = load("compose.yaml")
    mounts = dict(
        volume.split(":")[:2]
        for volume in compose["services"]["grafana"]["volumes"]
        if volume.startswith(".")
    )
    [provider] = load("grafana/provisioning/dashboards/eplb.yaml")["providers"]
    assert mounts["./grafana/dashboards"] == provider["options"]["path"]
    for source in mounts:
        assert (DEPLOY / source).is_dir()


def test_compose_ports_and_scrape_target():
    compose = load("compose.yaml")
    published = [mapping.rpartition(":")[2] for mapping in compose["services"]["eplb"]["ports"]]
    page = compose["services"]["eplb"]["environment"]["EPLB_PAGE"].rpartition(":")[2]
    assert published == [str(GRPC_PORT), page, str(METRICS_PORT)]
    # Figures are in plain text, so they stay on this host.
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


def settings_from(environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return load_settings({}, environment=environment)


def test_the_image_listens_where_it_says(monkeypatch):
    environment = dict(re.findall(r"^\s*(?:ENV )?(EPLB_\w+)=(\S+)", DOCKERFILE, flags=re.MULTILINE))
    with pytest.raises(SettingsError, match="is reached from other hosts"):
        settings_from(environment, monkeypatch)
    environment |= load("compose.yaml")["services"]["eplb"]["environment"]
    settings = settings_from(environment, monkeypatch)
    assert settings.listen == f"0.0.0.0:{GRPC_PORT}"
    assert settings.metrics == f"0.0.0.0:{METRICS_PORT}"
    assert settings.page == "0.0.0.0:9465"
    assert settings.tls_cert is not None
    assert f"EXPOSE {GRPC_PORT} {METRICS_PORT}" in DOCKERFILE
    assert settings.store.startswith("/var/lib/eplb/")


def test_everything_the_image_copies_is_sent_to_the_builder():
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert "deploy/healthcheck.py" in sent
    assert {
        "eplb_service",
        "worker_agent",
        "proto",
        "pyproject.toml",
        "setup.py",
        "tools/generate_stubs.py",
    } <= sent
    assert [name for name in sent if not (ROOT / name).exists()] == []


def test_the_config_of_the_base_is_valid():
    settings = load_settings({}, config=DEPLOY / "kubernetes/base/eplb.yaml", environment={})
    assert settings.listen == f"0.0.0.0:{GRPC_PORT}"
    assert settings.metrics == f"0.0.0.0:{METRICS_PORT}"
    assert settings.health == f"0.0.0.0:{HEALTH_PORT}"
    assert not settings.insecure
    mounted = {
        mount["mountPath"]
        for mount in load("kubernetes/base/deployment.yaml")["spec"]["template"]["spec"]["containers"][0][
            "volumeMounts"
        ]
    }
    for path in (settings.tls_cert, settings.tls_key, settings.credentials):
        assert path is not None
        assert str(path.parent) in mounted


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")
async def test_the_credentials_that_are_made_admit_each_role(tmp_path):
    command = [str(DEPLOY / "make-credentials.sh"), str(tmp_path / "secrets"), "eplb"]
    for _ in range(2):
        subprocess.run(command, check=True, timeout=300)
    made = tmp_path / "secrets"
    files = {
        "tls_cert": made / "tls.crt",
        "tls_key": made / "tls.key",
        "credentials": made / "credentials.yaml",
    }
    assert {path.name for path in files.values()} == set(load("compose.yaml")["secrets"])
    assert made.stat().st_mode & 0o077 == 0
    flags = {"listen": "127.0.0.1:0", "metrics": "127.0.0.1:0", "store": ":memory:", "threads": 1}
    async with running_service(load_settings({**flags, **files})) as service:
        address = service.address.replace("127.0.0.1", "localhost")
        credentials = grpc.ssl_channel_credentials((made / "ca.pem").read_bytes())
        async with grpc.aio.secure_channel(address, credentials) as channel:
            stub = operator_pb2_grpc.OperatorServiceStub(channel)
            for role, code in (("reader", None), ("agent", grpc.StatusCode.PERMISSION_DENIED)):
                token = (made / f"{role}.token").read_text()
                call = stub.ListDeployments(
                    operator_pb2.ListDeploymentsRequest(), metadata=(("authorization", f"Bearer {token}"),)
                )
                if code is None:
                    await call
                else:
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await call
                    assert refused.value.code() is code


def test_kustomization_names_files_that_exist():
    base = DEPLOY / "kubernetes/base"
    kustomization = load("kubernetes/base/kustomization.yaml")
    [config] = kustomization["configMapGenerator"]
    named = set(kustomization["resources"]) | set(config["files"])
    assert named | {"kustomization.yaml"} == {path.name for path in base.iterdir()}


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_deployments_are_consistent(deployment):
    template = deployment["spec"]["template"]
    pod = template["spec"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert template["metadata"]["annotations"]["prometheus.io/port"] == str(METRICS_PORT)
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in pod["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            checked = container.get(probe, {})
            assert checked.get("grpc", {"port": HEALTH_PORT})["port"] == HEALTH_PORT
            assert checked.get("httpGet", {"port": next(iter(ports))})["port"] in ports
    [service] = [container for container in pod["containers"] if container["name"] == "eplb"]
    assert METRICS_PORT in {port["containerPort"] for port in service["ports"]}
    written = {mount["mountPath"] for mount in service["volumeMounts"]}
    assert {"/var/lib/eplb", re.search(r"NUMBA_CACHE_DIR=(\S+)", DOCKERFILE)[1]} <= written


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_environment_variables_are_known(deployment, monkeypatch):
    for container in deployment["spec"]["template"]["spec"]["containers"]:
        values = {entry["name"]: entry.get("value", "any") for entry in container.get("env", [])}
        of_agent = {name for name in values if name.startswith("EPLB_AGENT_")}
        known = {f"EPLB_AGENT_{name.upper()}" for name in AgentSettings.model_fields}
        assert of_agent <= known
        settings_from({name: value for name, value in values.items() if name not in of_agent}, monkeypatch)
        assert all(name.startswith(ENVIRONMENT_PREFIX) for name in values)


def test_service_and_deployment_of_the_base_meet():
    service, deployment = load("kubernetes/base/service.yaml"), load("kubernetes/base/deployment.yaml")
    template = deployment["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    ports = {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
    assert ports == {"grpc": GRPC_PORT, "metrics": METRICS_PORT, "health": HEALTH_PORT}
    del ports["health"]
    assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == ports


@pytest.fixture
def health_server():
    server = grpc.server(ThreadPoolExecutor(max_workers=1))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port, servicer
    server.stop(grace=None).wait()


def test_healthcheck(health_server, monkeypatch, capsys):
    port, servicer = health_server
    monkeypatch.setenv("EPLB_LISTEN", f"0.0.0.0:{port}")

    def exit_code():
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(DEPLOY / "healthcheck.py"), run_name="__main__")
        return int(left.value.code)

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
