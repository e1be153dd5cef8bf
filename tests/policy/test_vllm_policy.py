"""Tests of policy mode in vLLM, with stand-ins for the functions that it wraps."""

import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.adapters.vllm_fakes import modules
from worker_agent.adapters import plugins
from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.policy import vllm as policy
from worker_agent.policy.vllm import PlannerPolicy

RANKS = 2
SLOTS = 3
EXPERTS = 4
LAYERS = 2
WINDOW = 8


class DefaultPolicy:
    """Stand-in for vLLM's own policy. It returns placements that the planner never does."""

    @classmethod
    def rebalance_experts(
        cls, weight, num_replicas, num_groups, num_nodes, num_ranks, old_global_expert_indices=None
    ):
        return torch.full((weight.shape[0], num_replicas), -7)


class EplbState:
    """Stand-in for vLLM's class: it sums the window per logical expert and asks the policy."""

    def __init__(self, **parallel):
        self.parallel_config = SimpleNamespace(**parallel)
        self.model_states = {}
        self.expert_load_window_step = 0
        self.expert_rearrangement_step = 0
        self.expert_rearrangement_step_interval = WINDOW
        self.returned = None
        self.commits = False
        self.is_async = False

    def add_model(self, model, model_config):
        physical = torch.arange(RANKS * SLOTS) % EXPERTS
        self.model_states["model"] = SimpleNamespace(
            model=model,
            physical_to_logical_map=physical.repeat(LAYERS, 1),
            expert_load_window=torch.zeros((WINDOW, LAYERS, RANKS * SLOTS), dtype=torch.int32),
        )
        self.policy = POLICIES["default"]

    def rearrange(self, is_profile=False, rank_mapping=None, use_last_expert_load=False):
        for state in self.model_states.values():
            counts_LP = state.expert_load_window.sum(dim=0).int()
            weight_LE = torch.zeros((LAYERS, EXPERTS), dtype=torch.int32)
            weight_LE.scatter_add_(1, state.physical_to_logical_map, counts_LP)
            if is_profile or use_last_expert_load:
                weight_LE.zero_()
            self.returned = self.policy.rebalance_experts(
                weight_LE, RANKS * SLOTS, 1, 1, RANKS, state.physical_to_logical_map.clone()
            )
            if self.commits:
                state.physical_to_logical_map.copy_(self.returned)


POLICIES = {}


class Worker:
    """Stand-in for vLLM's worker. It records the placement into which it loads weights."""

    loaded_into = None

    def __init__(self, engine):
        self.model_runner = SimpleNamespace(eplb_state=engine)

    def reload_weights(self, path=None):
        states = self.model_runner.eplb_state.model_states
        self.loaded_into = states["model"].physical_to_logical_map.tolist()
        return path


