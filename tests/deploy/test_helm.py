"""The chart, rendered by Helm's own engine, equals the manifests for kustomize and is valid by Kubernetes' schemas."""

import copy
import json

import jsonschema
import kubernetes_validate
import pytest
import yaml

from eplb_service.control.server.settings import load_settings
from tests.deploy.files import DEPLOY, load
from tests.deploy.manifests import OPERATOR_SCHEMAS, VERSIONS, WITHOUT_SCHEMA, manifests

helm = pytest.importorskip("helm_python", reason="THE CHART IS NOT RENDERED: no helm-python-sdk here")

CHART = DEPLOY / "helm/eplb-service"
SEVERAL = {"replicas": 2, "monitoring": {"enabled": True, "labels": {"release": "prometheus"}}}
SCENES = pytest.mark.parametrize("values", [{}, SEVERAL], ids=["one", "several"])


def rendered(values, name="eplb"):
    """Every object by kind and name."""
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values=values, name=name, namespace="moe")
    manifests = [text for path, text in files.items() if not path.endswith(".txt")]
    objects = [one for text in manifests for one in yaml.safe_load_all(text) if one]
    return {(one["kind"], one["metadata"]["name"]): one for one in objects}


def as_by_kustomize(found):
    """The object without what the chart adds: its release's label, the pull policy, and a checksum of the config."""
    found = copy.deepcopy(found)
    parts = [found]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            part.pop("app.kubernetes.io/instance", None)
            part.pop("checksum/config", None)
            part.pop("imagePullPolicy", None)
            if part.get("annotations") == {
                "checksum/config": part.get("annotations", {}).get("checksum/config")
            }:
                del part["annotations"]
            if part.get("image") == f"eplb-service:{chart_version()}":
                part["image"] = "eplb-service"
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    return found


def chart_version():
    return yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]


def without_nothing(found):
    """The object without what a patch set to nothing."""
    if isinstance(found, dict):
        return {key: without_nothing(value) for key, value in found.items() if value is not None}
    return [without_nothing(one) for one in found] if isinstance(found, list) else found


def test_one_service_is_that_of_the_base():
    base = {(one["kind"], one["metadata"]["name"]): one for one in manifests_of("base/")}
    found = rendered({})
    assert found.keys() - {("ConfigMap", "eplb-config")} == base.keys()
    for name, one in base.items():
        assert as_by_kustomize(found[name]) == one, name


def test_several_services_are_those_of_the_patches_for_high_availability():
    found = rendered(SEVERAL)
    assert ("PersistentVolumeClaim", "eplb-store") not in found
    for one in manifests_of("ha/"):
        name = one["kind"], one["metadata"]["name"]
        expected = without_nothing(one)
        if one["kind"] == "Deployment":
            # A strategic merge replaces what belongs to another kind of volume.
            volumes = expected["spec"]["template"]["spec"]["volumes"]
            assert [volume for volume in volumes if volume["name"] == "store"] == [
                {"name": "store", "emptyDir": {}}
            ]
        assert as_by_kustomize(found[name]) == expected, name


def manifests_of(folder):
    return [one for name, one in manifests().items() if name.startswith(folder)]


@SCENES
@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_rendered_is_what_kubernetes_takes(values, version):
    for one in rendered(values, name="another").values():
        if one["kind"] not in WITHOUT_SCHEMA:
            kubernetes_validate.validate(one, version, strict=True)


def test_rules_and_dashboard_are_those_of_the_repository():
    found = rendered(SEVERAL)
    assert found["PrometheusRule", "eplb"]["spec"] == load("prometheus/rules.yml")
    dashboard = json.loads((DEPLOY / "grafana/dashboards/eplb.json").read_text())
    assert json.loads(found["ConfigMap", "eplb-dashboard"]["data"]["eplb.json"]) == dashboard
    for kind in ("PrometheusRule", "ServiceMonitor"):
        schema = {"$defs": OPERATOR_SCHEMAS["$defs"], **OPERATOR_SCHEMAS[kind]}
        jsonschema.Draft202012Validator(schema).validate(found[kind, "eplb"])
        assert found[kind, "eplb"]["metadata"]["labels"]["release"] == "prometheus"
    monitor = found["ServiceMonitor", "eplb"]["spec"]["selector"]["matchLabels"]
    assert monitor.items() <= found["Service", "eplb-metrics"]["metadata"]["labels"].items()


