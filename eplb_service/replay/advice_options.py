"""Settings tried for advice: what each realised, and which is the cheapest or the calmest of those near the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eplb_service.placement import Float64, mean_par
from eplb_service.planner.settings import NumberOrAuto
from eplb_service.replay.policy_replay import PolicyReplay, Setup, weighted
from eplb_service.replay.result import Replay
from eplb_service.replay.runner import UNSPLIT

SAME_TIME = 0.005
"""Part of the time by which a setting must be faster to be worth more slots or moves."""
_SAME_PAR = 0.01
"""Peak-to-average ratios this near are taken for equal: the cheaper setting wins."""
_WORTH_MEMORY = 0.1
"""Part of what balancing can win that a setting must win beyond another to be worth more slots (no cost curve)."""


@dataclass(frozen=True)
class Option:
    """One setting tried: its name, its slots per rank, schedule and price of moves, and what it realised.

    ``moe_ms`` are the slowest ranks of all layers in a step, ``None`` without a cost curve; ``bytes_per_rank`` the
    weights of a rank's experts of all layers, 0 where an expert's are not known.
    """

    label: str
    setup: Setup
    move_price: NumberOrAuto
    par: float
    moves_per_decision: float
    moved_share: float
    net_ms: float
    moe_ms: float | None = None
    bytes_per_rank: int = 0


class LeftAlone(NamedTuple):
    """What all settings are measured against: no redundancy, no balancing."""

    par: float
    moe_ms: float | None


def left_alone_of(replay: Replay) -> tuple[LeftAlone, Float64]:
    """That of a round with several numbers of slots, and its ratio by layer, float64 ``[L]``."""
    fewest = min(replay.policies, key=lambda policy: policy.setup.slots)
    left_alone_L = weighted(replay.baseline(fewest.setup).left_alone_DL, fewest.decisions)
    return LeftAlone(float(mean_par(left_alone_L)), replay.moe_ms_left_alone(fewest)), left_alone_L


def options_of(replay: Replay, prices: Mapping[str, float], left_alone: LeftAlone) -> list[Option]:
    """What each policy of a replay realised, but those by tables beside a stepwise split; prices of moves by label."""
    return [
        _option(replay, policy, prices.get(policy.label, 0.0), left_alone)
        for policy in replay.policies
        if not policy.label.startswith(UNSPLIT)
    ]


def _option(replay: Replay, policy: PolicyReplay, price: float, left_alone: LeftAlone) -> Option:
    score = replay.score(policy)
    slots = replay.layers * replay.ranks * policy.setup.slots
    saved_ms = replay.costs.saved_ms(score.par, left_alone.par)
    if score.moe_ms is not None and left_alone.moe_ms is not None:
        saved_ms = left_alone.moe_ms - score.moe_ms
    return Option(
        label=policy.label,
        setup=policy.setup,
        move_price=price,
        par=score.par,
        moves_per_decision=policy.moves_per_decision,
        moved_share=policy.moves_per_decision / slots,
        net_ms=saved_ms - score.stall_ms,
        moe_ms=score.moe_ms,
        bytes_per_rank=replay.layers * policy.setup.slots * replay.costs.bytes_per_expert,
    )


def cheapest(options: Sequence[Option], left_alone: float = 1.0) -> Option:
    """The fewest slots that come near the best time; near what is won by the best PAR where there is no cost curve.

    ``left_alone`` is the PAR without redundancy and balancing: more slots are memory, so they must win a part of what
    can be won at all, and not just any hundredth.
    """
    won = left_alone - min(option.par for option in options)
    near = _near_best(options, max(_SAME_PAR, _WORTH_MEMORY * won))
    return min(near, key=lambda option: option.setup.slots)


def calmest(options: Sequence[Option]) -> Option:
    """The fewest moves per step that come near the best time, or PAR."""
    return min(
        _near_best(options, _SAME_PAR),
        key=lambda option: option.moves_per_decision / option.setup.schedule.interval,
    )


def _near_best(options: Sequence[Option], within: float) -> list[Option]:
    times = [option.moe_ms for option in options if option.moe_ms is not None]
    if len(times) == len(options):
        limit = min(times) * (1 + SAME_TIME)
        return [option for option in options if option.moe_ms is not None and option.moe_ms <= limit]
    best = min(option.par for option in options)
    return [option for option in options if option.par <= best + within]
