"""Settings of vLLM-Ascend that do not go with the agent are refused while the engine starts, each with its name."""

import sys
import types

import pytest

from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.adapters.vllm_ascend.refusals import refuse_settings


def ascend(
    monkeypatch, release="0.23.0", device="A3", settings=None, stages=1, runner="generate", sleeps=False
):
    """The modules that are asked, with one engine's settings."""
    model = types.SimpleNamespace(enable_sleep_mode=sleeps, runner_type=runner)
    parallel = types.SimpleNamespace(pipeline_parallel_size=stages)
    config = types.SimpleNamespace(model_config=model, parallel_config=parallel)
    names = {
        "vllm": {},
        "vllm.config": {"get_current_vllm_config": lambda: config},
        "vllm_ascend": {"envs": types.SimpleNamespace(VLLM_ASCEND_ENABLE_FUSED_MC2=0)},
        "vllm_ascend._version": {"__version__": release},
        "vllm_ascend.ascend_config": {"get_ascend_config": lambda: types.SimpleNamespace(**(settings or {}))},
        "vllm_ascend.utils": {"get_ascend_device_type": lambda: types.SimpleNamespace(name=device)},
    }
    for name, known in names.items():
        module = types.ModuleType(name)
        vars(module).update(known)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("EXPERT_MAP_RECORD", raising=False)


PLAIN = types.SimpleNamespace(expert_map_record_path=None)


@pytest.mark.parametrize(
    "engine", [{}, {"release": "0.18.0"}, {"stages": 2}, {"device": "A2", "release": "0.23.0.post1"}], ids=str
)
def test_what_goes_with_the_agent_is_let_through(engine, monkeypatch):
    ascend(monkeypatch, **engine)
    refuse_settings(PLAIN)


@pytest.mark.parametrize(
    ("engine", "named"),
    [
        ({"settings": {"enable_fused_mc2": 1}}, "fused MC2"),
        ({"settings": {"mix_placement": True}}, "mix_placement"),
        ({"device": "_310P"}, "MoGE"),
        ({"sleeps": True}, "sleep mode"),
        ({"release": "0.18.0", "stages": 2}, "pipeline parallelism in vLLM-Ascend 0.18"),
        ({"runner": "pooling"}, "a pooling model"),
    ],
    ids=str,
)
def test_what_does_not_is_refused_by_its_name(engine, named, monkeypatch):
    ascend(monkeypatch, **engine)
    with pytest.raises(UnsupportedEngineError, match=named):
        refuse_settings(PLAIN)


@pytest.mark.parametrize("by_variable", [False, True])
def test_recording_of_maps_is_refused(by_variable, monkeypatch):
    ascend(monkeypatch)
    if by_variable:
        monkeypatch.setenv("EXPERT_MAP_RECORD", "true")
    path = None if by_variable else "map.json"
    with pytest.raises(UnsupportedEngineError, match="EXPERT_MAP_RECORD"):
        refuse_settings(types.SimpleNamespace(expert_map_record_path=path))
