"""Tests of policy mode in SGLang, with stand-ins for its configuration and its hook registry."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.adapters.sglang_fakes import put_modules
from worker_agent.adapters import plugins
from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.policy import sglang as policy

OLD = [[0, 1, 2, 3, 0, 1]]
NEW = [[0, 1, 2, 3, 0, 2]]


def sglangs_algorithm(
    tokens_per_expert, num_physical_experts, num_local_physical_experts, num_groups, num_nodes, algorithm
):
    """Stand-in for SGLang's function."""
    return "SGLang's own"


@pytest.fixture
def sglang(monkeypatch):
    """Install policy mode into stand-ins, and return them."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    registered = {}
    hook_type = SimpleNamespace(AROUND="around", AFTER="after")

    class HookRegistry:
        _patched: set[str] = set()  # noqa: RUF012

        @classmethod
        def register(cls, target, hook, kind):
            registered[target] = (hook, kind)
            cls._patched.add(target)

    moe = SimpleNamespace(elastic_ep_backend=None, ep_dispatch_algorithm="dynamic", moe_a2a_backend="none")
    old_LP = torch.tensor(OLD)
    metadata = SimpleNamespace(physical_to_logical_map=old_LP, physical_to_logical_map_cpu=old_LP)
    fakes = SimpleNamespace(registered=registered, registry=HookRegistry, moe=moe, metadata=metadata)
    parallel = SimpleNamespace(tp_group=SimpleNamespace(cpu_group=dist.group.WORLD))
    algorithms = SimpleNamespace(rebalance_experts=sglangs_algorithm)
    put_modules(
        monkeypatch,
        {
            "sglang": {},
            "sglang.version": {"__version__": "0.5.23"},
            "sglang.srt": {},
            "sglang.srt.eplb": {"eplb_algorithms": algorithms},
            "sglang.srt.eplb.expert_location": {
                "get_global_expert_location_metadata": lambda: fakes.metadata
            },
            "sglang.srt.plugins": {},
            "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": hook_type},
            "sglang.srt.runtime_context": {
                "get_exec": lambda: SimpleNamespace(moe=moe),
                "get_parallel": lambda: parallel,
            },
        },
    )
    fakes.algorithms = algorithms
    monkeypatch.setattr(policy, "_agreements", [])
    monkeypatch.setattr(plugins, "_installed", set())
    monkeypatch.setenv("EPLB_AGENT_MODE", "policy")
    yield fakes
    dist.destroy_process_group()


def start(fakes):
    """Let SGLang load the plugin and create its EPLB manager; return the hooked algorithm."""
    plugins.register_sglang()
    hook, kind = fakes.registered[policy._ALGORITHM]
    assert kind == "around"
    joined, kind = fakes.registered[policy._MANAGER]
    assert kind == "after"
    joined(None)
    for agreement in policy._agreements:
        assert agreement.wait_until_warm(120)

    def rebalance(heat_TLE):
        return hook(
            sglangs_algorithm,
            tokens_per_expert=torch.as_tensor(heat_TLE),
            num_physical_experts=6,
            num_local_physical_experts=3,
            num_groups=None,
            num_nodes=1,
            algorithm="deepseek",
        )

    return rebalance


HEAT = np.tile([2000, 1000, 6000, 1000], (100, 1, 1))


def test_the_planner_decides_and_returns_all_maps(sglang):
    phy2log_LP, log2phy_LEX, count_LE = start(sglang)(HEAT)
    assert phy2log_LP.tolist() == NEW
    assert log2phy_LEX.tolist() == [[[0, 4], [1, -1], [2, 5], [3, -1]]]
    assert count_LE.tolist() == [[2, 1, 2, 1]]


def test_the_window_is_passed_in_parts(sglang, monkeypatch):
    monkeypatch.setenv("EPLB_AGENT_WINDOW_PARTS", "8")
    rebalance = start(sglang)
    passed = []
    monkeypatch.setattr(
        policy._agreements[0], "placement", lambda heat_NLE, *_, **__: passed.append(heat_NLE.copy())
    )
    assert rebalance(HEAT + np.arange(100)[:, None, None]) == "SGLang's own"
    (heat_NLE,) = passed
    assert heat_NLE.shape == (8, 1, 4)
    assert heat_NLE.sum() == 4 * np.arange(100).sum() + HEAT.sum()


def test_sglang_decides_if_it_has_no_tokens_or_no_placement_yet(sglang):
    rebalance = start(sglang)
    assert rebalance(np.zeros_like(HEAT)) == "SGLang's own"
    sglang.metadata = None
    assert rebalance(HEAT) == "SGLang's own"


@pytest.mark.parametrize("old", [[[0, 1, 2, 3, -1, 1]], [[0, 1, 2, 3]]])
def test_sglang_decides_if_its_placement_is_being_scaled(sglang, old):
    rebalance = start(sglang)
    sglang.metadata.physical_to_logical_map_cpu = torch.tensor(old)
    assert rebalance(HEAT) == "SGLang's own"


def test_sglang_decides_if_elastic_expert_parallelism_is_enabled(sglang, caplog):
    """After scaling, only the first rank would decide, so the ranks could not agree."""
    sglang.moe.elastic_ep_backend = "nixl"
    assert start(sglang)(HEAT) == "SGLang's own"
    assert "elastic expert parallelism is enabled" in caplog.text


@pytest.mark.parametrize(("dispatch", "split"), [("static", "tables"), ("dynamic", "even")])
def test_the_planner_knows_the_split(sglang, dispatch, split):
    sglang.moe.ep_dispatch_algorithm = dispatch
    start(sglang)
    (agreement,) = policy._agreements
    assert agreement._split == split


def test_an_unknown_interface_stops_the_engine(sglang):
    sglang.algorithms.rebalance_experts = lambda weight: None
    with pytest.raises(SystemExit, match=r"SGLang 0\.5\.23.*take \(weight\) instead of"):
        plugins.register_sglang()
    assert sglang.registered == {}


def test_a_hook_that_was_not_applied_stops_the_engine(sglang):
    plugins.register_sglang()
    sglang.registry._patched.discard(policy._ALGORITHM)
    with pytest.raises(UnsupportedEngineError, match="did not apply the hook"):
        policy._join(None)


@pytest.mark.parametrize("release", ["0.5.21", "0.5.22.post1"])
def test_releases_whose_own_eplb_is_faulty_need_an_all_to_all_backend(sglang, monkeypatch, release):
    monkeypatch.setattr(policy, "_release", lambda: release)
    with pytest.raises(UnsupportedEngineError, match="every move changes the model's output"):
        start(sglang)
    sglang.moe.moe_a2a_backend = "deepep"
    plugins._installed.clear()
    assert start(sglang)(HEAT)[0].tolist() == NEW
