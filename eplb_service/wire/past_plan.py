"""What a service reports of past plans: what each decided about every layer, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass

from eplb_service.wire.fields import (
    LAST_VERSION,
    LONGEST_MESSAGE,
    MOST_BYTES,
    MOST_LAYERS,
    MOST_RANKS,
    MOST_SLOTS,
    WireError,
    check_count,
    check_measured,
    check_time,
    printable,
)
from eplb_service.wire.generated import operator_pb2

MOST_PLANS = 100
"""Plans in one answer."""
OUTCOMES = ("", "done", "refused", "aborted", "timed_out", "interrupted")
"""How a plan ended; empty while it is under way."""
_MOST_MOVES = MOST_RANKS * MOST_SLOTS + 1


@dataclass(frozen=True)
class PastVerdict:
    """What a plan decided about one layer; ratios are NaN for a layer without tokens.

    ``hindsight`` is the ratio that a placement made for this very window would have had, or ``None``; ``bytes`` are the
    weights that the moves send.
    """

    layer: int
    par_seen: float
    par_planned: float
    noise_floor: float
    moves: int
    changed: bool
    reason: str
    hindsight: float | None = None
    bytes: int = 0


@dataclass(frozen=True)
class PastPlan:
    """One plan.

    Parameters
    ----------
    at
        Seconds since 1970 at which it was offered.
    outcome, reason
        One of ``OUTCOMES``, and why where it was not done.
    committed
        Layers that were switched.
    """

    plan_id: int
    at: float
    leader_term: int
    base_epoch: int
    outcome: str
    reason: str
    committed: int
    verdicts: tuple[PastVerdict, ...] = ()


def encode_past_plan(plan: PastPlan) -> operator_pb2.PastPlan:
    """The message."""
    verdicts = [encode_verdict(verdict) for verdict in plan.verdicts]
    return operator_pb2.PastPlan(
        **{**vars(plan), "reason": printable(plan.reason, LONGEST_MESSAGE), "verdicts": verdicts}
    )


def decode_past_plan(message: operator_pb2.PastPlan) -> PastPlan:
    """The plan; raises ``WireError`` naming the field that cannot be what it is."""
    if message.outcome not in OUTCOMES:
        raise WireError(f"past_plan.outcome is {printable(message.outcome)!r}, none that is known")
    check_count(len(message.verdicts), "past_plan.verdicts", MOST_LAYERS + 1)
    return PastPlan(
        plan_id=check_count(message.plan_id, "past_plan.plan_id", LAST_VERSION),
        at=check_time(message.at, "past_plan.at"),
        leader_term=check_count(message.leader_term, "past_plan.leader_term", LAST_VERSION),
        base_epoch=check_count(message.base_epoch, "past_plan.base_epoch", LAST_VERSION),
        outcome=message.outcome,
        reason=printable(message.reason, LONGEST_MESSAGE),
        committed=check_count(message.committed, "past_plan.committed", MOST_LAYERS + 1),
        verdicts=tuple(map(decode_verdict, message.verdicts)),
    )


def decode_history(message: operator_pb2.GetHistoryResponse) -> tuple[PastPlan, ...]:
    """The newest plans, newest first; raises as ``decode_past_plan`` does."""
    check_count(len(message.plans), "history.plans", MOST_PLANS + 1)
    return tuple(map(decode_past_plan, message.plans))


def encode_verdict(verdict: PastVerdict) -> operator_pb2.PastVerdict:
    """The message."""
    return operator_pb2.PastVerdict(**{**vars(verdict), "reason": printable(verdict.reason, LONGEST_MESSAGE)})


def decode_verdict(message: operator_pb2.PastVerdict) -> PastVerdict:
    """What was decided about one layer; raises as ``decode_past_plan`` does."""
    hindsight = message.hindsight if message.HasField("hindsight") else None
    return PastVerdict(
        layer=check_count(message.layer, "verdict.layer", MOST_LAYERS),
        par_seen=check_measured(message.par_seen, "verdict.par_seen"),
        par_planned=check_measured(message.par_planned, "verdict.par_planned"),
        noise_floor=check_measured(message.noise_floor, "verdict.noise_floor"),
        moves=check_count(message.moves, "verdict.moves", _MOST_MOVES),
        changed=message.changed,
        reason=printable(message.reason, LONGEST_MESSAGE),
        hindsight=None if hindsight is None else check_measured(hindsight, "verdict.hindsight"),
        bytes=check_count(message.bytes, "verdict.bytes", MOST_BYTES),
    )
