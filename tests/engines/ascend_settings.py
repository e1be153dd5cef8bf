"""Fake vLLM-Ascend modules with one engine's settings."""

import dataclasses
import types

from tests.adapters.sglang_fakes import put_modules


def ascend(monkeypatch, release="0.30.0rc2", device="A3", stages=1, runner="generate", **engine):
    """Install the fake modules with one engine's settings, and return its EPLB settings."""
    model = types.SimpleNamespace(enable_sleep_mode=engine.get("sleeps", False), runner_type=runner)
    parallel = types.SimpleNamespace(pipeline_parallel_size=stages, rank=0)
    tokens = types.SimpleNamespace(max_num_batched_tokens=engine.get("tokens", 8192))
    config = types.SimpleNamespace(
        model_config=model, parallel_config=parallel, lora_config=engine.get("lora"), scheduler_config=tokens
    )
    capacity = 512 * engine.get("tensor_parallel", 1)

    def choice(step_tokens, _config):
        """Mimic ``select_moe_comm_method``: A2 gathers for few ranks or many tokens, and A3 never gathers."""
        few = engine.get("ranks", 16) < 16 or 256 // engine.get("ranks", 16) > 24
        gathers = device == "A2" and (few or step_tokens > capacity)
        return types.SimpleNamespace(name="ALLGATHER" if gathers else "MC2")

    settings = {"enable_fused_mc2": 0, "mix_placement": False} | engine.get("settings", {})
    xlite = types.SimpleNamespace(enabled=engine.get("xlite", False))
    names = {
        "vllm": {"envs": types.SimpleNamespace(VLLM_USE_V2_MODEL_RUNNER=engine.get("second_runner"))},
        "vllm.config": {"get_current_vllm_config": lambda: config},
        "vllm_ascend": {},
        "vllm_ascend._version": {"__version__": release},
        "vllm_ascend.ascend_forward_context": {"select_moe_comm_method": choice},
        "vllm_ascend.ascend_config": {
            "get_ascend_config": lambda: types.SimpleNamespace(**settings, xlite_graph_config=xlite)
        },
        "vllm_ascend.utils": {"get_ascend_device_type": lambda: types.SimpleNamespace(name=device)},
    }
    put_modules(monkeypatch, names)
    monkeypatch.delenv("EXPERT_MAP_RECORD", raising=False)
    if "variable" in engine:
        monkeypatch.setenv("EXPERT_MAP_RECORD", "true")
    eplb = dict(engine.get("eplb", {}), expert_map_record_path=engine.get("recorded"))
    eplb["expert_map_path"] = engine.get("placed")
    if release.startswith("0.30"):
        return _EplbConfig(**eplb)
    defaults = dataclasses.asdict(_EplbConfig())
    values = defaults | eplb
    return types.SimpleNamespace(config=values, _defaults=defaults, **values)


@dataclasses.dataclass
class _EplbConfig:
    """The EPLB settings of release 0.30. Release 0.23 has them in two dictionaries."""

    dynamic_eplb: bool = False
    num_redundant_experts: int = 0
    eplb_policy_type: int = 1
    algorithm_execution_interval: int = 30
    expert_map_path: str | None = None
    expert_map_record_path: str | None = None
    stair_config: dict[str, int] = dataclasses.field(default_factory=dict)
