"""Tests of the Kubernetes manifests: they agree with the settings, the ports, the image and each other."""

import json
import re
import shutil
import subprocess

import pytest
import yaml

from eplb_service.control.server.lease.kubernetes_lease import LEADS_LABEL
from eplb_service.control.server.lease.leadership import checked_lease
from eplb_service.control.server.listening import LIVENESS, READY
from eplb_service.control.server.settings import ENVIRONMENT_PREFIX, load_settings
from tests.deploy.files import (
    DEPLOY,
    DEPLOYMENTS,
    DOCKERFILE,
    GRPC_PORT,
    HEALTH_PORT,
    METRICS_PORT,
    load,
    settings_from,
)
from worker_agent.settings import AgentSettings


def test_the_monitor_finds_leading_and_standby_pods():
    monitor = load("kubernetes/monitoring/monitor.yaml")
    metrics = load("kubernetes/base/metrics.yaml")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= metrics["metadata"]["labels"].items()
    ports = {port["name"] for port in metrics["spec"]["ports"]}
    [endpoint] = monitor["spec"]["endpoints"]
    assert endpoint["port"] in ports
    assert endpoint["port"] not in {
        port["name"] for port in load("kubernetes/base/service.yaml")["spec"]["ports"]
    }
    assert metrics["spec"]["publishNotReadyAddresses"]
    assert LEADS_LABEL not in metrics["spec"]["selector"]
    patched = yaml.safe_load((DEPLOY / "kubernetes/ha/leader-only.yaml").read_text())
    assert patched["metadata"]["name"] != metrics["metadata"]["name"]


