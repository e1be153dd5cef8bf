"""Tests that unsupported vLLM-Ascend settings are rejected at engine startup, and that the error names them."""

from contextlib import nullcontext

import pytest

from tests.engines.ascend_settings import ascend
from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.adapters.vllm_ascend.refusals import refuse_second_runner, refuse_settings


@pytest.mark.parametrize(
    ("engine", "named"),
    [
        ({}, None),
        ({"release": "0.23.0.post1"}, None),
        ({"device": "A2", "release": "0.23.0.post1"}, None),
        ({"settings": {"enable_fused_mc2": 1}}, "fused MC2"),
        ({"settings": {"mix_placement": True}}, "mix_placement"),
        ({"xlite": True}, "xlite graphs"),
        ({"placed": "map.json"}, "expert_map_path in release 0.30"),
        ({"release": "0.23.0", "placed": "map.json"}, None),
        ({"device": "_310P"}, "MoGE"),
        ({"sleeps": True}, "sleep mode"),
        ({"lora": "some"}, "LoRA"),
        ({"release": "0.23.0", "stages": 2}, "pipeline-parallel-size 2"),
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


@pytest.mark.parametrize(
    ("release", "second_runner", "refused"),
    [("0.30.0rc2", True, True), ("0.30.0rc2", None, False), ("0.23.0", True, False)],
)
def test_only_a_second_runner_that_balances_experts_itself_is_refused(
    release, second_runner, refused, monkeypatch
):
    ascend(monkeypatch, release=release, second_runner=second_runner)
    with pytest.raises(UnsupportedEngineError, match="EPLB_AGENT_MODE=policy") if refused else nullcontext():
        refuse_second_runner()


@pytest.mark.parametrize("release", ["0.23.0", "0.30.0rc2"])
def test_settings_of_the_hosts_own_balancer_are_logged_as_ignored(release, monkeypatch, caplog):
    eplb = {"eplb_policy_type": 3, "num_redundant_experts": 8}
    refuse_settings(ascend(monkeypatch, release=release, eplb=eplb))
    (message,) = caplog.messages
    assert message.endswith("eplb_policy_type=3")
