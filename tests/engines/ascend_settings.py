"""Fake vLLM-Ascend modules with one engine's settings."""

import types

from tests.adapters.sglang_fakes import put_modules


def ascend(monkeypatch, release="0.23.0", device="A3", stages=1, runner="generate", **engine):
    """Install the fake modules with one engine's settings, and return its EPLB settings."""
    model = types.SimpleNamespace(enable_sleep_mode=engine.get("sleeps", False), runner_type=runner)
    parallel = types.SimpleNamespace(pipeline_parallel_size=stages, rank=0)
    tokens = types.SimpleNamespace(max_num_batched_tokens=engine.get("tokens", 8192))
    config = types.SimpleNamespace(
        model_config=model, parallel_config=parallel, lora_config=engine.get("lora"), scheduler_config=tokens
    )
    capacity = 512 * engine.get("tensor_parallel", 1)

    def choice(step_tokens, _config):
        """Mimic ``select_moe_comm_method`` of 0.23: A2 gathers for few ranks or many tokens, and A3 never gathers."""
        few = engine.get("ranks", 16) < 16 or 256 // engine.get("ranks", 16) > 24
        gathers = device == "A2" and (few or step_tokens > capacity)
        return types.SimpleNamespace(name="ALLGATHER" if gathers else "MC2")

    names = {
        "vllm": {},
        "vllm.config": {"get_current_vllm_config": lambda: config},
        "vllm_ascend": {"envs": types.SimpleNamespace(VLLM_ASCEND_ENABLE_FUSED_MC2=0)},
        "vllm_ascend._version": {"__version__": release},
        "vllm_ascend.ascend_forward_context": {"select_moe_comm_method": choice},
        "vllm_ascend.ascend_config": {
            "get_ascend_config": lambda: types.SimpleNamespace(**engine.get("settings", {}))
        },
        "vllm_ascend.utils": {"get_ascend_device_type": lambda: types.SimpleNamespace(name=device)},
    }
    put_modules(monkeypatch, names)
    monkeypatch.delenv("EXPERT_MAP_RECORD", raising=False)
    if "variable" in engine:
        monkeypatch.setenv("EXPERT_MAP_RECORD", "true")
    defaults = {"num_redundant_experts": 0, "eplb_policy_type": 1, "algorithm_execution_interval": 30}
    return types.SimpleNamespace(
        num_redundant_experts=(defaults | engine.get("eplb", {}))["num_redundant_experts"],
        expert_map_record_path=engine.get("recorded"),
        config=defaults | engine.get("eplb", {}),
        _defaults=defaults,
    )
