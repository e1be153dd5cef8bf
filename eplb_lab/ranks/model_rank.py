"""Rank process of the demo that serves a model: ``python -m eplb_lab.ranks.model_rank TASK.json RANK``.

Two models with the same weights answer the same requests with the same random draws. Each model continues from the
bytes that it generated itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from eplb_core.placement import Placement
from eplb_lab.layer import ExpertParallelMoE
from eplb_lab.model.checkpoint import Checkpoint
from eplb_lab.model.expert_parallel import expert_parallel
from eplb_lab.model.serving import LockstepServer, Server, Traffic
from eplb_lab.ranks.twins import Task, Twins, run

_TEMPERATURE = 0.8


@dataclass(frozen=True, kw_only=True)
class _ModelTask(Task):
    """Task for ranks that serve a model; see ``_ModelRank``.

    Parameters
    ----------
    steps
        Number of decoding steps.
    layers
        Number of MoE layers to balance, starting with the first.
    experts
        E, the number of experts per layer.
    rows
        Number of requests in each rank's batch.
    length
        Number of bytes per request (tokens, for a ``checkpoint``), including the prompt.
    quantized
        True to quantise the experts to W8A8.
    dual_batch
        True to run each step's tokens through the MoE layers in two micro-batches.
    checkpoint
        Directory of the model to serve; ``None`` for the embedded model.
    tensor_parallel
        Number of consecutive ranks that have the same requests.
    """

    steps: int
    layers: int
    experts: int
    rows: int
    length: int
    quantized: bool = False
    dual_batch: bool = False
    checkpoint: str | None = None
    tensor_parallel: int = 1


class _ModelRank:
    """Rank with a live (balanced) model and a still (unbalanced) model, each with its own batch of requests."""

    def __init__(self, task: _ModelTask, rank: int, group: dist.ProcessGroup) -> None:
        self._task = task
        self._rank = rank
        self._group = group
        self._live, live_layers = self._model(task.dispatcher, task.split)
        # Grouped experts never move to other ranks, so the run only compares their dispatcher with all-to-all.
        still_dispatcher = "all2allv" if task.dispatcher == "moge" else task.dispatcher
        self._still, still_layers = self._model(still_dispatcher, "tables")
        self._twins = Twins(task, rank, group, live_layers[: task.layers], still_layers[: task.layers])
        self._generated = 0
        self._different = 0

    def serve(self) -> None:
        self._twins.serve(self._task.steps, self._one_step, self._totals)

    def _model(self, dispatcher: str, split: str) -> tuple[Server | LockstepServer, list[ExpertParallelMoE]]:
        """Create a model. Return a server that answers this rank's requests, and the model's MoE layers."""
        task = self._task
        placement = Placement.linear(task.layers, task.experts, task.ranks, task.slots)
        options: dict[str, Any] = {
            "quantization": "w8a8" if task.quantized else "none",
            "split": split,
            "dealing_width": task.dealing_width,
            "most_rows": task.rows,
            "tensor_parallel": task.tensor_parallel,
        }
        # Tensor-parallel ranks must have the same requests and the same draws.
        stream = self._rank // task.tensor_parallel
        seed = task.seed * task.ranks + stream
        if task.checkpoint is not None:
            from eplb_lab.model.hugging_face import serve_checkpoint

            hf_model, layers = serve_checkpoint(
                Path(task.checkpoint), placement, self._group, dispatcher, **options
            )
            vocabulary = hf_model.config.vocab_size
            return LockstepServer(hf_model, task.steps, task.rows, task.length, vocabulary, seed), layers
        model, layers = expert_parallel(
            Checkpoint(),
            placement,
            self._group,
            dispatcher,
            dual_batch=task.dual_batch,
            expert_groups=task.ranks if task.dispatcher == "moge" else 1,
            **options,
        )
        traffic = Traffic(task.steps, stream, task.seed)
        return Server(model, traffic, task.rows, task.length, _TEMPERATURE, seed), layers

    def _one_step(self, step: int) -> dict[str, object]:
        """Run one step of both models, compare their outputs, and return the fields of the step's report."""
        live, still, times = self._twins.by_turns(step, self._task.rows, self._live.step, self._still.step)
        live_B, live_BV = live
        still_B, still_BV = still
        self._generated += int(np.count_nonzero(still_B >= 0))
        self._different += int(np.count_nonzero(live_B != still_B))
        self._twins.compare(live_BV, still_BV)
        return {**times, "phase": self._still.phase(step), "requests": self._still.in_flight().tolist()}

    def _totals(self) -> dict[str, object]:
        """Return the counters, and the names of domains and phases, for a progress report."""
        return {
            "bytes_generated": self._generated,
            "bytes_different": self._different,
            "domains": self._still.domains,
            "phases": self._still.phases,
        }


if __name__ == "__main__":
    run(_ModelTask, _ModelRank)
