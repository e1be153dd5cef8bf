"""Tests that vLLM-Ascend refuses to load weights in policy mode as soon as its EPLB exists."""

import types

import pytest

from tests.adapters.sglang_fakes import put_modules
from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.policy.vllm_ascend.loading import refuse_loading
from worker_agent.settings import AgentSettings


@pytest.fixture
def engine(monkeypatch):
    """Return the classes of a fake engine, and its options."""

    class Worker:
        def sleep(self, level=1):
            return f"asleep at level {level}"

        def start_weight_update(self, is_checkpoint_format=True):
            return is_checkpoint_format

        def update_weights(self, update_info):
            return update_info

        def execute_model(self):
            return "served"

    class Runner:
        def reload_weights(self, path=None):
            return path

    options = types.SimpleNamespace(
        load_config=types.SimpleNamespace(load_format="auto"),
        parallel_config=types.SimpleNamespace(enable_eplb=True),
    )
    put_modules(
        monkeypatch,
        {
            **{name: {} for name in ("vllm", "vllm_ascend", "vllm_ascend.worker", "vllm_ascend.worker.v2")},
            "vllm.config": {"get_current_vllm_config": lambda: options},
            "vllm.distributed": {"get_eplb_group": lambda: pytest.fail("there is no group without EPLB")},
            "vllm_ascend.worker.worker": {"NPUWorker": Worker},
            "vllm_ascend.worker.v2.model_runner": {"NPUModelRunner": Runner},
        },
    )
    return types.SimpleNamespace(worker=Worker, runner=Runner, options=options)


def test_every_way_to_load_weights_fails_and_the_error_names_the_remedy(engine):
    refuse_loading(engine.runner)
    worker = engine.worker()
    for load in (
        lambda: engine.runner().reload_weights(path="weights"),
        lambda: worker.start_weight_update(is_checkpoint_format=False),
        lambda: worker.update_weights({"names": []}),
    ):
        with pytest.raises(RuntimeError, match="restart the engine to load weights, or start it without"):
            load()
    assert worker.execute_model() == "served"


def test_sleep_is_refused_only_if_it_discards_the_weights(engine):
    refuse_loading(engine.runner)
    worker = engine.worker()
    assert worker.sleep() == worker.sleep(level=1) == "asleep at level 1"
    with pytest.raises(RuntimeError, match=r"level 2 discards the weights.*call wake_up to continue"):
        worker.sleep(level=2)


def test_an_engine_that_would_send_moved_experts_to_other_engines_does_not_start(engine):
    engine.options.load_config.load_format = "netloader"
    with pytest.raises(UnsupportedEngineError, match="slots to which EPLB has moved them"):
        refuse_loading(engine.runner)


def test_the_second_runner_serves_and_loads_weights_as_before_if_its_eplb_is_off(engine):
    from worker_agent.policy.vllm_ascend.second_runner import _with_planner

    engine.options.parallel_config.enable_eplb = False
    assert _with_planner("default policy", AgentSettings()) == "default policy"
    assert engine.runner().reload_weights(path="weights") == "weights"
