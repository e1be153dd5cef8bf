"""Reads the model's checkpoint, which is in Hugging Face's layout: ``config.json`` beside ``model.safetensors``."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

from eplb_lab.layer import ExpertSource
from eplb_lab.model.transformer import ByteTransformer, ModelConfig

EMBEDDED = Path(__file__).parent / "byte-moe"
"""The embedded model, trained by ``tools.train_model``. transformers and vLLM load it as well."""

CONFIG, WEIGHTS = "config.json", "model.safetensors"


class Checkpoint:
    """A model on disk, of which each rank reads what it needs."""

    def __init__(self, folder: Path = EMBEDDED) -> None:
        self.config = ModelConfig.from_hugging_face(json.loads((folder / CONFIG).read_text(encoding="utf-8")))
        self._path = folder / WEIGHTS

    def experts(self, layer: int, dtype: torch.dtype = torch.float32) -> ExpertSource:
        """Return the experts of a block."""

        def read(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
            with safe_open(self._path, framework="pt") as file:
                gate, up, down = (
                    file.get_tensor(expert_tensor_name(layer, expert, part)).to(dtype)
                    for part in ("gate_proj", "up_proj", "down_proj")
                )
            return torch.cat([gate, up]), down

        return read

    def fill(self, model: ByteTransformer) -> None:
        """Copy the replicated weights into a model of the same config."""
        with safe_open(self._path, framework="pt") as file:
            model.load_state_dict({name: file.get_tensor(name) for name in model.state_dict()})


def expert_tensor_name(layer: int, expert: int, part: str) -> str:
    """Return the name of one tensor of an expert; ``part`` is ``gate_proj``, ``up_proj`` or ``down_proj``."""
    return f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"
