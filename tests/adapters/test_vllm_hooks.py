"""The patches to vLLM: its balancer, model loading, and calls that change weights."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tests.adapters.vllm_fakes import EplbConfig, modules, vllm_config
from worker_agent.adapters import plugins
from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.adapters.vllm import hooks

VLLM = {"__version__": "0.32.0", "envs": SimpleNamespace(VLLM_USE_V2_MODEL_RUNNER=False)}


@pytest.mark.parametrize(
    ("release", "second_runner", "settings", "lora", "reason"),
    [
        ("0.23.0", True, {}, None, "second model runner of vLLM 0.23"),
        ("0.32.0", False, {"enable_elastic_ep": True}, None, "elastic expert parallelism"),
        ("0.32.0", False, {"pipeline_parallel_size": 2}, None, "--pipeline-parallel-size 2.*its own"),
        ("0.32.0", False, {}, "some", "LoRA .*stay behind"),
        ("0.23.0", False, {}, None, None),
        ("0.32.0", True, {}, None, None),
    ],
)
def test_unsupported_settings_are_rejected(release, second_runner, settings, lora, reason, monkeypatch):
    envs = SimpleNamespace(VLLM_USE_V2_MODEL_RUNNER=second_runner)
    modules(monkeypatch, vllm={"__version__": release, "envs": envs})
    with nullcontext() if reason is None else pytest.raises(UnsupportedEngineError, match=reason):
        hooks.refuse_settings(vllm_config(lora, **settings))


class GptOssForCausalLM:
    """Model class without EPLB support in vLLM."""


@pytest.fixture
def load(monkeypatch):
    """Return a function that loads a model in a hooked worker, either with the agent's host or without EPLB support."""

    class Worker:
        rank = 0

        def load_model(self, *, load_dummy_weights=False):
            self.model_runner = SimpleNamespace(
                get_model=GptOssForCausalLM, eplb_state=SimpleNamespace(eplb_agent_host=self.host)
            )
            return "loaded"

    modules(monkeypatch, **{"vllm.v1.worker.gpu_worker": {"Worker": Worker}})
    hooks._watch_loading()

    def loaded(host, **settings):
        worker = Worker()
        worker.host = host
        worker.vllm_config = vllm_config(**settings)
        assert worker.load_model(load_dummy_weights=True) == "loaded"

    return loaded


def test_a_model_that_vllm_cannot_balance_is_named_in_the_log(load, caplog):
    load(None)
    (message,) = caplog.messages
    assert message.startswith("GptOssForCausalLM is NOT balanced")
    caplog.clear()
    load(None, enable_eplb=False)
    load("a host")
    assert caplog.messages == []


def test_settings_that_the_agent_ignores_are_named_in_the_log(load, caplog):
    load("a host", eplb_config=EplbConfig(4, 50, True, "torch_gloo"))
    (message,) = caplog.messages
    assert message.endswith(": step_interval=50, log_balancedness=True")


def test_settings_are_rejected_before_weights_are_loaded(load):
    with pytest.raises(UnsupportedEngineError, match="pipeline parallelism"):
        load("a host", pipeline_parallel_size=2)


def test_an_unknown_release_is_rejected_and_not_patched(monkeypatch):
    eplb_state = state_class()
    step = eplb_state.step
    monkeypatch.setenv("EPLB_AGENT_SERVICE", "eplb:50551")
    monkeypatch.setattr(plugins, "_log_to", lambda _: None)
    eplb = {"EplbState": eplb_state}
    modules(monkeypatch, vllm={"__version__": "9.9.0"}, **{"vllm.distributed.eplb.eplb_state": eplb})
    with pytest.raises(UnsupportedEngineError, match=r"vLLM 9\.9\.0.*0\.32"):
        plugins.register_vllm()
    assert eplb_state.step is step


class Host:
    """Host that records its calls."""

    def __init__(self, *_, is_pooling=False):
        self.calls = []
        self.is_pooling = is_pooling

    def __getattr__(self, name):
        def record(*arguments):
            self.calls.append((name, *arguments))

        return record


def state_class():
    """Return a fake ``EplbState`` of which only ``add_model`` may be called."""

    class EplbState:
        def __init__(self):
            self.parallel_config = SimpleNamespace(enable_elastic_ep=False)
            self.model_states = {}
            self.is_async = True
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


def model_config(runner):
    return SimpleNamespace(runner_type=runner, compute_hash=lambda: runner)


@pytest.fixture
def state(monkeypatch):
    """Return a patched state to which, as in vLLM, a draft model was added before the target model."""
    eplb_state = state_class()
    ranks = {"vllm.distributed.parallel_state": {"get_ep_group": lambda: "the ranks"}}
    modules(monkeypatch, **{"vllm.distributed.eplb.eplb_state": {"EplbState": eplb_state}}, **ranks)
    monkeypatch.setattr(hooks, "VllmHost", Host)
    hooks._replace_balancer()
    patched = eplb_state()
    patched.add_model("draft", model_config("draft"), model_name="draft")
    assert not hasattr(patched, "eplb_agent_host")
    patched.add_model("target", model_config("generate"))
    return patched