def kustomized(folder):
    command = ["kubectl", "kustomize", str(DEPLOY / "kubernetes" / folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return {item["kind"]: item for item in yaml.safe_load_all(done.stdout)}


@pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="KUSTOMIZATIONS ARE NOT BUILT: kubectl is not installed"
)
def test_either_of_two_replicas_may_hold_the_lease():
    assert min(len(kustomized(folder)) for folder in ("base", "monitoring")) >= 2
    built = kustomized("ha")
    assert "PersistentVolumeClaim" not in built
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
    services = [
        container[f"{probe}Probe"]["grpc"]["service"] for probe in ("startup", "readiness", "liveness")
    ]
    assert services == [READY, READY, LIVENESS]
    assert all("persistentVolumeClaim" not in volume for volume in pod["volumes"])


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_the_images_compiled_kernels_are_copied_into_the_cache_volume(deployment):
    pod = deployment["spec"]["template"]["spec"]
    [cache] = re.findall(r"NUMBA_CACHE_DIR=(\S+)", DOCKERFILE)
    [service] = [container for container in pod["containers"] if container["name"] == "eplb"]
    [mount_of_cache] = [mount for mount in service["volumeMounts"] if mount["mountPath"] == cache]
    [copier] = [container for container in pod["initContainers"] if container["name"] == "kernels"]
    assert copier["image"] == service["image"]
    [mount] = copier["volumeMounts"]
    assert mount["name"] == mount_of_cache["name"]
    # The copy goes into a subfolder: the service does not own the volume's root and cannot set its times.
    assert copier["command"] == ["cp", "--archive", cache, f"{mount['mountPath']}/"]
    assert mount_of_cache["subPath"] == cache.rpartition("/")[2]
    assert service["startupProbe"]["periodSeconds"] * service["startupProbe"]["failureThreshold"] >= 300


def test_only_labelled_clients_reach_the_service_and_it_has_no_egress():
    policy = load("kubernetes/base/network.yaml")
    deployment = load("kubernetes/base/deployment.yaml")
    template = deployment["spec"]["template"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert policy["spec"]["egress"] == []
    ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    admitted = {
        port["port"]: [list(origin) for origin in rule["from"]]
        for rule in policy["spec"]["ingress"]
        for port in rule["ports"]
    }
    assert admitted == {
        "grpc": [["podSelector"]],
        "metrics": [["namespaceSelector"]],
        "health": [["namespaceSelector"]],
    }
    assert set(admitted) == ports


def test_the_documented_command_creates_the_mounted_secrets():
    pod = load("kubernetes/base/deployment.yaml")["spec"]["template"]["spec"]
    [secret] = [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume]
    text = (DEPLOY / "kubernetes/base/kustomization.yaml").read_text()
    command = re.search(rf"create secret generic {secret} ((?:.|\n)*?)#   kubectl", text)
    settings = load_settings({}, config=DEPLOY / "kubernetes/base/eplb.yaml", environment={})
    for path in (settings.tls_cert, settings.tls_key, settings.credentials):
        assert f"--from-file=deploy/secrets/{path.name}" in command[1]


def test_the_config_of_the_base_is_valid():
    settings = load_settings({}, config=DEPLOY / "kubernetes/base/eplb.yaml", environment={})
    assert settings.listen == f"0.0.0.0:{GRPC_PORT}"
    assert settings.metrics == f"0.0.0.0:{METRICS_PORT}"
    assert settings.health == f"0.0.0.0:{HEALTH_PORT}"
    assert not settings.insecure
    [container] = load("kubernetes/base/deployment.yaml")["spec"]["template"]["spec"]["containers"]
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    for path in (settings.tls_cert, settings.tls_key, settings.credentials):
        assert str(path.parent) in mounted


def test_the_files_of_a_kustomization_exist():
    base = DEPLOY / "kubernetes/base"
    kustomization = load("kubernetes/base/kustomization.yaml")
    [config] = kustomization["configMapGenerator"]
    named = set(kustomization["resources"]) | set(config["files"])
    assert named | {"kustomization.yaml"} == {path.name for path in base.iterdir()}


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_labels_volumes_and_ports_of_each_deployment_are_consistent(deployment):
    template = deployment["spec"]["template"]
    pod = template["spec"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    # The monitor in ../monitoring finds the base's pods. With annotations as well, they would be scraped twice.
    expected = None if deployment["metadata"]["name"] == "eplb" else str(METRICS_PORT)
    assert template["metadata"].get("annotations", {}).get("prometheus.io/port") == expected
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
def test_the_agent_or_the_service_knows_every_environment_variable(deployment, monkeypatch):
    for container in deployment["spec"]["template"]["spec"]["containers"]:
        values = {entry["name"]: entry.get("value", "any") for entry in container.get("env", [])}
        of_agent = {name for name in values if name.startswith("EPLB_AGENT_")}
        settings = {f"EPLB_AGENT_{name.upper()}" for name in AgentSettings.model_fields}
        assert of_agent <= settings
        of_engine = {name for name in values if not name.startswith(ENVIRONMENT_PREFIX)}
        assert of_engine <= ({"DYNAMIC_EPLB"} if container["name"] == "model" else set())
        of_service = set(values) - of_agent - of_engine
        settings_from({name: values[name] for name in of_service}, monkeypatch)


def test_the_sidecar_example_enables_the_agent():
    """The environment has the host's switch and the service's address, as docs/vllm_ascend.md describes."""
    pod = load("kubernetes/examples/sidecar.yaml")["spec"]["template"]["spec"]
    [model] = [container for container in pod["containers"] if container["name"] == "model"]
    [service] = [container for container in pod["containers"] if container["name"] == "eplb"]
    arguments = model["args"]
    values = {entry["name"]: entry.get("value") for entry in model["env"]}
    config = json.loads(arguments[arguments.index("--additional-config") + 1])["eplb_config"]
    assert config["dynamic_eplb"] is True
    ranks = int(arguments[arguments.index("--data-parallel-size") + 1])
    assert config["num_redundant_experts"] % ranks == 0
    assert values["DYNAMIC_EPLB"] == "true"
    assert {"name": "EPLB_LISTEN", "value": values["EPLB_AGENT_SERVICE"]} in service["env"]


def test_the_base_service_matches_the_base_deployment():
    service = load("kubernetes/base/service.yaml")
    deployment = load("kubernetes/base/deployment.yaml")
    template = deployment["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    ports = {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
    assert ports == {"grpc": GRPC_PORT, "metrics": METRICS_PORT, "health": HEALTH_PORT}
    del ports["health"]
    metrics = load("kubernetes/base/metrics.yaml")
    assert metrics["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    offered = service["spec"]["ports"] + metrics["spec"]["ports"]
    assert {port["targetPort"]: port["port"] for port in offered} == ports


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_gpu_engine_installs_the_agent_and_reaches_the_base_service(engine):
    path = DEPLOY / "kubernetes/examples" / f"{engine}.yaml"
    headless, stateful = yaml.safe_load_all(path.read_text())
    assert (headless["spec"]["clusterIP"], headless["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert stateful["spec"]["serviceName"] == headless["metadata"]["name"]
    template = stateful["spec"]["template"]
    assert headless["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    pod = template["spec"]
    wheel, agent = pod["initContainers"]
    (model,) = pod["containers"]
    assert agent["image"] == model["image"], "the engine's own Python installs the agent"
    wheel_folder = re.search(r"COPY --from=build /agent/ (\S+)", DOCKERFILE)
    assert wheel_folder is not None
    assert f"{wheel_folder[1]}*.whl" in wheel["command"][-1]
    environment = {entry["name"]: entry.get("value") for entry in model["env"]}
    settings = {
        name.removeprefix("EPLB_AGENT_").lower() for name in environment if name.startswith("EPLB_AGENT_")
    }
    assert settings <= AgentSettings.model_fields.keys()
    service = load("kubernetes/base/service.yaml")
    assert environment["EPLB_AGENT_SERVICE"] == f"{service['metadata']['name']}:{GRPC_PORT}"
    assert environment["EPLB_AGENT_DATA_HOST"] == f"$(POD_NAME).{headless['metadata']['name']}"
    mounts = {mount["mountPath"]: mount["name"] for mount in model["volumeMounts"]}
    assert mounts[environment["PYTHONPATH"].rpartition("/")[0]] == "agent"
    assert "ln -sfn" in agent["args"][0]
    assert environment["PYTHONPATH"] in agent["args"][0]
    folder = environment["EPLB_AGENT_TLS_CA"].rpartition("/")[0]
    assert mounts[folder] == "agent-secrets"
    assert {mount["name"] for mount in model["volumeMounts"]} <= {volume["name"] for volume in pod["volumes"]}
    (secret,) = [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume]
    text = (DEPLOY / "kubernetes/base/kustomization.yaml").read_text()
    command = re.search(rf"create secret generic {secret} ((?:.|\n)*?)#   kubectl", text)
    assert command is not None
    for name in ("EPLB_AGENT_TLS_CA", "EPLB_AGENT_AUTH_TOKEN_FILE"):
        assert f"--from-file=deploy/secrets/{environment[name].rpartition('/')[2]}" in command[1]
    policy = load("kubernetes/base/network.yaml")
    clients = policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    assert clients.items() <= template["metadata"]["labels"].items()
    assert model["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert "--enable-eplb" in model["args"][0]
