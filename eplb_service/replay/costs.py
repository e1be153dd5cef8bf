"""What a decision costs and what balance is worth, in milliseconds and bytes that the user states."""

from __future__ import annotations

import math
from dataclasses import dataclass

from eplb_service.cost.curve import CostCurve
from eplb_service.planner.split_cost import SplitCost
from eplb_service.replay.schedule import ReplayError


@dataclass(frozen=True)
class Costs:
    """Stated costs; nothing here is measured on the machine that replays, so results are the same everywhere.

    Parameters
    ----------
    step_ms
        Time of a step of the model as recorded; 0 where not stated, and then nothing is late and no time is reported.
    moe_share
        Part of a step that the hottest rank decides: expert computation and dispatch.
    bytes_per_expert
        Weights of one expert in one layer.
    bandwidth
        Bytes per second that a rank receives while it serves.
    solve_ms
        From the end of a window to the plan at the ranks.
    commit_ms
        Standstill of all ranks per switched layer.
    curve
        What tokens cost; ``None`` where the hottest rank's part of a step is taken as in proportion to its tokens.
    split
        What a stepwise split itself takes, under a curve; ``None`` where the host splits otherwise.

    Raises ``ReplayError`` on a value out of bounds.
    """

    step_ms: float = 0.0
    moe_share: float = 0.5
    bytes_per_expert: int = 0
    bandwidth: float = 10e9
    solve_ms: float = 200.0
    commit_ms: float = 1.0
    curve: CostCurve | None = None
    split: SplitCost | None = None

    def __post_init__(self) -> None:
        for name in ("step_ms", "moe_share", "bytes_per_expert", "bandwidth", "solve_ms", "commit_ms"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ReplayError(f"{name} is {value}; it must be a finite number, zero or more")
        if self.moe_share > 1:
            raise ReplayError(f"moe_share is {self.moe_share}; it is a part of the step, at most 1")
        if self.bandwidth == 0:
            raise ReplayError("bandwidth is 0; nothing would ever arrive")

    @property
    def split_overhead_us(self) -> float:
        """Microseconds that a stepwise split itself takes in each layer of a step; 0 where there is none."""
        return 0.0 if self.split is None else self.split.us

    def delay_steps(self, experts_received: int) -> int:
        """Steps from the end of a window until its decision serves; the busiest rank receives so many experts."""
        if self.step_ms == 0:
            return 0
        transfer_ms = experts_received * self.bytes_per_expert / self.bandwidth * 1e3
        return math.ceil((self.solve_ms + transfer_ms) / self.step_ms)

    def saved_ms(self, par: float, par_left_alone: float) -> float:
        """Time of a step that a smaller peak-to-average ratio saves; the MoE part is in proportion to it."""
        return self.step_ms * self.moe_share * (1 - par / par_left_alone)