@pytest.fixture
def state(monkeypatch):
    """Return a function that makes the stand-in's state in one process, with policy mode installed."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.group.WORLD
    group = SimpleNamespace(cpu_group=world, device_group=world, rank_in_group=0, world_size=1)
    POLICIES.update(default=DefaultPolicy)
    patched = type("EplbState", (EplbState,), {})
    worker = type("Worker", (Worker,), {})
    modules(
        monkeypatch,
        **{
            "vllm": {"__version__": "0.33.0"},
            "vllm.distributed": {},
            "vllm.v1.worker.gpu_worker": {"Worker": worker},
            "vllm.distributed.eplb": {},
            "vllm.distributed.eplb.eplb_state": {"EplbState": patched},
            "vllm.distributed.eplb.policy": {"EPLB_POLICIES": POLICIES},
            "vllm.distributed.parallel_state": {
                "get_ep_group": lambda: group,
                "get_eplb_group": lambda: group,
            },
        },
    )
    for name, value in (
        ("agreement", None),
        ("fallback", None),
        ("_windows", []),
        ("_leave_to_vllm", False),
        ("_starts", []),
    ):
        monkeypatch.setattr(PlannerPolicy, name, value)
    monkeypatch.setenv("EPLB_AGENT_WINDOW_PARTS", "4")

    def make(**parallel):
        policy.install()
        engine = patched(**parallel)
        engine.worker = worker(engine)
        config = SimpleNamespace(runner_type="generate", compute_hash=lambda: "model")
        engine.add_model(SimpleNamespace(num_logical_experts=EXPERTS, moe_layers=[]), config)
        if PlannerPolicy.agreement is not None:
            assert PlannerPolicy.agreement.wait_until_warm(120)
        return engine

    yield make
    dist.destroy_process_group()


def fill(state, seed=0):
    """Fill the window with steps in which expert 2 has the most tokens, and return its heat by step, ``[T, L, E]``."""
    draw = np.random.default_rng(seed)
    heat_TLE = draw.poisson([2000, 1000, 6000, 1000], size=(WINDOW, LAYERS, EXPERTS))
    window = state.model_states["model"].expert_load_window
    window.zero_()
    # All tokens of an expert are counted in its first slot. Steps start in the middle of the ring.
    state.expert_load_window_step = 3
    for step in range(WINDOW):
        window[(step + 3) % WINDOW, :, :EXPERTS] = torch.from_numpy(heat_TLE[step]).int()
    return heat_TLE


def test_the_planner_decides_on_the_window_in_parts(state, monkeypatch):
    engine = state()
    heat_TLE = fill(engine)
    passed = []
    placement = PlannerPolicy.agreement.placement

    def noting(heat_NLE, old_LP, ranks, **keywords):
        passed.append((heat_NLE, keywords))
        return placement(heat_NLE, old_LP, ranks, **keywords)

    monkeypatch.setattr(PlannerPolicy.agreement, "placement", noting)
    engine.rearrange()
    ((heat_NLE, keywords),) = passed
    assert heat_NLE.tolist() == heat_TLE.reshape(4, 2, LAYERS, EXPERTS).sum(axis=1).tolist()
    assert keywords == {"nodes": 1, "timed": True}
    assert engine.returned.tolist() == [[0, 1, 2, 3, 0, 2]] * LAYERS
    assert engine.returned.dtype == torch.int64


def test_rows_counted_before_the_last_rearrangement_are_left_out(state, monkeypatch):
    engine = state()
    heat_TLE = fill(engine)
    engine.expert_rearrangement_step_interval = WINDOW // 2
    ((total_LE, parts_NLE),) = policy._windows_of(engine, 4)
    assert total_LE.tolist() == heat_TLE.sum(axis=0).tolist()
    assert parts_NLE.tolist() == heat_TLE[WINDOW // 2 :].tolist()


def test_parts_of_a_window_with_a_different_sum_are_not_used(state, monkeypatch):
    """In that case, the planner uses the sum that vLLM passes."""
    engine = state()
    fill(engine)
    engine.rearrange()
    PlannerPolicy._windows = [(total_LE + 1, parts_NLE) for total_LE, parts_NLE in PlannerPolicy._windows]
    passed = []
    monkeypatch.setattr(
        PlannerPolicy.agreement,
        "placement",
        lambda *arguments, **keywords: passed.append((arguments, keywords)),
    )
    weight_LE = torch.tensor([[1, 2, 3, 4]] * LAYERS)
    old_LP = engine.model_states["model"].physical_to_logical_map
    new_LP = PlannerPolicy.rebalance_experts(weight_LE, RANKS * SLOTS, 1, 1, RANKS, old_LP)
    ((arguments, keywords),) = passed
    assert arguments[0].tolist() == [weight_LE.tolist()]
    assert keywords["timed"] is False
    assert (new_LP == -7).all()  # the agreement left the decision to vLLM


def test_a_window_without_tokens_changes_nothing(state):
    engine = state()
    engine.rearrange()
    assert engine.returned.tolist() == engine.model_states["model"].physical_to_logical_map.tolist()


@pytest.mark.parametrize(
    "arguments", [{"is_profile": True}, {"rank_mapping": {0: 0}}, {"use_last_expert_load": True}]
)
def test_vllm_decides_during_profiling_and_elastic_scaling(state, arguments):
    engine = state()
    fill(engine)
    engine.rearrange(**arguments)
    expected = -7 if "use_last_expert_load" not in arguments else None
    if expected is None:  # the loads belong to an earlier placement, and here they are all zero
        assert engine.returned.tolist() == engine.model_states["model"].physical_to_logical_map.tolist()
    else:
        assert (engine.returned == expected).all()
    engine.rearrange()
    assert engine.returned.tolist() == [[0, 1, 2, 3, 0, 2]] * LAYERS


def test_vllm_decides_if_elastic_expert_parallelism_is_enabled(state, caplog):
    engine = state(enable_elastic_ep=True)
    fill(engine)
    engine.rearrange()
    assert (engine.returned == -7).all()
    assert "elastic expert parallelism is enabled" in caplog.text


def test_vllm_decides_if_a_slot_is_empty(state):
    engine = state()
    fill(engine)
    old_LP = engine.model_states["model"].physical_to_logical_map.clone()
    old_LP[0, 5] = -1
    new_LP = PlannerPolicy.rebalance_experts(torch.ones((LAYERS, EXPERTS)), 6, 1, 1, RANKS, old_LP)
    assert (new_LP == -7).all()


def test_counts_that_every_rank_repeats_are_divided_by_the_number_of_ranks():
    heat_NLE = np.array([[[2, 4, 6]]])
    assert policy.without_copies(heat_NLE, 2).tolist() == [[[1, 2, 3]]]
    assert policy.without_copies(heat_NLE + np.array([0, 1, 0]), 2).tolist() == [[[2, 5, 6]]]


def other_parameters(weight, replicas):
    """Stand-in for ``rebalance_experts`` of an unknown release."""


def test_an_unknown_interface_is_refused_before_anything_is_patched(state, monkeypatch):
    POLICIES["default"] = SimpleNamespace(rebalance_experts=other_parameters)
    with pytest.raises(UnsupportedEngineError, match=r"vLLM 0\.33\.0.*takes \(weight, replicas\) instead of"):
        state()
    assert POLICIES["default"].rebalance_experts is other_parameters


def test_the_planners_requirements_are_checked_at_startup(state, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedEngineError, match=r"Install 'eplb-agent\[policy\]'"):
        state()


def test_the_plugin_installs_policy_mode(monkeypatch):
    installed = []
    monkeypatch.setenv("EPLB_AGENT_MODE", "policy")
    monkeypatch.setattr(plugins, "_installed", set())
    monkeypatch.setattr(plugins, "_log_to", lambda engine: None)
    monkeypatch.setattr(plugins.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(policy, "install", lambda: installed.append("vllm"))
    plugins.register_vllm()
    plugins.register_vllm()
    assert installed == ["vllm"]


def test_the_policy_may_be_called_on_a_different_thread(state):
    """As in vLLM's asynchronous EPLB, the window is stored on the model's thread, and the policy has its own thread."""
    engine = state()
    fill(engine)
    returned = []
    ask = engine.policy.rebalance_experts

    class OnAnotherThread:
        @classmethod
        def rebalance_experts(cls, *arguments):
            thread = threading.Thread(target=lambda: returned.append(ask(*arguments)))
            thread.start()
            thread.join()
            return returned[-1]

    engine.policy = OnAnotherThread
    engine.rearrange()
    assert returned[0].tolist() == [[0, 1, 2, 3, 0, 2]] * LAYERS


@pytest.mark.parametrize("name", ["start.json", "start.npz"])
def test_the_engine_starts_from_a_recorded_placement(state, monkeypatch, tmp_path, name):
    start_LP = np.array([[3, 2, 1, 0, 1, 2]] * LAYERS)
    path = tmp_path / name
    if name.endswith("json"):
        path.write_text(json.dumps({"physical_to_logical_map": start_LP.tolist()}))
    else:
        np.savez(path, phy2log=start_LP.reshape(LAYERS, 1, -1))
    monkeypatch.setenv("EPLB_AGENT_INITIAL_PLACEMENT", str(path))
    engine = state()
    assert engine.expert_rearrangement_step == WINDOW - 1
    engine.rearrange(is_profile=True)
    assert (engine.returned == -7).all()
    engine.rearrange()
    assert engine.returned.tolist() == start_LP.tolist()
    fill(engine)
    engine.rearrange()
    assert engine.returned.tolist() == [[0, 1, 2, 3, 0, 2]] * LAYERS


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "cannot be read"), ("{}", "is not a placement"), ('{"physical_to_logical_map": [[0]]}', "slots")],
)
def test_a_file_that_is_not_a_placement_stops_the_engine(state, monkeypatch, tmp_path, text, message):
    path = tmp_path / "start.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("EPLB_AGENT_INITIAL_PLACEMENT", str(path))
    with pytest.raises(ValueError, match=rf"start\.json.*{message}"):
        state()


def moved(state, is_async=False):
    """Return an engine whose EPLB has moved an expert."""
    engine = state()
    engine.commits = True
    fill(engine)
    engine.rearrange()
    engine.is_async = is_async
    assert engine.returned.tolist() == [[0, 1, 2, 3, 0, 2]] * LAYERS
    return engine


def test_experts_return_to_their_initial_slots_before_weights_are_loaded(state):
    engine = moved(state)
    assert engine.worker.reload_weights(path="weights") == "weights"
    assert engine.worker.loaded_into == [[0, 1, 2, 3, 0, 1]] * LAYERS
    fill(engine)
    engine.rearrange()
    assert engine.returned.tolist() == [[0, 1, 2, 3, 0, 2]] * LAYERS


def test_weights_are_not_loaded_over_experts_that_asynchronous_eplb_has_moved(state):
    engine = moved(state, is_async=True)
    with pytest.raises(RuntimeError, match="into the wrong slots; start with --eplb-config"):
        engine.worker.reload_weights()
    assert engine.worker.loaded_into is None


def test_weights_are_not_loaded_if_an_expert_did_not_return(state):
    engine = moved(state)
    engine.commits = False
    with pytest.raises(RuntimeError, match="the experts of model could not be returned"):
        engine.worker.reload_weights()
    assert engine.worker.loaded_into is None


def test_weights_are_loaded_without_moves_if_nothing_has_moved(state):
    engine = state()
    engine.worker.reload_weights()
    assert engine.returned is None
    assert engine.worker.loaded_into == [[0, 1, 2, 3, 0, 1]] * LAYERS
