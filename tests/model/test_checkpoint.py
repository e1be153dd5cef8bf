"""A checkpoint holds a whole model, or is refused by the name of what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.model.small import CONFIG, small_model, write_small_model
from worker_agent.model.checkpoint import EMBEDDED, Checkpoint, CheckpointError
from worker_agent.model.config import ModelConfig
from worker_agent.model.transformer import ByteTransformer

GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


def _with_tensors(folder: Path, **changes: torch.Tensor | None) -> Path:
    """A small model whose tensors were replaced, added or taken away."""
    weights = write_small_model(folder) / "model.safetensors"
    with safe_open(weights, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, weights)
    return folder


def _with_config(folder: Path, **changes: object) -> Path:
    """A small model whose config says something else; ``...`` takes a key away."""
    path = write_small_model(folder) / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
    return folder


def test_what_was_saved_is_read_to_the_precision_it_is_stored_in(tmp_path: Path) -> None:
    model, moes = small_model()
    checkpoint = Checkpoint(write_small_model(tmp_path / "small"))
    assert checkpoint.config == CONFIG
    read = ByteTransformer(CONFIG, moes)
    checkpoint.fill(read)
    for name, tensor in model.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor.bfloat16().float()), name
    w13_IH, w2_HI = checkpoint.experts(1)(3)
    assert torch.equal(w13_IH, moes[1].w13[3].bfloat16().float())
    assert torch.equal(w2_HI, moes[1].w2[3].bfloat16().float())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({GATE: None}, rf"tensor {GATE} \[6, 16\] is missing"),
        ({"surprise": torch.ones(2)}, r"tensor surprise \[2\] is not of this model"),
        ({GATE: torch.ones(6, 15)}, rf"tensor {GATE} must have the shape \[6, 16\], got \[6, 15\]"),
        ({EMBEDDING: torch.ones(3, 16)}, rf"tensor {EMBEDDING} must have the shape \[256, 16\]"),
    ],
)
def test_tensors_that_are_not_the_models_are_named(
    changes: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(_with_tensors(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral"}, r"config.json: model_type must be 'qwen3_moe', got 'mixtral'"),
        ({"norm_topk_prob": False}, "norm_topk_prob must be True, got False"),
        ({"rope_theta": 1e6}, "rope_theta must be 10000.0, got 1000000.0"),
        ({"num_experts": ...}, "num_experts is missing"),
        ({"num_experts": "8"}, "must be positive integers"),
        ({"num_key_value_heads": 3}, "heads must be a multiple of kv_heads, got 4 and 3"),
        ({"head_dim": 8}, "head_dim must be 4, got 8"),
    ],
)
def test_models_that_are_computed_otherwise_are_refused(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(_with_config(tmp_path, **changes))


def test_folders_that_hold_no_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing/config.json: no readable JSON file"):
        Checkpoint(tmp_path / "missing")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must hold an object, got list"):
        Checkpoint(tmp_path)
    write_small_model(tmp_path)
    (tmp_path / "model.safetensors").write_text("no tensors here")
    with pytest.raises(CheckpointError, match="no readable safetensors file"):
        Checkpoint(tmp_path)


def test_the_embedded_model_comes_with_the_package() -> None:
    assert Checkpoint().config == ModelConfig()
    assert sum(path.stat().st_size for path in EMBEDDED.iterdir()) <= 8 * 2**20
