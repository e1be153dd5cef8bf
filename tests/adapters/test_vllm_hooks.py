"""What the agent puts in place of vLLM's balancer, and around its calls that change weights, on stand-ins for both."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from worker_agent.adapters.vllm import hooks


def modules(monkeypatch, **named):
    """``vllm``, and modules of it by their full names, with what is in each."""
    found = {
        "vllm": {"__version__": "0.32.0", "envs": SimpleNamespace(VLLM_USE_V2_MODEL_RUNNER=False)},
        **named,
    }
    for name, known in found.items():
        module = ModuleType(name)
        vars(module).update(known)
        monkeypatch.setitem(sys.modules, name, module)


class Host:
    """Records what is asked of the agent's host."""

    def __init__(self, *_):
        self.asked = []

    def __getattr__(self, name):
        def ask(*arguments):
            self.asked.append((name, *arguments))

        return ask


def state_class():
    """As vLLM's ``EplbState``, whose own methods must not be reached but for ``add_model``."""

    class EplbState:
        def __init__(self):
            self.parallel_config = SimpleNamespace(enable_elastic_ep=False)
            self.model_states, self.is_async = {}, True
            self.should_record_tensor = torch.zeros((), dtype=torch.bool)

        def add_model(self, model, model_config, model_name=None):
            counts = torch.ones((2, 4), dtype=torch.int32)
            self.model_states[model_config.compute_hash()] = SimpleNamespace(
                expert_load_pass=counts, model=model
            )

        def step(self, *_, **__):
            raise AssertionError("vLLM's own balancer steps")

        rearrange = start_async_loop = step

    return EplbState


def config(runner):
    return SimpleNamespace(runner_type=runner, compute_hash=lambda: runner)


@pytest.fixture
def state(monkeypatch):
    """One that the agent has taken over, with a draft model added before the model itself, as vLLM does."""
    found = state_class()
    modules(
        monkeypatch,
        **{
            "vllm.distributed.eplb.eplb_state": {"EplbState": found},
            "vllm.distributed.parallel_state": {"get_ep_group": lambda: "the ranks"},
        },
    )
    monkeypatch.setattr(hooks, "VllmHost", Host)
    hooks._replace_balancer()
    made = found()
    made.add_model("draft", config("draft"), model_name="draft")
    assert not hasattr(made, "eplb_agent_host")
    made.add_model("target", config("generate"))
    return made


def test_a_draft_model_keeps_its_placement_and_the_model_is_balanced(state):
    assert isinstance(state.eplb_agent_host, Host)
    assert set(state.model_states) == {"draft", "generate"}
    assert state.is_async is False


def test_every_pass_is_a_step_but_those_of_profiling_and_counts_begin_again(state):
    state.step(is_profile=True)
    state.step(is_dummy=True)
    state.step(log_stats=True)
    assert state.eplb_agent_host.asked == [("confirm_dispatch",), ("step", True), ("step", False)]
    assert all(not one.expert_load_pass.any() for one in state.model_states.values())
    assert bool(state.should_record_tensor)


def test_vllm_s_own_rearranging_is_off_and_nobody_may_ask_for_it(state):
    state.start_async_loop()
    with pytest.raises(RuntimeError, match="elastic expert parallelism is not supported"):
        state.rearrange()


CALLS = {
    "sleep": (["drain"], ["drain", "resume"]),
    "wake_up": (["resume"], []),
    "reload_weights": (["restore", "resume"], ["restore", "resume"]),
    "start_weight_update": (["restore"], ["restore", "resume"]),
    "update_weights": ([], ["resume"]),
    "finish_weight_update": (["resume"], ["resume"]),
}
"""Calls of vLLM's worker, and what is asked of the host around each: where it returns, and where it raises."""


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_under_way_while_an_engine_sleeps_or_loads_weights(call, fails, monkeypatch):
    host = Host()

    class Worker:
        model_runner = SimpleNamespace(eplb_state=SimpleNamespace(eplb_agent_host=host))

    def done(_self):
        host.asked.append(("vLLM",))
        if fails:
            raise OSError("no room")
        return "done"

    for name in CALLS:
        setattr(Worker, name, done)
    modules(monkeypatch, **{"vllm.v1.worker.gpu_worker": {"Worker": Worker}})
    monkeypatch.setattr(hooks, "VllmHost", Host)
    for name in ("restore", "resume"):
        monkeypatch.setattr(Host, name, lambda self, name=name: self.asked.append((name,)), raising=False)
    hooks._guard_weights()
    if fails:
        with pytest.raises(OSError, match="no room"):
            getattr(Worker(), call)()
    else:
        assert getattr(Worker(), call)() == "done"
    asked = [name for name, *_ in host.asked]
    assert [name for name in asked if name != "vLLM"] == CALLS[call][fails]
    before = {"drain", "restore"}
    assert set(asked[: asked.index("vLLM")]) <= before
    assert not before & set(asked[asked.index("vLLM") :])
