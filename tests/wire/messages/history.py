"""Messages that say what was decided, and what came of it."""

from __future__ import annotations

import numpy as np
from google.protobuf.message import Message
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eplb_service.wire.balance import (
    Balance,
    BalancePoint,
    LayerMoves,
    MadeDecision,
    decode_balance,
    encode_balance,
)
from eplb_service.wire.fields import MOST_BYTES
from eplb_service.wire.generated import operator_pb2, tensor_pb2
from eplb_service.wire.past_plan import OUTCOMES, PastPlan, PastVerdict, decode_past_plan, encode_past_plan
from tests.wire.messages.kind import (
    ACCEPTED,
    MEASURED,
    NO_SECONDS,
    NOT_MEASURED,
    PAST_TOTALS,
    PAST_VERSIONS,
    RATIOS,
    SECONDS,
    TEXTS,
    VERSIONS,
    Kind,
    packed,
)


def _verdicts() -> st.SearchStrategy[tuple[PastVerdict, ...]]:
    counts, sizes = st.integers(0, 511), st.integers(0, MOST_BYTES - 1)
    one = st.builds(
        PastVerdict,
        *(counts, MEASURED, MEASURED, MEASURED, counts, st.booleans(), TEXTS, st.none() | RATIOS, sizes),
    )
    return st.lists(one, min_size=1, max_size=3).map(tuple)


def past_plans() -> st.SearchStrategy[PastPlan]:
    outcomes = st.sampled_from(OUTCOMES)
    return st.builds(
        PastPlan,
        *(VERSIONS, st.floats(0, 1e10), VERSIONS, VERSIONS, outcomes, TEXTS, st.integers(0, 511)),
        _verdicts(),
    )


def balances() -> st.SearchStrategy[Balance]:
    times, counts = st.floats(0, 1e10), st.integers(0, 511)
    moves_M5 = hnp.arrays(np.int32, st.tuples(st.integers(1, 3), st.just(5)), elements=counts)
    moves = st.lists(st.builds(LayerMoves, counts, moves_M5), min_size=1, max_size=2).map(tuple)
    outcomes = st.sampled_from(OUTCOMES)
    decisions = st.builds(MadeDecision, times, SECONDS, VERSIONS, _verdicts(), moves, outcomes, TEXTS, counts)
    points = st.builds(BalancePoint, times, MEASURED, MEASURED, MEASURED, VERSIONS)
    loads_LR = hnp.arrays(np.int32, (2, 3), elements=st.integers(0, 4_000_000))
    listed = st.lists(points, min_size=1, max_size=3).map(tuple)
    return st.builds(Balance, listed, loads_LR, st.integers(0, 1 << 16), decisions, decisions)


_REFUSED_VERDICT = {
    "layer": (512, 1 << 31),
    "par_seen": NOT_MEASURED,
    "par_planned": NOT_MEASURED,
    "noise_floor": NOT_MEASURED,
    "moves": (1 << 31,),
    "changed": ACCEPTED,
    "reason": ACCEPTED,
    "hindsight": NOT_MEASURED,
    "bytes": (MOST_BYTES, (1 << 64) - 1),
}
_REFUSED_DECISION = {
    "at": NO_SECONDS,
    "solve_seconds": NO_SECONDS,
    "plan_id": PAST_VERSIONS,
    **{f"verdicts.{name}": values for name, values in _REFUSED_VERDICT.items()},
    "moves.layer": (512, 1 << 31),
    "moves.moves": (packed(1, 4), packed(1, 5, value=-1), tensor_pb2.PackedArray()),
    "outcome": ("well", "\x1b[2J"),
    "reason": ACCEPTED,
    "committed": (513, 1 << 31),
}

KINDS: dict[str, Kind] = {
    "past_plan": Kind(
        past_plans(),
        encode_past_plan,
        decode_past_plan,
        {
            "plan_id": PAST_VERSIONS,
            "at": NO_SECONDS,
            "leader_term": PAST_VERSIONS,
            "base_epoch": PAST_VERSIONS,
            "outcome": ("well", "\x1b[2J"),
            "reason": ACCEPTED,
            "committed": (513, 1 << 31),
            **{f"verdicts.{name}": values for name, values in _REFUSED_VERDICT.items()},
        },
    ),
    "balance": Kind(
        balances(),
        encode_balance,
        decode_balance,
        {
            "points.at": NO_SECONDS,
            "points.par": NOT_MEASURED,
            "points.par_planned": NOT_MEASURED,
            "points.noise_floor": NOT_MEASURED,
            "points.layers_switched": PAST_TOTALS,
            "rank_loads": (packed(1), packed(1, 1, value=-1), packed(1, 1, value=1 << 30)),
            "load_steps": ((1 << 16) + 1, 1 << 31),
            **{f"last_decision.{name}": values for name, values in _REFUSED_DECISION.items()},
            **{f"last_plan.{name}": values for name, values in _REFUSED_DECISION.items()},
        },
    ),
}


BY_NAME: dict[str, type[Message]] = {
    "past_plan": operator_pb2.PastPlan,
    "balance": operator_pb2.GetBalanceResponse,
}
