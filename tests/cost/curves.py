"""Curves that tests share."""

from __future__ import annotations

from eplb_service.cost.curve import CostCurve

H200 = CostCurve(20.0, 11.6, 5.0, 0.0615, "decode", "H200, 7168 x 2048, fp8")


def plain_rank_us(curve: CostCurve, tokens: list[float]) -> float:
    """The definition, slot by slot."""
    total = curve.floor_us
    for n in tokens:
        if n > 0:
            total += max(curve.read_us, curve.launch_us + curve.slope_us * n)
    return total
