"""Cost curves shared by tests, and a slow twin."""

from __future__ import annotations

from dataclasses import replace

from eplb_core.cost.curve import CostCurve

H200 = CostCurve(20.0, 11.6, 5.0, 0.0615, "decode", "H200, 7168 x 2048, fp8")


FUSED = replace(H200, batch_us=0.004)
"""The same curve for a kernel that sorts the whole batch on every rank."""


def plain_rank_us(curve: CostCurve, tokens: list[float], batch: float = 0.0) -> float:
    """Compute a rank's time from the definition, slot by slot, with ``batch`` tokens on all ranks together."""
    total = curve.floor_us + curve.batch_us * batch
    for n in tokens:
        if n > 0:
            total += max(curve.read_us, curve.launch_us + curve.slope_us * n)
    return total
