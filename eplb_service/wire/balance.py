"""What a service reports of a deployment's balance: over time, by rank, and the decisions that led to it."""

from __future__ import annotations

from dataclasses import dataclass

from eplb_service.placement import Int32
from eplb_service.wire.codec import pack, unpack
from eplb_service.wire.fields import (
    LAST_VERSION,
    LONGEST_MESSAGE,
    MOST_LAYERS,
    MOST_RANKS,
    WireError,
    check_count,
    check_measured,
    check_seconds,
    check_time,
    printable,
)
from eplb_service.wire.generated import operator_pb2
from eplb_service.wire.past_plan import OUTCOMES, PastVerdict, decode_verdict, encode_verdict

MOST_POINTS = 1 << 16
_MOST_LOAD_STEPS = 1 << 16
_MOST_LOAD = 1000 * MOST_RANKS


@dataclass(frozen=True)
class BalancePoint:
    """Balance around one moment; a ratio that is not known is NaN.

    Parameters
    ----------
    at
        Seconds since 1970.
    par
        Realised peak-to-average ratio, mean over the layers that had tokens.
    par_planned
        What the last decision expected, in the same mean.
    noise_floor
        What it took for the noise floor.
    layers_switched
        Total since the deployment is known.
    """

    at: float
    par: float
    par_planned: float
    noise_floor: float
    layers_switched: int


@dataclass(frozen=True)
class LayerMoves:
    """Slots of one layer that receive weights, int32 ``[M, 5]``."""

    layer: int
    moves_M5: Int32


@dataclass(frozen=True)
class MadeDecision:
    """A decision, and what became of its plan; ``plan_id`` is 0 where none was offered."""

    at: float
    solve_seconds: float
    plan_id: int
    verdicts: tuple[PastVerdict, ...]
    moves: tuple[LayerMoves, ...]
    outcome: str
    reason: str
    committed: int


@dataclass(frozen=True)
class Balance:
    """Balance over time, oldest first, and the last decisions.

    ``rank_loads_LR`` are loads over their layer's mean in thousandths, int32 ``[L, R]``, over ``load_steps`` steps, or
    ``None`` where none was measured.
    """

    points: tuple[BalancePoint, ...] = ()
    rank_loads_LR: Int32 | None = None
    load_steps: int = 0
    last_decision: MadeDecision | None = None
    last_plan: MadeDecision | None = None


def encode_balance(balance: Balance) -> operator_pb2.GetBalanceResponse:
    """The message."""
    message = operator_pb2.GetBalanceResponse(
        points=[operator_pb2.BalancePoint(**vars(point)) for point in balance.points],
        load_steps=balance.load_steps,
    )
    if balance.rank_loads_LR is not None:
        message.rank_loads.CopyFrom(pack(balance.rank_loads_LR))
    if balance.last_decision is not None:
        message.last_decision.CopyFrom(_encode_decision(balance.last_decision))
    if balance.last_plan is not None:
        message.last_plan.CopyFrom(_encode_decision(balance.last_plan))
    return message


def decode_balance(message: operator_pb2.GetBalanceResponse) -> Balance:
    """The balance; raises ``WireError`` naming the field that cannot be what it is."""
    check_count(len(message.points), "balance.points", MOST_POINTS + 1)
    loads_LR = None
    if message.HasField("rank_loads"):
        loads_LR = unpack(message.rank_loads, (None, None), "balance.rank_loads")
        if loads_LR.size and not 0 <= loads_LR.min() <= loads_LR.max() <= _MOST_LOAD:
            raise WireError(f"balance.rank_loads: a load is not 0 to {_MOST_LOAD}")
    return Balance(
        tuple(map(_decode_point, message.points)),
        loads_LR,
        check_count(message.load_steps, "balance.load_steps", _MOST_LOAD_STEPS + 1),
        _decode_decision(message.last_decision) if message.HasField("last_decision") else None,
        _decode_decision(message.last_plan) if message.HasField("last_plan") else None,
    )


def _decode_point(message: operator_pb2.BalancePoint) -> BalancePoint:
    return BalancePoint(
        at=check_time(message.at, "point.at"),
        par=check_measured(message.par, "point.par"),
        par_planned=check_measured(message.par_planned, "point.par_planned"),
        noise_floor=check_measured(message.noise_floor, "point.noise_floor"),
        layers_switched=check_count(message.layers_switched, "point.layers_switched", LAST_VERSION + 1),
    )


def _encode_decision(decision: MadeDecision) -> operator_pb2.MadeDecision:
    fields = {
        **vars(decision),
        "reason": printable(decision.reason, LONGEST_MESSAGE),
        "verdicts": [encode_verdict(verdict) for verdict in decision.verdicts],
        "moves": [
            operator_pb2.LayerMoves(layer=one.layer, moves=pack(one.moves_M5)) for one in decision.moves
        ],
    }
    return operator_pb2.MadeDecision(**fields)


def _decode_decision(message: operator_pb2.MadeDecision) -> MadeDecision:
    if message.outcome not in OUTCOMES:
        raise WireError(f"decision.outcome is {printable(message.outcome)!r}, none that is known")
    check_count(len(message.verdicts), "decision.verdicts", MOST_LAYERS + 1)
    check_count(len(message.moves), "decision.moves", MOST_LAYERS + 1)
    return MadeDecision(
        at=check_time(message.at, "decision.at"),
        solve_seconds=check_seconds(message.solve_seconds, "decision.solve_seconds"),
        plan_id=check_count(message.plan_id, "decision.plan_id", LAST_VERSION),
        verdicts=tuple(map(decode_verdict, message.verdicts)),
        moves=tuple(map(_decode_moves, message.moves)),
        outcome=message.outcome,
        reason=printable(message.reason, LONGEST_MESSAGE),
        committed=check_count(message.committed, "decision.committed", MOST_LAYERS + 1),
    )


def _decode_moves(message: operator_pb2.LayerMoves) -> LayerMoves:
    moves_M5 = unpack(message.moves, (None, 5), "moves.moves")
    if moves_M5.size and moves_M5.min() < 0:
        raise WireError("moves.moves: no rank, slot or expert is below 0")
    return LayerMoves(check_count(message.layer, "moves.layer", MOST_LAYERS), moves_M5)
