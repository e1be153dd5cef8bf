"""A checkpoint that transformers wrote must give transformers' logits, wherever its experts are."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eplb_service.placement import Placement
from tests.model.transformers_models import MODELS, write_checkpoint
from tests.moe.simulated import run_simulated
from worker_agent.model.expert_parallel import SERVING_DTYPE
from worker_agent.model.hugging_face import serve_checkpoint
from worker_agent.moe.rank_group import RankGroup

transformers = pytest.importorskip("transformers")

LOADING = threading.Lock()
"""transformers changes torch's default dtype while it makes a model; real ranks are processes."""


def placement(ranks: int, seed: int = 0) -> Placement:
    """Two MoE layers of eight experts with a replica for each rank, shuffled."""
    rng = np.random.default_rng(seed)
    linear = Placement.linear(2, 8, ranks, 8 // ranks + (ranks > 1)).phy2log_LRS
    return Placement(np.ascontiguousarray(rng.permuted(linear, axis=2)), 8)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dispatcher", ["all2allv", "allgather", "mc2"])
def test_logits_are_those_of_transformers(name: str, dispatcher: str, tmp_path: Path):
    folder = write_checkpoint(tmp_path, name)
    tokens_BT = torch.randint(64, (4, 5), generator=torch.Generator().manual_seed(0))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=SERVING_DTYPE, experts_implementation="eager"
    )
    with torch.no_grad():
        expected_BTV = theirs(tokens_BT).logits

    def serve(group: RankGroup) -> tuple[torch.Tensor, list[int]]:
        with LOADING:
            model, layers = serve_checkpoint(folder, placement(2), group, dispatcher, most_rows=10)
        with torch.no_grad():
            logits_BTV = model(tokens_BT[group.rank :: 2]).logits
        return logits_BTV, [int(layer.moe_load.sum()) for layer in layers]

    served = run_simulated(2, serve)
    for rank, (part_BTV, _) in enumerate(served):
        torch.testing.assert_close(part_BTV, expected_BTV[rank::2], rtol=0, atol=1e-5)
    assert [sum(loads) for loads in zip(*(loads for _, loads in served), strict=True)] == [40, 40]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "mixtral"}, "the model is a mixtral; use qwen3_moe or deepseek_v2"),
        ({"quantization_config": {"quant_method": "fp8"}}, "the model is quantized, which nothing here"),
        ({"hidden_act": "gelu"}, "the model has the activation gelu; use silu"),
    ],
)
def test_another_model_is_refused(changed: dict[str, Any], message: str, tmp_path: Path):
    path = write_checkpoint(tmp_path, "qwen3") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(ValueError, match=message):
        serve_checkpoint(tmp_path, placement(1), None)


def test_missing_tensors_are_named(tmp_path: Path):
    write_checkpoint(tmp_path, "qwen3")
    sorted(tmp_path.glob("*.safetensors"))[0].unlink()
    with pytest.raises(ValueError, match="missing"):
        serve_checkpoint(tmp_path, placement(1), None)
