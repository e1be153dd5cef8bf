"""Tests that unsupported vLLM-Ascend settings are rejected at engine startup, and that the error names them."""

from contextlib import nullcontext

import pytest

from tests.engines.ascend_settings import ascend
from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.adapters.vllm_ascend.refusals import refuse_settings


@pytest.mark.parametrize(
    ("engine", "named"),
    [
        ({}, None),
        ({"release": "0.18.0"}, None),
        ({"device": "A2", "release": "0.23.0.post1"}, None),
        ({"settings": {"enable_fused_mc2": 1}}, "fused MC2"),
        ({"settings": {"mix_placement": True}}, "mix_placement"),
        ({"device": "_310P"}, "MoGE"),
        ({"sleeps": True}, "sleep mode"),
        ({"lora": "some"}, "LoRA"),
        ({"release": "0.18.0", "stages": 2}, "pipeline-parallel-size 2"),
        ({"stages": 2}, "pipeline-parallel-size 2"),
        ({"runner": "pooling"}, "a pooling model"),
        ({"recorded": "map.json"}, "EXPERT_MAP_RECORD"),
        ({"variable": True}, "EXPERT_MAP_RECORD"),
        ({"device": "A2", "ranks": 8, "eplb": {"num_redundant_experts": 8}}, "all-gather dispatch"),
        ({"device": "A2", "tokens": 513, "eplb": {"num_redundant_experts": 16}}, "up to 513 tokens"),
        ({"device": "A2", "tokens": 512, "eplb": {"num_redundant_experts": 16}}, None),
        ({"device": "A2", "ranks": 8}, None),
        ({"device": "A3", "ranks": 8, "eplb": {"num_redundant_experts": 8}}, None),
    ],
    ids=str,
)
def test_unsupported_settings_are_refused_and_the_error_names_them(engine, named, monkeypatch):
    eplb = ascend(monkeypatch, **engine)
    refused = nullcontext() if named is None else pytest.raises(UnsupportedEngineError, match=named)
    with refused:
        refuse_settings(eplb)


def test_settings_of_the_hosts_own_balancer_are_logged_as_ignored(monkeypatch, caplog):
    refuse_settings(ascend(monkeypatch, eplb={"eplb_policy_type": 3, "num_redundant_experts": 8}))
    (message,) = caplog.messages
    assert message.endswith("eplb_policy_type=3")
