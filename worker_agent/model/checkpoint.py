"""Reads the model's checkpoint, which is in Hugging Face's layout: ``config.json`` beside ``model.safetensors``."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from worker_agent.model.config import ModelConfig
from worker_agent.model.transformer import ByteTransformer
from worker_agent.moe import ExpertSource

EMBEDDED = Path(__file__).parent / "byte-moe"
"""The embedded model, trained by ``tools.training.train``. transformers and vLLM load it as well."""

CONFIG, WEIGHTS = "config.json", "model.safetensors"


class CheckpointError(ValueError):
    """A folder that does not hold a whole model; the message names file, tensor and expected shape."""


class Checkpoint:
    """A model on disk, of which each rank reads what it needs.

    Raises
    ------
    CheckpointError
        Where a file is missing, the model is of another architecture, or tensors are missing, extra or misshaped.
    """

    def __init__(self, folder: Path = EMBEDDED) -> None:
        self.config = _read_config(folder / CONFIG)
        self._path = folder / WEIGHTS
        try:
            with safe_open(self._path, framework="pt") as file:
                found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self._path}: no readable safetensors file: {error}") from error
        self._check(found)

    def experts(self, layer: int, dtype: torch.dtype = torch.float32) -> ExpertSource:
        """The experts of a block."""

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
        for name in expected.keys() - found.keys():
            raise CheckpointError(f"{self._path}: tensor {name} {list(expected[name])} is missing")
        for name in found.keys() - expected.keys():
            raise CheckpointError(f"{self._path}: tensor {name} {list(found[name])} is not of this model")
        for name, shape in expected.items():
            if found[name] != shape:
                raise CheckpointError(
                    f"{self._path}: tensor {name} must have the shape {list(shape)}, got {list(found[name])}"
                )


def expert_tensor_name(layer: int, expert: int, part: str) -> str:
    """The name of one tensor of an expert; ``part`` is ``gate_proj``, ``up_proj`` or ``down_proj``."""
    return f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"


def _read_config(path: Path) -> ModelConfig:
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: no readable JSON file: {error}") from error
    if not isinstance(contents, dict):
        raise CheckpointError(f"{path}: must hold an object, got {type(contents).__name__}")
    try:
        return ModelConfig.from_hugging_face(contents)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _expert_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    inward, outward = (config.intermediate, config.hidden), (config.hidden, config.intermediate)
    return {
        expert_tensor_name(layer, expert, part): outward if part == "down_proj" else inward
        for layer in range(config.layers)
        for expert in range(config.experts)
        for part in ("gate_proj", "up_proj", "down_proj")
    }


def _replicated(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that every rank holds."""
    with torch.device("meta"):
        model = ByteTransformer(config, [_no_experts] * config.layers)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _no_experts(hidden_TH: torch.Tensor, _ids: torch.Tensor, _weights: torch.Tensor) -> torch.Tensor:
    return hidden_TH
