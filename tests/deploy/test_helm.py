"""Tests of the chart: rendered by Helm's engine, it equals the kustomize manifests and passes the schemas."""

import copy
import json

import jsonschema
import kubernetes_validate
import pytest
import yaml

from eplb_service.control.server.settings import load_settings
from tests.deploy.files import DEPLOY, load
from tests.deploy.manifests import OPERATOR_SCHEMAS, VERSIONS, WITHOUT_SCHEMA, manifests

helm = pytest.importorskip(
    "helm_python", reason="THE CHART IS NOT RENDERED: helm-python-sdk is not installed"
)

CHART = DEPLOY / "helm/eplb-service"
SEVERAL = {"replicas": 2, "monitoring": {"enabled": True, "labels": {"release": "prometheus"}}}
BOTH_SIZES = pytest.mark.parametrize("values", [{}, SEVERAL], ids=["one", "several"])


def rendered(values, name="eplb"):
    """Return every rendered object by kind and name."""
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values=values, name=name, namespace="moe")
    manifests = [text for path, text in files.items() if not path.endswith(".txt")]
    objects = [item for text in manifests for item in yaml.safe_load_all(text) if item]
    return {(item["kind"], item["metadata"]["name"]): item for item in objects}


def without_additions(manifest):
    """Return the object without the chart's additions: release label, pull policy and config checksum."""
    manifest = copy.deepcopy(manifest)
    pending = [manifest]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            node.pop("app.kubernetes.io/instance", None)
            node.pop("checksum/config", None)
            node.pop("imagePullPolicy", None)
            if node.get("annotations") == {
                "checksum/config": node.get("annotations", {}).get("checksum/config")
            }:
                del node["annotations"]
            if node.get("image") == f"eplb-service:{chart_version()}":
                node["image"] = "eplb-service"
            pending += node.values()
        elif isinstance(node, list):
            pending += node
    return manifest


def chart_version():
    return yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]


def without_nulls(node):
    """Return the object without the keys that a patch set to null."""
    if isinstance(node, dict):
        return {key: without_nulls(value) for key, value in node.items() if value is not None}
    return [without_nulls(item) for item in node] if isinstance(node, list) else node


def test_one_replica_equals_the_base_manifests():
    base = {(item["kind"], item["metadata"]["name"]): item for item in manifests_of("base/")}
    objects = rendered({})
    assert objects.keys() - {("ConfigMap", "eplb-config")} == base.keys()
    for name, item in base.items():
        assert without_additions(objects[name]) == item, name


def test_several_replicas_equal_the_high_availability_patches():
    objects = rendered(SEVERAL)
    assert ("PersistentVolumeClaim", "eplb-store") not in objects
    for item in manifests_of("ha/"):
        name = item["kind"], item["metadata"]["name"]
        expected = without_nulls(item)
        if item["kind"] == "Deployment":
            # A strategic merge replaces a volume if its kind differs.
            volumes = expected["spec"]["template"]["spec"]["volumes"]
            assert [volume for volume in volumes if volume["name"] == "store"] == [
                {"name": "store", "emptyDir": {}}
            ]
        assert without_additions(objects[name]) == expected, name


def manifests_of(folder):
    return [item for name, item in manifests().items() if name.startswith(folder)]


@BOTH_SIZES
@pytest.mark.parametrize("version", VERSIONS)
def test_rendered_objects_pass_the_kubernetes_schemas(values, version):
    for item in rendered(values, name="another").values():
        if item["kind"] not in WITHOUT_SCHEMA:
            kubernetes_validate.validate(item, version, strict=True)


def test_rules_and_dashboard_equal_the_repository_files():
    objects = rendered(SEVERAL)
    assert objects["PrometheusRule", "eplb"]["spec"] == load("prometheus/rules.yml")
    dashboard = json.loads((DEPLOY / "grafana/dashboards/eplb.json").read_text())
    assert json.loads(objects["ConfigMap", "eplb-dashboard"]["data"]["eplb.json"]) == dashboard
    for kind in ("PrometheusRule", "ServiceMonitor"):
        schema = {"$defs": OPERATOR_SCHEMAS["$defs"], **OPERATOR_SCHEMAS[kind]}
        jsonschema.Draft202012Validator(schema).validate(objects[kind, "eplb"])
        assert objects[kind, "eplb"]["metadata"]["labels"]["release"] == "prometheus"
    monitor = objects["ServiceMonitor", "eplb"]["spec"]["selector"]["matchLabels"]
    assert monitor.items() <= objects["Service", "eplb-metrics"]["metadata"]["labels"].items()


def test_two_releases_in_one_namespace_are_separate():
    first = rendered({}, name="first")
    second = rendered({}, name="second")
    assert not first.keys() & second.keys()
    labels = second["Deployment", "second"]["spec"]["template"]["metadata"]["labels"]
    assert not first["Service", "first"]["spec"]["selector"].items() <= labels.items()


def test_the_default_config_equals_the_base_and_any_setting_can_be_added(tmp_path):
    for values, expected in (({}, {}), ({"config": {"policy": "none", "prior": "a=b"}}, {"policy": "none"})):
        path = tmp_path / "eplb.yaml"
        path.write_text(rendered(values)["ConfigMap", "eplb-config"]["data"]["eplb.yaml"])
        settings = load_settings({}, config=path, environment={})
        base = load_settings({}, config=DEPLOY / "kubernetes/base/eplb.yaml", environment={})
        assert settings == base.model_copy(
            update={**expected, "prior": values.get("config", {}).get("prior")}
        )