def test_two_releases_of_a_namespace_do_not_meet():
    one, other = rendered({}, name="one"), rendered({}, name="other")
    assert not one.keys() & other.keys()
    labels = other["Deployment", "other"]["spec"]["template"]["metadata"]["labels"]
    assert not one["Service", "one"]["spec"]["selector"].items() <= labels.items()


def test_the_config_is_that_of_the_base_and_takes_any_setting(tmp_path):
    for values, expected in (({}, {}), ({"config": {"policy": "none", "prior": "a=b"}}, {"policy": "none"})):
        path = tmp_path / "eplb.yaml"
        path.write_text(rendered(values)["ConfigMap", "eplb-config"]["data"]["eplb.yaml"])
        found = load_settings({}, config=path, environment={})
        base = load_settings({}, config=DEPLOY / "kubernetes/base/eplb.yaml", environment={})
        assert found == base.model_copy(update={**expected, "prior": values.get("config", {}).get("prior")})


def test_another_config_makes_another_pod():
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
def test_every_value_arrives_where_it_belongs(version):
    found = rendered(EVERYTHING)
    for one in found.values():
        if one["kind"] not in WITHOUT_SCHEMA:
            kubernetes_validate.validate(one, version, strict=True)
    deployment = found["Deployment", "eplb"]
    template = deployment["spec"]["template"]
    pod, (container,) = template["spec"], template["spec"]["containers"]
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
    assert found["ServiceAccount", "balancer"]["metadata"]["annotations"] == {"a/b": "c"}
    assert found["RoleBinding", "eplb"]["subjects"] == [{"kind": "ServiceAccount", "name": "balancer"}]
    service = found["Service", "eplb"]
    assert (service["spec"]["type"], service["metadata"]["annotations"]) == (
        "LoadBalancer",
        {"lb/internal": "true"},
    )


def test_an_account_of_somebody_else_is_used_and_not_made():
    found = rendered({"replicas": 2, "serviceAccount": {"create": False, "name": "theirs"}})
    assert not [name for kind, name in found if kind == "ServiceAccount"]
    assert found["Deployment", "eplb"]["spec"]["template"]["spec"]["serviceAccountName"] == "theirs"
    assert found["RoleBinding", "eplb"]["subjects"][0]["name"] == "theirs"


@pytest.mark.parametrize(("operator", "annotations"), [(False, False), (True, False), (False, True)])
def test_every_pod_is_scraped_once_at_most(operator, annotations):
    found = rendered({"monitoring": {"enabled": operator, "annotations": annotations}})
    assert any(kind == "ServiceMonitor" for kind, _ in found) is operator
    pod = found["Deployment", "eplb"]["spec"]["template"]["metadata"]
    assert ("prometheus.io/scrape" in pod["annotations"]) is annotations


def test_the_notes_name_the_service_of_the_release():
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values={}, name="mine", namespace="moe")
    (notes,) = [text for path, text in files.items() if path.endswith("NOTES.txt")]
    assert "EPLB_AGENT_SERVICE=mine.moe:50551" in notes
    assert "deploy/mine 9464" in notes
    assert "Nothing scrapes its metrics" in notes


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
def test_values_that_will_not_do_are_refused(values):
    with helm.Chart.load(CHART) as chart:
        with pytest.raises(helm.HelmValuesError):
            chart.validate_schema(values)
        chart.validate_schema({})


def test_the_chart_has_no_fault_that_helm_knows():
    report = helm.chart.lint(CHART, strict=True)
    assert report["errors"] == []
    assert [one["error"] for one in report["messages"] if one["severity"] > 1] == []
