"""Tests of the prototypes for EPLB interfaces that are proposed for vLLM, against the interfaces as published."""

import importlib
import sys
import types
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.adapters.sglang_fakes import put_modules
from worker_agent.policy.vllm import PlannerPolicy

OLD = torch.tensor([[0, 1, 2, 3, 0, 1]])
NEW = np.array([[0, 1, 2, 3, 0, 2]])


class Agreement:
    """An agreement that records its arguments and returns ``result``."""

    result = NEW
    arguments = ()

    def __init__(self, group, split, remote):
        assert remote is None
        self.group = group
        self.split = split

    def placement(self, heat_NLE, old_LP, ranks, **options):
        Agreement.arguments = (heat_NLE.tolist(), old_LP.tolist(), ranks, options)
        return self.result

    def wait_until_warm(self):
        return True


class DefaultEplbPolicy:
    """vLLM's own policy in either interface: its plan is the reversed placement."""

    @classmethod
    def rebalance_experts(
        cls, weight, num_replicas, num_groups, num_nodes, num_ranks, old_global_expert_indices=None
    ):
        return old_global_expert_indices.flip(1)

    def plan_rebalance(self, context, *_state):
        return EplbPlan(context.physical_to_logical_map_cpu.flip(1))


@dataclass(frozen=True)
class EplbPlan:
    physical_to_logical_map: torch.Tensor


class AbstractEplbPolicy:
    """The base class of vllm-project/vllm#49700 with the only hook that has a default implementation."""

    def on_layer_committed(self, policy_state, plan, layer_idx):
        return None


class EplbConnectorBase:
    """The base class of the fork, with the attributes that its constructor sets."""

    def __init__(self, eplb_config):
        self.eplb_config = eplb_config
        self.routing = None


class EplbState:
    """vLLM's EPLB state, which calls the connector's policy."""

    def rearrange(self, is_profile=False, rank_mapping=None):
        return "rearranged"


@pytest.fixture
def fork(monkeypatch):
    """Install fakes of the fork's modules, and return its policies."""
    policies = {"default": DefaultEplbPolicy}
    group = types.SimpleNamespace(cpu_group="group")
    put_modules(
        monkeypatch,
        {
            "vllm": {"__version__": "0.27.0"},
            "vllm.distributed": {},
            "vllm.distributed.parallel_state": {"get_eplb_group": lambda: group},
            "vllm.distributed.eplb": {},
            "vllm.distributed.eplb.connector": {"EplbConnectorBase": EplbConnectorBase},
            "vllm.distributed.eplb.eplb_state": {"EplbState": type("EplbState", (EplbState,), {})},
            "vllm.distributed.eplb.policy": {
                "EPLB_POLICIES": policies,
                "AbstractEplbPolicy": AbstractEplbPolicy,
                "EplbPlan": EplbPlan,
            },
        },
    )
    for attribute in ("fallback", "agreement"):
        monkeypatch.setattr(PlannerPolicy, attribute, None)
    for name in ("mlb", "vllm_49700"):
        monkeypatch.delitem(sys.modules, f"worker_agent.policy.connectors.{name}", raising=False)
    return policies


def connector_module(monkeypatch):
    """Import the module that ``connector_module_path`` names, with a fake agreement."""
    module = importlib.import_module("worker_agent.policy.connectors.mlb")
    monkeypatch.setattr(module, "Agreement", Agreement)
    return module


def test_the_fork_can_load_the_connector_and_gets_the_planners_policy(fork, monkeypatch):
    connector_class = connector_module(monkeypatch).PlannerConnector
    assert issubclass(connector_class, EplbConnectorBase)
    policy = connector_class.placement_policy(None)
    connector = connector_class("config")
    assert connector.eplb_config == "config"
    assert connector.bind_routing(ep_size=2, ep_rank=0, rearranges=True) is None
    assert (policy.agreement.group, policy.agreement.split) == ("group", "even")
    weight = torch.tensor([[2000, 1000, 6000, 1001]])
    assert policy.rebalance_experts(weight, 6, 1, 1, 2, OLD).tolist() == NEW.tolist()
    assert Agreement.arguments == ([weight.tolist()], OLD.tolist(), 2, {"nodes": 1, "timed": False})
    assert fork["default"] is DefaultEplbPolicy


def test_the_forks_own_policy_decides_until_the_ranks_have_joined(fork, monkeypatch):
    policy = connector_module(monkeypatch).PlannerConnector.placement_policy(None)
    weight = torch.ones(1, 4, dtype=torch.int64)
    assert policy.rebalance_experts(weight, 6, 1, 1, 2, OLD).tolist() == OLD.flip(1).tolist()


@pytest.mark.usefixtures("fork")
def test_the_connector_passes_the_window_in_parts(monkeypatch):
    state = sys.modules["vllm.distributed.eplb.eplb_state"].EplbState
    module = connector_module(monkeypatch)
    module.PlannerConnector("config")
    parts = []
    monkeypatch.setattr(
        "worker_agent.policy.vllm._windows_of", lambda _state, number: parts.append(number) or []
    )
    assert state().rearrange() == "rearranged"
    assert parts == [64]


def context(**changes):
    """Return a context of the proposed ``plan_rebalance``: 15 steps with equal heat."""
    facts = {
        "load_window_cpu": torch.tensor([[[2000, 1000, 6000, 1001]]]).repeat(15, 1, 1),
        "physical_to_logical_map_cpu": OLD,
        "topology": types.SimpleNamespace(num_groups=1, num_nodes=1, num_ranks=2),
        "num_replicas": 6,
        "cpu_group": "group",
    }
    return types.SimpleNamespace(**(facts | changes))


def proposed(policies, monkeypatch):
    """Return a policy in the same way as the proposal's ``EplbState.create_policy``."""
    module = importlib.import_module("worker_agent.policy.connectors.vllm_49700")
    monkeypatch.setattr(module, "Agreement", Agreement)
    module.install()
    module.install()
    return policies["default"]()


@pytest.mark.parametrize("state", [(), ("state",)], ids=["without-state", "with-state"])
def test_the_proposed_hook_passes_every_step_to_the_planner(state, fork, monkeypatch):
    monkeypatch.setenv("EPLB_AGENT_WINDOW_PARTS", "5")
    policy = proposed(fork, monkeypatch)
    plan = policy.plan_rebalance(context(), *state)
    assert isinstance(plan, EplbPlan)
    assert plan.physical_to_logical_map.tolist() == NEW.tolist()
    heat_NLE, old_LP, ranks, options = Agreement.arguments
    assert heat_NLE == [[[6000, 3000, 18000, 3003]]] * 5
    assert (old_LP, ranks, options) == (OLD.tolist(), 2, {"nodes": 1, "timed": True})
    assert policy.on_layer_committed(*(state or (None,)), plan, 0) is None


@pytest.mark.parametrize("reason", ["no decision", "empty slot"])
def test_vllms_policy_decides_if_the_planner_cannot(reason, fork, monkeypatch):
    policy = proposed(fork, monkeypatch)
    old = OLD.clone()
    if reason == "empty slot":
        old[0, 5] = -1
    else:
        monkeypatch.setattr(Agreement, "result", None)
    plan = policy.plan_rebalance(context(physical_to_logical_map_cpu=old), "state")
    assert plan.physical_to_logical_map.tolist() == old.flip(1).tolist()
