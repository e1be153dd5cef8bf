"""Realised balance against weights moved: each policy with its own brakes, from free to dear."""

from __future__ import annotations

from eplb_service.bench.closed_loop import DEFAULT, FULL, LEFT_ALONE, Entrant
from eplb_service.bench.contest import OURS, Contest
from eplb_service.bench.peers.balancers import FLASHLB

PRICES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Beside the planner's own: peak-to-average ratio that moving every slot of a layer must win."""
PRICED = "ours, move_price 0.3"
"""The price at which few moves are to win nearly all."""


THRESHOLDS = ((0.8, 0.65), (0.7, 0.55))
"""Beside FlashLB's own: parts of its past and of perfect balance below which it places a layer from scratch."""


def priced(contest: Contest) -> list[Entrant]:
    """Ours at several prices, FlashLB with lower thresholds, the other peers, nothing at all."""
    ours = [
        Entrant(f"ours, move_price {price:g}", OURS, {"options": {"move_price": price}}) for price in PRICES
    ]
    peers = [Entrant(name, name) for name in contest.peers]
    if FLASHLB in contest.peers:
        peers += [
            Entrant(f"{FLASHLB}, thresholds {ratio:g} and {value:g}", FLASHLB, {"thresholds": (ratio, value)})
            for ratio, value in THRESHOLDS
        ]
    return [LEFT_ALONE, DEFAULT, FULL, *ours, *peers]
