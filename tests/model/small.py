"""A small model with random weights on disk, and its outputs without any parallelism."""

from __future__ import annotations

from pathlib import Path

import torch

from eplb_lab.model.transformer import ByteTransformer, ModelConfig
from tools.train_model import TrainableMoE, build, save

CONFIG = ModelConfig(layers=2, hidden=16, heads=4, kv_heads=2, experts=8, top_k=2, intermediate=6, context=24)


def small_model(seed: int = 0) -> tuple[ByteTransformer, list[TrainableMoE]]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build(CONFIG)


def write_small_model(folder: Path, seed: int = 0) -> Path:
    save(folder, *small_model(seed))
    return folder
