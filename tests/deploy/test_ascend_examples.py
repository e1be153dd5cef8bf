"""The vLLM-Ascend commands in the docs and manifests pass the adapter's checks on A2 and A3."""

import json
import os
import re
import shlex

import pytest
import torch
import yaml

from tests.deploy.files import DEPLOY, GRPC_PORT, ROOT, load
from tests.engines.ascend_layers import LISTS, SLOTS, weighted
from tests.engines.ascend_settings import ascend
from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.adapters.vllm_ascend.refusals import refuse_settings
from worker_agent.adapters.vllm_ascend.weights import expert_weights
from worker_agent.settings import AgentSettings

SIZES = {
    "-tp": 1,
    "--tensor-parallel-size": 1,
    "-dp": 1,
    "--data-parallel-size": 1,
    "--max-num-batched-tokens": 8192,
}


def documented():
    """Return the environment and the arguments of the first command in docs/vllm_ascend.md."""
    text = (ROOT / "docs/vllm_ascend.md").read_text()
    arguments = shlex.split(
        re.search(r"EPLB_AGENT_SERVICE=(?:.|\n)*?(?=\n```)", text)[0].replace("\\\n", " ")
    )
    position = arguments.index("vllm")
    return dict(argument.split("=", 1) for argument in arguments[:position]), arguments[position:]


def model_of(pod):
    """Return the environment and the arguments of a pod's engine."""
    [model] = [container for container in pod["containers"] if container["name"] == "model"]
    values = {entry["name"]: entry.get("value", "10.0.0.7") for entry in model["env"]}
    arguments = model["args"]
    if model["command"][0] == "sh":
        arguments = shlex.split(re.search(r"set -- ((?:.|\n)*?)\n *if", arguments[0])[1].replace("\\\n", " "))
    return values, arguments


def sidecar():
    return model_of(load("kubernetes/examples/sidecar.yaml")["spec"]["template"]["spec"])


def two_pods():
    _, stateful = yaml.safe_load_all((DEPLOY / "kubernetes/examples/ascend.yaml").read_text())
    return model_of(stateful["spec"]["template"]["spec"])


def checked(monkeypatch, device, environment, arguments):
    """Run the adapter's checks on settings and weights with this environment and these arguments."""
    for name in [name for name in os.environ if name.startswith("EPLB_AGENT_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    sizes = {name: int(arguments[arguments.index(name) + 1]) for name in SIZES if name in arguments}
    tensor = sizes.get("-tp", sizes.get("--tensor-parallel-size", 1))
    data = sizes.get("-dp", sizes.get("--data-parallel-size", 1))
    additional = json.loads(arguments[arguments.index("--additional-config") + 1])
    assert environment["DYNAMIC_EPLB"] == "true"
    assert additional["eplb_config"]["dynamic_eplb"] is True
    assert additional["eplb_config"]["num_redundant_experts"] % (tensor * data) == 0
    tokens = sizes.get("--max-num-batched-tokens", 8192)
    # Without enable_prefill_mc2, the host's MC2 capacity equals that of its graphs: at most 512 tokens.
    capacity = tensor if additional.get("enable_prefill_mc2") else 1
    eplb = ascend(
        monkeypatch,
        device=device,
        ranks=tensor * data,
        tensor_parallel=capacity,
        tokens=tokens,
        eplb=additional["eplb_config"],
    )
    refuse_settings(eplb)
    settings = AgentSettings()
    quantised = "--quantization" in arguments
    layer = weighted("W8A8", **{name: [torch.zeros(2) for _ in range(SLOTS)] for name in LISTS})
    if quantised:
        expert_weights(layer, quantised, move_quantised=settings.quantised_experts)
    return settings, quantised


@pytest.mark.parametrize(
    ("command", "device", "quantised"),
    [
        (documented, "A2", False),
        (documented, "A3", False),
        (sidecar, "A3", True),
        (two_pods, "A3", True),
    ],
)
def test_commands_of_docs_and_manifests_are_accepted(command, device, quantised, monkeypatch):
    settings, moves_quantised = checked(monkeypatch, device, *command())
    assert moves_quantised is quantised
    assert settings.verify_transfers is not False


def test_readme_shows_the_settings_of_the_sidecar():
    text = (ROOT / "README.md").read_text()
    arguments_shown = shlex.split(
        re.search(r"```\n(export EPLB_AGENT_SERVICE=127(?:.|\n)*?)```", text)[1].replace("\\\n", " ")
    )
    shown = dict(argument.split("=", 1) for argument in arguments_shown if re.match("[A-Z_]+=", argument))
    environment, arguments = sidecar()
    assert "DYNAMIC_EPLB" in shown
    assert shown.items() <= environment.items()
    assert set(arguments) - set(arguments_shown) == {"--port", "8000"}


def test_a_quantised_model_without_its_flag_is_rejected(monkeypatch):
    environment, arguments = sidecar()
    del environment["EPLB_AGENT_QUANTISED_EXPERTS"]
    with pytest.raises(UnsupportedEngineError, match="EPLB_AGENT_QUANTISED_EXPERTS=true"):
        checked(monkeypatch, "A3", environment, arguments)


def test_quantised_experts_are_never_moved_unverified(monkeypatch):
    monkeypatch.setenv("EPLB_AGENT_VERIFY_TRANSFERS", "false")
    with pytest.raises(ValueError, match="quantised_experts needs verify_transfers"):
        AgentSettings(quantised_experts=True)


def test_pods_on_several_nodes_reach_each_other_and_the_base_service():
    headless, stateful = yaml.safe_load_all((DEPLOY / "kubernetes/examples/ascend.yaml").read_text())
    assert (headless["spec"]["clusterIP"], headless["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert stateful["spec"]["serviceName"] == headless["metadata"]["name"]
    template = stateful["spec"]["template"]
    assert headless["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    pod = template["spec"]
    [model] = pod["containers"]
    environment = {entry["name"]: entry for entry in model["env"]}
    # Other pods cannot resolve this pod's name.
    assert environment["EPLB_AGENT_DATA_HOST"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    service = load("kubernetes/base/service.yaml")
    assert environment["EPLB_AGENT_SERVICE"]["value"] == f"{service['metadata']['name']}:{GRPC_PORT}"
    policy = load("kubernetes/base/network.yaml")
    clients = policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    assert clients.items() <= template["metadata"]["labels"].items()
    _, arguments = two_pods()
    ranks, local = (
        int(arguments[arguments.index(name) + 1])
        for name in ("--data-parallel-size", "--data-parallel-size-local")
    )
    devices = int(model["resources"]["limits"]["huawei.com/Ascend910"])
    assert (ranks, local) == (devices * stateful["spec"]["replicas"], devices)
    first = f"{stateful['metadata']['name']}-0.{headless['metadata']['name']}"
    assert arguments[arguments.index("--data-parallel-address") + 1] == first
    assert f"$(({local} * POD_INDEX))" in model["args"][0]
    assert {mount["name"] for mount in model["volumeMounts"]} <= {volume["name"] for volume in pod["volumes"]}
