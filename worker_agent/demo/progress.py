"""What a demo rank reports on stdout: one JSON line every few steps."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from worker_agent.agent import Agent
from worker_agent.moe import ExpertParallelMoE


class Progress:
    """Collects what was measured since the last line, of the *live* layers that are balanced and the *still* ones."""

    def __init__(
        self, rank: int, agent: Agent, live: Sequence[ExpertParallelMoE], still: Sequence[ExpertParallelMoE]
    ) -> None:
        self._rank = rank
        self._agent = agent
        self._live = live
        self._still = still
        self._rows: list[dict[str, object]] = []
        self._worst_difference = 0.0
        self._largest_output = 0.0

    def compare(self, live: torch.Tensor, still: torch.Tensor) -> None:
        """Take the same output of both."""
        if live.numel():
            self._worst_difference = max(self._worst_difference, float((live - still).abs().max()))
            self._largest_output = max(self._largest_output, float(still.abs().max()))

    def add_step(self, live_seconds: float, still_seconds: float, **more: object) -> None:
        """Take the step that both have just run."""
        self._rows.append(
            {
                "live_load": [int(_last_row(layer, layer.moe_load).sum()) for layer in self._live],
                "still_load": [int(_last_row(layer, layer.moe_load).sum()) for layer in self._still],
                "source": [_last_row(layer, layer.source_load).tolist() for layer in self._still],
                "live_ms": 1e3 * live_seconds,
                "still_ms": 1e3 * still_seconds,
                "epoch": self._agent.installed.epoch,
                **more,
            }
        )

    def report(self, **more: object) -> None:
        """Write the line."""
        stats = self._agent.stats
        line = {
            "rank": self._rank,
            "steps": self._rows,
            "layers_switched": stats.layers_switched,
            "experts_received": stats.experts_received,
            "bytes_received": stats.bytes_received,
            "worst_difference": self._worst_difference,
            "largest_output": self._largest_output,
            "halted": self._agent.halted,
            **more,
        }
        print(json.dumps(line), flush=True)
        self._rows = []


def _last_row(layer: ExpertParallelMoE, ring_WX: torch.Tensor | None) -> torch.Tensor:
    """What a ring has recorded of the step just run."""
    assert ring_WX is not None
    return ring_WX[(int(layer.load_counter) - 1) % ring_WX.shape[0]]
