"""Record the heat of the shipped model while it decodes its prompts: ``python -m tools.record_trace FILE.npz``.

The recording contains the routing decisions of the project's own model, ``eplb_lab/model``
(``docs/research/model.md``), so it has the project's licence. The prompts change from phase to phase, and each step
decodes one byte of every request.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eplb_core.placement import Placement
from eplb_lab.model.checkpoint import Checkpoint
from eplb_lab.model.expert_parallel import expert_parallel
from eplb_lab.model.serving import Server, Traffic

STEPS = 256
"""Number of steps in the shipped recording."""
ROWS = 16
"""Number of requests decoded at a time."""
LENGTH = 64
"""Number of bytes per request, including the prompt."""
SEED = 7
"""Seed for the shipped recording."""


def recorded(steps: int = STEPS) -> np.ndarray:
    """Return the recorded tokens per step, layer and expert, int16 ``[T, L, E]``."""
    torch.set_num_threads(1)
    checkpoint = Checkpoint()
    config = checkpoint.config
    linear = Placement.linear(config.layers, config.experts, 1, config.experts)
    model, _ = expert_parallel(checkpoint, linear, None)
    heat_TLE = np.zeros((steps, config.layers, config.experts), dtype=np.int16)
    step = 0

    def counting(layer: int, choose: Any) -> Any:
        def chosen(logits_NE: torch.Tensor) -> Any:
            weights_NK, ids_NK = choose(logits_NE)
            counts_E = np.bincount(ids_NK.numpy().ravel(), minlength=config.experts)
            heat_TLE[step, layer] += counts_E.astype(np.int16)
            return weights_NK, ids_NK

        return chosen

    for layer, block in enumerate(model.model.layers):
        mlp: Any = block.mlp
        mlp.choose = counting(layer, mlp.choose)
    server = Server(model, Traffic(steps, rank=0, seed=SEED), ROWS, LENGTH, 1.0, SEED)
    with torch.no_grad():
        for step in range(steps):  # noqa: B007, the counting functions read it
            server.step()
    return heat_TLE


def main() -> None:
    """Record and write the trace."""
    np.savez_compressed(Path(sys.argv[1]), heat=recorded())


if __name__ == "__main__":
    main()