def test_a_changed_config_restarts_the_pod():
    checksums = {
        rendered({"config": {"window_steps": steps}})["Deployment", "eplb"]["spec"]["template"]["metadata"][
            "annotations"
        ]["checksum/config"]
        for steps in (256, 512)
    }
    assert len(checksums) == 2


EVERYTHING = {
    "replicas": 2,
    "imagePullSecrets": [{"name": "registry"}],
    "monitoring": {"annotations": True},
    "serviceAccount": {"create": True, "name": "balancer", "annotations": {"a/b": "c"}},
    "service": {"type": "LoadBalancer", "annotations": {"lb/internal": "true"}},
    "annotations": {"owner": "moe"},
    "podAnnotations": {"sidecar.istio.io/inject": "false"},
    "podLabels": {"team": "moe"},
    "podSecurityContext": {"runAsUser": 20001},
    "securityContext": {"capabilities": {"drop": ["NET_RAW"]}},
    "extraEnv": [{"name": "EPLB_LOG_LEVEL", "value": "debug"}],
    "extraVolumes": [{"name": "traces", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "traces", "mountPath": "/traces"}],
    "nodeSelector": {"pool": "cpu"},
    "tolerations": [{"key": "dedicated", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
    ],
    "priorityClassName": "high",
}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_chart_value_appears_in_its_rendered_object(version):
    objects = rendered(EVERYTHING)
    for item in objects.values():
        if item["kind"] not in WITHOUT_SCHEMA:
            kubernetes_validate.validate(item, version, strict=True)
    deployment = objects["Deployment", "eplb"]
    template = deployment["spec"]["template"]
    pod = template["spec"]
    (container,) = template["spec"]["containers"]
    assert deployment["metadata"]["annotations"] == EVERYTHING["annotations"]
    assert EVERYTHING["podAnnotations"].items() <= template["metadata"]["annotations"].items()
    assert EVERYTHING["podLabels"].items() <= template["metadata"]["labels"].items()
    names = "imagePullSecrets nodeSelector tolerations affinity topologySpreadConstraints priorityClassName"
    assert {name: pod[name] for name in names.split()} == {name: EVERYTHING[name] for name in names.split()}
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsNonRoot"]) == (20001, True)
    assert container["securityContext"]["capabilities"]["drop"] == ["NET_RAW"]
    assert {"name": "EPLB_LEASE", "value": "kubernetes:eplb"} in container["env"]
    assert EVERYTHING["extraEnv"][0] in container["env"]
    assert EVERYTHING["extraVolumes"][0] in pod["volumes"]
    assert EVERYTHING["extraVolumeMounts"][0] in container["volumeMounts"]
    assert pod["serviceAccountName"] == "balancer"
    assert objects["ServiceAccount", "balancer"]["metadata"]["annotations"] == {"a/b": "c"}
    assert objects["RoleBinding", "eplb"]["subjects"] == [{"kind": "ServiceAccount", "name": "balancer"}]
    service = objects["Service", "eplb"]
    assert (service["spec"]["type"], service["metadata"]["annotations"]) == (
        "LoadBalancer",
        {"lb/internal": "true"},
    )


def test_an_existing_service_account_is_used_and_not_created():
    objects = rendered({"replicas": 2, "serviceAccount": {"create": False, "name": "platform"}})
    assert not [name for kind, name in objects if kind == "ServiceAccount"]
    assert objects["Deployment", "eplb"]["spec"]["template"]["spec"]["serviceAccountName"] == "platform"
    assert objects["RoleBinding", "eplb"]["subjects"][0]["name"] == "platform"


@pytest.mark.parametrize(("operator", "annotations"), [(False, False), (True, False), (False, True)])
def test_every_pod_is_scraped_at_most_once(operator, annotations):
    objects = rendered({"monitoring": {"enabled": operator, "annotations": annotations}})
    assert any(kind == "ServiceMonitor" for kind, _ in objects) is operator
    pod = objects["Deployment", "eplb"]["spec"]["template"]["metadata"]
    assert ("prometheus.io/scrape" in pod["annotations"]) is annotations


def test_the_notes_name_the_service_of_the_release():
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values={}, name="mine", namespace="moe")
    (notes,) = [text for path, text in files.items() if path.endswith("NOTES.txt")]
    assert "EPLB_AGENT_SERVICE=mine.moe:50551" in notes
    assert "deploy/mine 9464" in notes
    assert "Nothing scrapes the metrics" in notes


@pytest.mark.parametrize(
    "values",
    [
        {"monitoring": {"enabled": True, "annotations": True}},
        {"podAnnotations": {"a": 1}},
        {"extraEnv": {"EPLB_LOG_LEVEL": "debug"}},
        {"service": {"type": "None"}},
        {"replicas": 0},
        {"replica": 2},
        {"secret": ""},
        {"config": {"listen": "0.0.0.0:1"}},
        {"monitoring": {"on": True}},
    ],
)
def test_invalid_values_are_rejected(values):
    with helm.Chart.load(CHART) as chart:
        with pytest.raises(helm.HelmValuesError):
            chart.validate_schema(values)
        chart.validate_schema({})


def test_the_chart_passes_helm_lint():
    report = helm.chart.lint(CHART, strict=True)
    assert report["errors"] == []
    assert [message["error"] for message in report["messages"] if message["severity"] > 1] == []
