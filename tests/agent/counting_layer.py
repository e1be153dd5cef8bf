"""A layer with predictable counters, for tests of heat recording."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

ROWS = 8
SLOTS = 3
EXPERTS = 4


@dataclass
class CountingLayer:
    """A layer whose counts are the step number for every slot, and ten times that number for every expert."""

    counts_source: bool = True
    first: int = 0
    expert_map: torch.Tensor = field(default_factory=lambda: torch.zeros(EXPERTS, dtype=torch.int32))
    log2phy: torch.Tensor = field(default_factory=lambda: torch.zeros(EXPERTS, dtype=torch.int32))
    moe_load: torch.Tensor | None = field(default_factory=lambda: torch.zeros(ROWS, SLOTS, dtype=torch.int32))
    source_load: torch.Tensor | None = None
    load_counter: torch.Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    shares_tokens: bool = False

    def __post_init__(self) -> None:
        if self.counts_source:
            self.source_load = torch.zeros(ROWS, EXPERTS, dtype=torch.int32)

    def expert_weights(self) -> list[torch.Tensor]:
        return [torch.zeros(SLOTS, 1)]

    def forward(self, step: int) -> None:
        row = int(self.load_counter) % ROWS
        if self.moe_load is not None:
            self.moe_load[row] = step
        if self.source_load is not None:
            self.source_load[row] = 10 * step
        self.load_counter += 1