def test_the_host_knows_whether_vllm_runs_the_model_for_pooling(state):
    assert not state.eplb_agent_host.is_pooling
    state.add_model("the MoE part of a multimodal model", model_config("pooling"))
    assert state.eplb_agent_host.is_pooling


def test_every_pass_except_profiling_is_a_step_and_clears_the_counts(state):
    # The draft model keeps its placement; only the target model is balanced.
    assert set(state.model_states) == {"draft", "generate"}
    assert state.is_async is False
    state.step(is_profile=True)
    state.step(is_dummy=True)
    state.step(log_stats=True)
    assert state.eplb_agent_host.calls == [("confirm_dispatch",), ("step", True), ("step", False)]
    assert all(not model.expert_load_pass.any() for model in state.model_states.values())
    assert bool(state.should_record_tensor)


def test_vllms_own_rearrangement_is_disabled(state):
    state.start_async_loop()
    with pytest.raises(RuntimeError, match="elastic expert parallelism is not supported"):
        state.rearrange()


CALLS = {
    "compile_or_warm_up_model": (
        "set_warming_up vLLM set_warming_up",
        "set_warming_up vLLM set_warming_up",
    ),
    "sleep": ("keep_other_tables drain vLLM", "keep_other_tables drain vLLM resume_after_failure"),
    "wake_up": ("vLLM resume", "vLLM"),
    "reload_weights": ("restore vLLM resume", "restore vLLM resume"),
    "start_weight_update": ("restore vLLM", "restore vLLM resume"),
    "update_weights": ("vLLM", "vLLM resume"),
    "finish_weight_update": ("vLLM resume", "vLLM resume"),
}
"""Host calls around each call to vLLM's worker, both when the worker's call returns and when it raises."""


def runner_of(host):
    """Return a model runner with a draft model and a target model that ``host`` balances."""
    record = torch.zeros((), dtype=torch.bool)
    state = SimpleNamespace(
        eplb_agent_host=host, model_states={"draft": "its state"}, should_record_tensor=record
    )
    return SimpleNamespace(eplb_state=state)


@pytest.mark.parametrize(
    ("tags", "options", "restored"),
    [((), {}, True), (([],), {}, False), ((["kv_cache"],), {}, False), ((), {"tags": ["weights"]}, True)],
)
def test_tables_are_written_after_their_memory_is_restored(tags, options, restored, monkeypatch):
    host = Host()

    class Worker:
        model_runner = runner_of(host)

        def wake_up(self, tags=None):
            host.calls.append(("vLLM", tags))

    for name in (*CALLS, "execute_model"):
        setattr(Worker, name, getattr(Worker, name, Worker.wake_up))
    modules(monkeypatch, **{"vllm.v1.worker.gpu_worker": {"Worker": Worker}})
    hooks._hook_worker()
    Worker().wake_up(*tags, **options)
    assert ("resume" in dict.fromkeys(name for name, *_ in host.calls)) is restored
    assert bool(Worker.model_runner.eplb_state.should_record_tensor) is restored


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_the_host_is_called_around_sleeps_and_weight_loads(call, fails, monkeypatch):
    host = Host()

    class Worker:
        model_runner = runner_of(host)

    def done(_self):
        host.calls.append(("vLLM",))
        if fails:
            raise OSError("no room")
        return "done"

    for name in (*CALLS, "execute_model"):
        setattr(Worker, name, done)
    modules(monkeypatch, **{"vllm.v1.worker.gpu_worker": {"Worker": Worker}})
    hooks._hook_worker()
    with pytest.raises(OSError, match="no room") if fails else nullcontext():
        assert getattr(Worker(), call)() == "done"
    assert " ".join(name for name, *_ in host.calls) == CALLS[call][fails]


def test_the_host_stores_each_batch_before_it_runs(monkeypatch):
    host = Host()

    class Worker:
        model_runner = runner_of(host)

        def execute_model(self, scheduler_output):
            host.calls.append(("vLLM", scheduler_output))
            return "tokens"

    for name in CALLS:
        setattr(Worker, name, Worker.execute_model)
    modules(monkeypatch, **{"vllm.v1.worker.gpu_worker": {"Worker": Worker}})
    hooks._hook_worker()
    assert Worker().execute_model(scheduler_output="schedule") == "tokens"
    assert host.calls == [("note_batch", "schedule"), ("vLLM", "schedule")]
    Worker.model_runner = SimpleNamespace(eplb_state=None)
    assert Worker().execute_model("schedule") == "tokens"
