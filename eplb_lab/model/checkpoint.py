"""Reader for the model's checkpoint in Hugging Face format: ``config.json`` and ``model.safetensors``."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

from eplb_lab.layer import ExpertSource
from eplb_lab.model.transformer import ByteTransformer, ModelConfig

EMBEDDED = Path(__file__).parent / "byte-moe"
"""Directory of the embedded model, trained by ``tools.train_model``. transformers and vLLM can also load the model."""

CONFIG = "config.json"
WEIGHTS = "model.safetensors"


class Checkpoint:
    """Model on disk. Each rank reads only the tensors that it needs.

    Parameters
    ----------
    folder
        Directory with ``config.json`` and ``model.safetensors``.
    """

    def __init__(self, folder: Path = EMBEDDED) -> None:
        self.config = ModelConfig.from_hugging_face(json.loads((folder / CONFIG).read_text(encoding="utf-8")))
        self._path = folder / WEIGHTS

    def experts(self, layer: int, dtype: torch.dtype = torch.float32) -> ExpertSource:
        """Return a function that reads a block's experts, with weights of data type ``dtype``."""

        def read(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
            with safe_open(self._path, framework="pt") as file:
                gate, up, down = (
                    file.get_tensor(expert_tensor_name(layer, expert, projection)).to(dtype)
                    for projection in ("gate_proj", "up_proj", "down_proj")
                )
            return torch.cat([gate, up]), down

        return read

    def fill(self, model: ByteTransformer) -> None:
        """Load the replicated weights into a model with the same config."""
        with safe_open(self._path, framework="pt") as file:
            model.load_state_dict({name: file.get_tensor(name) for name in model.state_dict()})


def expert_tensor_name(layer: int, expert: int, projection: str) -> str:
    """Return the name of an expert's tensor in the checkpoint.

    Parameters
    ----------
    layer
        Index of the block.
    expert
        Logical expert.
    projection
        ``gate_proj``, ``up_proj`` or ``down_proj``.

    Examples
    --------
    >>> expert_tensor_name(0, 3, "up_proj")
    'model.layers.0.mlp.experts.3.up_proj.weight'
    """
    return f"model.layers.{layer}.mlp.experts.{expert}.{projection}.weight"
