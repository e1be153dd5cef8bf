"""Tests that real vLLM-Ascend MoE layers on CPU match a dense layer while the agent moves their experts."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.service import free_address
from tests.engines.engine_source import source_of
from tests.engines.environments import ROOT, VLLM_023, VLLM_030, python_of
from tools.engine_sources import VLLM_ASCEND_023, VLLM_ASCEND_030

HERE = Path(__file__).parent
pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

RELEASES = {"0.23": (VLLM_023, VLLM_ASCEND_023), "0.30": (VLLM_030, VLLM_ASCEND_030)}
"""For each release, by its name in the adapter: the environment of its vLLM, and the version of vLLM-Ascend."""

ROUNDING = {"NONE": 1e-4, "W8A8": 5e-2}
"""Tolerance by quantisation, for outputs near 1.

Moving an expert changes the float32 summation order, and an int8 row may be rounded differently.
"""

CONFIG = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "float32"}
CONFIG |= {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32}
CONFIG |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
CONFIG |= {"num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "norm_topk_prob": True}
CONFIG |= {"max_position_embeddings": 512, "mlp_only_layers": []}


def environment(source, **overrides):
    path = os.pathsep.join(map(str, (HERE / "fake_npu", source, ROOT)))
    settings = {
        "PYTHONPATH": path,
        "EPLB_AGENT_DATA_HOST": "127.0.0.1",
        "EPLB_AGENT_VERIFY_TRANSFERS": "true",
    }
    return {**os.environ, **settings, **overrides}


def serve(tmp_path, service, **options):
    """Run two ranks until they have switched often enough.

    Return each rank's facts, including the compared host functions.
    """
    vllm, version = RELEASES[options.setdefault("release", "0.23")]
    python = python_of(vllm)
    source = source_of("vllm_ascend", version)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    # With checksums, the agent itself would stop when it finds a layer with wrong weights.
    verify = "false" if options.get("broken") else "true"
    options = {
        "redundant": 2,
        "policy": 1,
        "quant": "NONE",
        "custom_ops": False,
        "switches": 20,
        "most_steps": 3000,
        **options,
    }
    agent = {
        "EPLB_AGENT_SERVICE": service.address,
        "EPLB_AGENT_VERIFY_TRANSFERS": verify,
        "EPLB_AGENT_QUANTISED_EXPERTS": str(options["quant"] != "NONE"),
    }
    port = free_address().rpartition(":")[2]
    ranks = [
        subprocess.Popen(
            [python, HERE / "vllm_ascend_rank.py", str(rank), port, tmp_path, json.dumps(options)],
            env=environment(source, **agent),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=1200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    facts = []
    for output in outputs:
        lines = [line for line in output.splitlines() if line.startswith("FOUND ")]
        assert lines, output[-4000:]
        facts.append(json.loads(lines[-1].removeprefix("FOUND ")))
    return facts


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"comm": "MC2"}, id="mc2"),
        pytest.param({"comm": "MC2", "quant": "W8A8", "custom_ops": True}, id="mc2-w8a8"),
        pytest.param({"comm": "ALLTOALL", "policy": 3}, id="all2allv-policy-3"),
        pytest.param({"comm": "ALLTOALL", "quant": "W8A8"}, id="all2allv-w8a8"),
        pytest.param({"comm": "ALLGATHER", "redundant": 0}, id="all-gather"),
    ],
)
def test_outputs_are_the_same_over_many_switches(release, options, tmp_path, service):
    # Without its kernel for lists, release 0.30 would misread them under All2AllV as well.
    kernel = {"custom_ops": True} if release == "0.30" and "quant" in options else {}
    facts = serve(tmp_path, service, release=release, **options | kernel)
    for rank in facts:
        print(
            f"{rank['switched']} layer switches in {rank['steps']} steps, outputs differ by at most {rank['worst']:.2g}"
        )
        assert rank["mismatches"] == []
        assert rank["halted"] is None
        assert rank["miscounted"] == 0
        assert rank["switched"] >= 20
        assert rank["worst"] < ROUNDING[options.get("quant", "NONE")]
        assert rank["same_addresses"]
        assert rank["host_maps_unchanged"]
        assert rank["children"] == 0
    assert sum(rank["experts_received"] for rank in facts) > 0
    if options["comm"] == "ALLGATHER":
        assert facts[0]["tables"] == facts[1]["tables"]


@pytest.mark.parametrize("comm", ["MC2", "ALLGATHER"])
@pytest.mark.parametrize("release", RELEASES)
def test_switching_the_tables_but_not_the_weights_is_detected(release, comm, tmp_path, service):
    """Quantised experts are always verified, so with them the agent itself would stop."""
    options = {"comm": comm, "custom_ops": comm == "MC2"}
    if comm == "ALLGATHER":
        options["redundant"] = 0
    facts = serve(tmp_path, service, release=release, broken=True, **options)
    worst = max(rank["worst"] for rank in facts)
    print(f"outputs differ by up to {worst:.2g}")
    assert worst > 10 * ROUNDING["NONE"]


ALL_GATHER = "all-gather dispatch with .* redundant experts for steps of up to"
FIRST_SCALES = "the first expert's scales to all"


@pytest.mark.parametrize(
    ("release", "options", "reason"),
    [
        ("0.23", {"comm": "ALLGATHER"}, ALL_GATHER),
        ("0.30", {"comm": "ALLGATHER"}, ALL_GATHER),
        ("0.23", {"comm": "MC2", "quant": "W8A8"}, FIRST_SCALES),
        ("0.30", {"comm": "MC2", "quant": "W8A8"}, FIRST_SCALES),
        ("0.30", {"comm": "ALLTOALL", "quant": "W8A8"}, FIRST_SCALES),
    ],
    ids=[
        "all-gather-replicas-0.23",
        "all-gather-replicas-0.30",
        "mc2-w8a8-without-its-kernel-0.23",
        "mc2-w8a8-without-its-kernel-0.30",
        "all2allv-w8a8-without-its-kernel-0.30",
    ],
)
def test_options_that_give_wrong_outputs_are_refused_and_the_error_gives_the_reason(
    release, options, reason, tmp_path, service
):
    with pytest.raises(AssertionError, match=reason):
        serve(tmp_path, service, release=release, **options)
