"""Reads the model's checkpoint, which is in Hugging Face's layout: ``config.json`` beside ``model.safetensors``."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from worker_agent.model.transformer import ByteTransformer, ModelConfig
from worker_agent.moe import ExpertSource

EMBEDDED = Path(__file__).parent / "byte-moe"
"""The embedded model, trained by ``tools.train_model``. transformers and vLLM load it as well."""

CONFIG, WEIGHTS = "config.json", "model.safetensors"


class CheckpointError(ValueError):
    """A folder that does not hold a whole model; the message names file, tensor and expected shape."""


class Checkpoint:
    """A model on disk, of which each rank reads what it needs.

    Raises ``CheckpointError`` where a file is missing, the model is of another architecture, or tensors are missing,
    extra or misshaped.
    """

    def __init__(self, folder: Path = EMBEDDED) -> None:
        path = folder / CONFIG
        try:
            contents = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: no readable JSON file: {error}") from error
        try:
            self.config = ModelConfig.from_hugging_face(contents)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        self._path = folder / WEIGHTS
        try:
            with safe_open(self._path, framework="pt") as file:
                found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self._path}: no readable safetensors file: {error}") from error
        self._check(found)

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
            model.load_state_dict({name: file.get_tensor(name) for name in _replicated(self.config)})

    def _check(self, found: dict[str, tuple[int, ...]]) -> None:
        expected = _replicated(self.config) | _expert_shapes(self.config)
        for name in expected.keys() | found.keys():
            shape, wanted = found.get(name), expected.get(name)
            if shape is None:
                problem = f"{list(wanted or ())} is missing"
            elif wanted is None:
                problem = f"{list(shape)} is not of this model"
            else:
                problem = f"must have the shape {list(wanted)}, got {list(shape)}"
            if shape != wanted:
                raise CheckpointError(f"{self._path}: tensor {name} {problem}")


def expert_tensor_name(layer: int, expert: int, part: str) -> str:
    """Return the name of one tensor of an expert; ``part`` is ``gate_proj``, ``up_proj`` or ``down_proj``."""
    return f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"


def _expert_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    inward, outward = (config.intermediate, config.hidden), (config.hidden, config.intermediate)
    return {
        expert_tensor_name(layer, expert, part): outward if part == "down_proj" else inward
        for layer in range(config.layers)
        for expert in range(config.experts)
        for part in ("gate_proj", "up_proj", "down_proj")
    }


def _replicated(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors that every rank holds."""
    with torch.device("meta"):
        model = ByteTransformer(config, [lambda hidden_TH, *_: hidden_TH] * config.layers)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
