"""Tests that a checkpoint written by transformers gives the same logits as in transformers, for any placement."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eplb_core.placement import Placement
from eplb_lab.layer.rank_group import RankGroup
from eplb_lab.model.expert_parallel import SERVING_DTYPE
from eplb_lab.model.hugging_face import serve_checkpoint
from tests.model.transformers_models import MODELS, write_checkpoint
from tests.moe.simulated import run_simulated

transformers = pytest.importorskip("transformers")


def placement(ranks: int, seed: int = 0) -> Placement:
    """Return a shuffled placement of two MoE layers with eight experts and one replica for each rank."""
    rng = np.random.default_rng(seed)
    linear = Placement.linear(2, 8, ranks, 8 // ranks + (ranks > 1)).phy2log_LRS
    return Placement(np.ascontiguousarray(rng.permuted(linear, axis=2)), 8)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("dispatcher", "tensor_parallel"), [("all2allv", 1), ("all2allv", 2), ("allgather", 2), ("mc2", 2)]
)
def test_logits_equal_those_of_transformers(
    name: str, dispatcher: str, tensor_parallel: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Compare logits on two groups of ranks that have separate requests.

    The ranks in a group share requests and dispatched tokens.
    """
    folder = write_checkpoint(tmp_path, name)
    tokens_BT = torch.randint(64, (4, 5), generator=torch.Generator().manual_seed(0))
    reference_model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=SERVING_DTYPE, experts_implementation="eager"
    )
    with torch.no_grad():
        expected_BTV = reference_model(tokens_BT).logits

    # transformers changes torch's default dtype while it creates a model, so these ranks, which are threads, take
    # turns. Real ranks are processes.
    auto = transformers.AutoModelForCausalLM
    making = threading.Lock()
    creation_barrier = threading.Barrier(2 * tensor_parallel)
    from_config = auto.from_config

    def one_after_the_other(*args: Any, **more: Any) -> Any:
        with making:
            model = from_config(*args, **more)
        creation_barrier.wait(60)
        return model

    monkeypatch.setattr(auto, "from_config", one_after_the_other)

    def serve(group: RankGroup) -> tuple[torch.Tensor, list[int]]:
        common = {"most_rows": 10, "tensor_parallel": tensor_parallel}
        model, layers = serve_checkpoint(folder, placement(group.size), group, dispatcher, **common)
        with torch.no_grad():
            logits_BTV = model(tokens_BT[group.rank // tensor_parallel :: 2]).logits
        return logits_BTV, [int(layer.moe_load.sum()) for layer in layers]

    served = run_simulated(2 * tensor_parallel, serve)
    for rank, (part_BTV, _) in enumerate(served):
        expected = expected_BTV[rank // tensor_parallel :: 2]
        torch.testing.assert_close(part_BTV, expected, rtol=0, atol=1e-5)
    assert [sum(loads) for loads in zip(*(loads for _, loads in served), strict=True)] == [40, 40]


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        (
            "qwen3",
            {"model_type": "mixtral"},
            "the model has model_type mixtral; use qwen3_moe or deepseek_v2",
        ),
        (
            "qwen3",
            {"quantization_config": {"quant_method": "fp8"}},
            r"the model is quantised \(.*\), which is not supported",
        ),
        ("qwen3", {"hidden_act": "gelu"}, "the model uses the activation gelu; only silu is supported"),
        ("deepseek", {"topk_method": "noaux_tc"}, "the model has topk_method noaux_tc; use greedy or gro"),
    ],
)
def test_an_unsupported_model_is_rejected(name: str, changed: dict[str, Any], message: str, tmp_path: Path):
    path = write_checkpoint(tmp_path, name) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(ValueError, match=message):
        serve_checkpoint(tmp_path, placement(1), None)


QUERY = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (f"{QUERY}.weight", None, rf"\d+ tensors are missing, such as {QUERY}.weight$"),
        (f"{QUERY}.bias", torch.zeros(16), rf"the model has no tensor {QUERY}.bias"),
        (f"{QUERY}.weight", torch.zeros(16, 16).char(), rf"{QUERY}.weight has dtype torch.int8, which"),
        (
            "lm_head.weight",
            torch.zeros(64, 16).to(torch.float8_e4m3fn),
            "dtype torch.float8_e4m3fn, which",
        ),
    ],
)
def test_missing_unknown_and_unsupported_tensors_are_named_in_the_error(
    name: str, tensor: torch.Tensor | None, message: str, tmp_path: Path
):
    write_checkpoint(tmp_path, "qwen3")
    tensors_by_name = {
        key: each for path in tmp_path.glob("*.safetensors") for key, each in load_file(path).items()
    }
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    added_tensors = {name: tensor} if tensor is not None else {}
    kept = {key: each for key, each in tensors_by_name.items() if tensor is not None or "q_proj" not in key}
    save_file(kept | added_tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        serve_checkpoint(tmp_path, placement(1), None)
