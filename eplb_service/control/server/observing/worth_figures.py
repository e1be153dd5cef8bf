"""What balancing is worth and what moves cost, as operators' messages and metrics have it."""

from __future__ import annotations

from eplb_service.planner.counterfactual import BEST_KNOWN, Counterfactual
from eplb_service.planner.move_price import MovePrice
from eplb_service.wire.move_price import PricedMoves
from eplb_service.wire.worth import Worth


def figures_of(found: Counterfactual) -> Worth:
    """The figures of one window."""
    share = found.gain_share
    return Worth(
        steps=found.steps,
        left_alone_ms=found.left_alone_ms,
        serving_ms=found.serving_ms,
        best_ms=found.best_ms,
        best=BEST_KNOWN,
        gain_ms=found.gain.mean,
        gain_low_ms=found.gain.low,
        gain_high_ms=found.gain.high,
        price_kind=found.price.kind,
        price=found.price.reason,
        timed_steps=found.timed_steps,
        step_ms=found.step_ms,
        gain_percent=None if share is None else 100 * share,
        tokens_per_second=found.tokens_per_second,
        tokens_per_second_won=found.tokens_per_second_won,
    )


def priced_moves(price: MovePrice) -> PricedMoves:
    """What a decision's moves were priced at."""
    return PricedMoves(
        price.value,
        price.kind,
        price.reason,
        ms_per_move=price.move_ms,
        ms_per_megabyte=price.ms_per_megabyte,
        ms_per_switch=price.switch_ms,
    )
