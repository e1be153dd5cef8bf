"""Every message of the wire: how good ones are drawn, encoded and decoded, and values that each field must refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from google.protobuf.message import Message
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eplb_service.placement import Placement, default_log2phy, even_log2phy
from eplb_service.wire.balance import (
    Balance,
    BalancePoint,
    LayerMoves,
    MadeDecision,
    decode_balance,
    encode_balance,
)
from eplb_service.wire.codec import pack
from eplb_service.wire.deployment_status import (
    AgentStatus,
    DeploymentStatus,
    LayerStatus,
    PlacementInForce,
    decode_agent_status,
    decode_deployment_status,
    decode_layer_status,
    decode_placement,
    encode_agent_status,
    encode_deployment_status,
    encode_layer_status,
    encode_placement,
)
from eplb_service.wire.fields import LAST_DIGEST, LAST_STEP, LAST_VERSION, LONGEST_TEXT, MOST_BYTES
from eplb_service.wire.generated import agent_pb2, operator_pb2, tensor_pb2
from eplb_service.wire.heat import HeatReport, StepPhase, decode_heat_report, encode_heat_report
from eplb_service.wire.hello import (
    Hello,
    Shape,
    Welcome,
    decode_hello,
    decode_welcome,
    encode_hello,
    encode_welcome,
)
from eplb_service.wire.move_price import MOVE_PRICES, PricedMoves
from eplb_service.wire.past_plan import OUTCOMES, PastPlan, PastVerdict, decode_past_plan, encode_past_plan
from eplb_service.wire.plan import RankLayer, RankPlan, decode_plan, encode_plan, table_digest
from eplb_service.wire.reporting import (
    MOST_BLOCKS,
    MOST_REPORT_STEPS,
    Reporting,
    decode_reporting,
    encode_reporting,
)
from eplb_service.wire.status import (
    Heartbeat,
    PlanState,
    PlanStatus,
    decode_heartbeat,
    decode_plan_status,
    encode_heartbeat,
    encode_plan_status,
)
from eplb_service.wire.watch import (
    ServedModel,
    SwitchedLayer,
    decode_served,
    decode_switched,
    encode_served,
    encode_switched,
)
from eplb_service.wire.worth import PRICES, Worth

SHAPE = Shape(ranks=2, layers=3, experts=4, slots=3, bytes_per_expert=64)
RANK = 1
MOST_STEPS = 8

ACCEPTED: tuple[Any, ...] = ()
"""Marks a field that takes whatever its type can hold."""

_VERSIONS = st.integers(0, LAST_VERSION - 1)
_DIGESTS = st.integers(0, LAST_DIGEST - 1)
_STEPS = st.integers(0, LAST_STEP - 1)
_SECONDS = st.floats(0, 1e6)
_RATIOS = st.floats(0, 1e300)
_MEASURED = _RATIOS | st.just(float("nan"))
_TEXTS = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S"]), max_size=40)
_CONTROL = "rank\x1b[2J"
_LONG = "x" * (LONGEST_TEXT + 1)


@dataclass(frozen=True)
class Kind:
    """One message.

    Parameters
    ----------
    values
        Draws values that are sent.
    encode, decode
        Both directions.
    refused
        For each field, by its path in the message, values that must be refused; ``ACCEPTED`` where there is none.
    """

    values: st.SearchStrategy[Any]
    encode: Callable[[Any], Message]
    decode: Callable[[Any], Any]
    refused: dict[str, tuple[Any, ...]]


def placements() -> st.SearchStrategy[Placement]:
    """Placements of ``SHAPE``: the linear one with its experts renamed in each layer."""
    first = Placement.linear(SHAPE.layers, SHAPE.experts, SHAPE.ranks, SHAPE.slots)
    orders = st.lists(st.permutations(range(SHAPE.experts)), min_size=SHAPE.layers, max_size=SHAPE.layers)
    return orders.map(
        lambda names: Placement(
            np.stack([np.array(order)[row] for order, row in zip(names, first.phy2log_LRS, strict=True)]),
            SHAPE.experts,
        )
    )


def layer_epochs(most: int = LAST_VERSION - 1) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*[st.integers(0, most)] * SHAPE.layers)


@st.composite
def served_models(draw: st.DrawFn) -> ServedModel:
    placement = draw(placements())
    nodes_R = draw(st.tuples(*[st.integers(0, 4095)] * SHAPE.ranks))
    tables_RLE = draw(st.sampled_from((None, placement.default_log2phy())))
    return ServedModel(
        SHAPE, nodes_R, placement, draw(layer_epochs()), draw(st.integers(1, 1 << 20)), tables_RLE
    )


@st.composite
def switched_layers(draw: st.DrawFn) -> SwitchedLayer:
    phy2log_RS = draw(placements()).phy2log_LRS[0]
    table_RE = draw(st.sampled_from((None, default_log2phy(phy2log_RS, SHAPE.experts))))
    return SwitchedLayer(draw(st.integers(0, SHAPE.layers - 1)), draw(_VERSIONS), phy2log_RS, table_RE)


@st.composite
def hellos(draw: st.DrawFn) -> Hello:
    placement, epoch, width = draw(placements()), draw(_VERSIONS), draw(st.sampled_from((1, 3)))
    return Hello(
        deployment=draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True)),
        rank=draw(st.integers(0, SHAPE.ranks - 1)),
        node=draw(_TEXTS),
        token_group=draw(st.integers(0, 4095)),
        group_id=draw(_TEXTS.filter(bool)),
        shape=replace(SHAPE, width=width, rank_bound=draw(st.booleans())),
        epoch=epoch,
        digest=draw(_DIGESTS),
        layer_epochs=draw(layer_epochs(epoch)),
        slots_LS=np.ascontiguousarray(placement.phy2log_LRS[:, 0]),
        log2phy_LE=even_log2phy(placement, width)[0],
        agent_version=draw(_TEXTS),
        highest_term=draw(_VERSIONS),
    )


@st.composite
def heat_reports(draw: st.DrawFn) -> HeatReport:
    steps = draw(st.integers(1, MOST_STEPS))
    counts = st.integers(0, 1 << 20)
    slots_TLS = draw(hnp.arrays(np.int32, (steps, SHAPE.layers, SHAPE.slots), elements=counts))
    sources = hnp.arrays(np.int32, (steps, SHAPE.layers, SHAPE.experts), elements=counts)
    sums = hnp.arrays(np.int32, (SHAPE.layers, SHAPE.experts), elements=counts)
    by_step = draw(st.none() | sources)
    tokens = hnp.arrays(np.int64, (steps,), elements=st.integers(0, (1 << 32) - 1))
    phases = st.lists(st.sampled_from(StepPhase), min_size=steps, max_size=steps)
    return HeatReport(
        draw(_STEPS),
        draw(layer_epochs()),
        slots_TLS,
        np.array(draw(phases), dtype=np.uint8),
        by_step,
        draw(st.none() | tokens),
        draw(_STEPS),
        draw(st.none() | sums) if by_step is None else None,
        draw(st.none() | tokens),
    )


def reportings() -> st.SearchStrategy[Reporting]:
    return st.builds(Reporting, st.booleans(), st.integers(1, MOST_BLOCKS), st.integers(0, MOST_REPORT_STEPS))


@st.composite
def plans(draw: st.DrawFn) -> RankPlan:
    """Plans that move one expert of rank 0 to rank 1 per layer."""
    layers = []
    for layer in draw(st.lists(st.integers(0, SHAPE.layers - 1), min_size=1, unique=True)):
        new_RS = draw(placements()).phy2log_LRS[layer]
        tables_RE = default_log2phy(new_RS, SHAPE.experts)
        slot = draw(st.integers(0, SHAPE.slots - 1))
        moves_M5 = np.array([[0, 0, RANK, slot, new_RS[RANK, slot]]], dtype=np.int32)
        digests = tuple(table_digest(table_E) for table_E in tables_RE)
        layers.append(RankLayer(layer, new_RS, tables_RE[RANK], digests, moves_M5))
    return RankPlan.of(draw(_VERSIONS), draw(_VERSIONS), draw(_VERSIONS), draw(_DIGESTS), tuple(layers))


def worths() -> st.SearchStrategy[Worth]:
    """What balancing may be worth."""
    times, steps, number = st.floats(0, 1e9), st.integers(0, 1 << 16), st.floats(-1e9, 1e9)
    return st.builds(
        Worth,
        steps,
        times,
        times,
        times,
        _TEXTS,
        number,
        number,
        number,
        st.sampled_from(PRICES),
        _TEXTS,
        steps,
        *(st.none() | number for _ in range(4)),
    )


@st.composite
def deployment_statuses(draw: st.DrawFn) -> DeploymentStatus:
    totals = ("steps_received", "steps_lost", "layers_switched", "experts_moved", "bytes_moved")
    return DeploymentStatus(
        deployment=draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True)),
        layers=draw(st.integers(0, 512)),
        experts=draw(st.integers(0, 4096)),
        ranks=draw(st.integers(0, 4096)),
        slots=draw(st.integers(0, 512)),
        agents_connected=draw(st.integers(0, 4096)),
        epoch=draw(_VERSIONS),
        digest=draw(_DIGESTS),
        par=draw(_RATIOS),
        window_steps=draw(st.integers(0, 1 << 16)),
        paused=draw(st.booleans()),
        plan_id=draw(_VERSIONS),
        last_decision=draw(_TEXTS),
        problems=tuple(draw(st.lists(_TEXTS, max_size=3))),
        leader_term=draw(_VERSIONS),
        worth=draw(st.none() | worths()),
        move_price=draw(st.none() | st.builds(PricedMoves, _RATIOS, st.sampled_from(MOVE_PRICES), _TEXTS)),
        **{name: draw(st.integers(0, LAST_VERSION)) for name in totals},
    )


def _verdicts() -> st.SearchStrategy[tuple[PastVerdict, ...]]:
    counts, sizes = st.integers(0, 511), st.integers(0, MOST_BYTES - 1)
    one = st.builds(
        PastVerdict,
        *(counts, _MEASURED, _MEASURED, _MEASURED, counts, st.booleans(), _TEXTS, st.none() | _RATIOS, sizes),
    )
    return st.lists(one, min_size=1, max_size=3).map(tuple)


def past_plans() -> st.SearchStrategy[PastPlan]:
    outcomes = st.sampled_from(OUTCOMES)
    return st.builds(
        PastPlan,
        *(_VERSIONS, st.floats(0, 1e10), _VERSIONS, _VERSIONS, outcomes, _TEXTS, st.integers(0, 511)),
        _verdicts(),
    )


def balances() -> st.SearchStrategy[Balance]:
    times, counts = st.floats(0, 1e10), st.integers(0, 511)
    moves_M5 = hnp.arrays(np.int32, st.tuples(st.integers(1, 3), st.just(5)), elements=counts)
    moves = st.lists(st.builds(LayerMoves, counts, moves_M5), min_size=1, max_size=2).map(tuple)
    outcomes = st.sampled_from(OUTCOMES)
    decisions = st.builds(
        MadeDecision, times, _SECONDS, _VERSIONS, _verdicts(), moves, outcomes, _TEXTS, counts
    )
    points = st.builds(BalancePoint, times, _MEASURED, _MEASURED, _MEASURED, _VERSIONS)
    loads_LR = hnp.arrays(np.int32, (2, 3), elements=st.integers(0, 4_000_000))
    listed = st.lists(points, min_size=1, max_size=3).map(tuple)
    return st.builds(Balance, listed, loads_LR, st.integers(0, 1 << 16), decisions, decisions)


def _array(*shape: int, value: int = 0) -> tensor_pb2.PackedArray:
    return pack(np.full(shape, value, dtype=np.int64))


_BAD_COUNTS = (_array(1), _array(1, SHAPE.layers, SHAPE.slots, value=-1), tensor_pb2.PackedArray())
_WRONG_SHAPES = (_array(1), _array(2, 2), tensor_pb2.PackedArray(), tensor_pb2.PackedArray(dtype=99))
_REFUSED_SHAPE = {
    "shape.layers": (0, 1 << 20, 2),
    "shape.experts": (0, 1 << 20, 7, 5),
    "shape.slots": (0, 1 << 20, 5, 2),
    "shape.bytes_per_expert": (MOST_BYTES, (1 << 64) - 1),
    "shape.dealing_width": (65, 1 << 20),
    "shape.rank_bound": ACCEPTED,
}
_PAST_VERSIONS = (LAST_VERSION, (1 << 64) - 1)
_PAST_BLOCKS = (MOST_BLOCKS + 1, (1 << 32) - 1)
_PAST_DIGESTS = (LAST_DIGEST, (1 << 64) - 1)
_PAST_STEPS = (LAST_STEP, (1 << 62) - 100, (1 << 64) - 1)
_PAST_TOTALS = (LAST_VERSION + 1, (1 << 64) - 1)
_NO_RATIOS = (float("nan"), float("inf"), -1.0)
_NOT_FINITE = (float("nan"), float("inf"), float("-inf"))
_NOT_MEASURED = (float("inf"), -1.0, float("-inf"))
_NO_SECONDS = (float("nan"), float("inf"), -1.0, 1e300)

_REFUSED_VERDICT = {
    "layer": (512, 1 << 31),
    "par_seen": _NOT_MEASURED,
    "par_planned": _NOT_MEASURED,
    "noise_floor": _NOT_MEASURED,
    "moves": (1 << 31,),
    "changed": ACCEPTED,
    "reason": ACCEPTED,
    "hindsight": _NOT_MEASURED,
    "bytes": (MOST_BYTES, (1 << 64) - 1),
}
_REFUSED_DECISION = {
    "at": _NO_SECONDS,
    "solve_seconds": _NO_SECONDS,
    "plan_id": _PAST_VERSIONS,
    **{f"verdicts.{name}": values for name, values in _REFUSED_VERDICT.items()},
    "moves.layer": (512, 1 << 31),
    "moves.moves": (_array(1, 4), _array(1, 5, value=-1), tensor_pb2.PackedArray()),
    "outcome": ("well", "\x1b[2J"),
    "reason": ACCEPTED,
    "committed": (513, 1 << 31),
}

KINDS: dict[str, Kind] = {
    "hello": Kind(
        hellos(),
        encode_hello,
        decode_hello,
        {
            "protocol_version": (0, 1, 1 << 31),
            "deployment": ("", "-x", "a b", "a\x1b", "x" * 64),
            "rank": (2, 1 << 31),
            "ep_size": (0, 1, 1 << 20),
            "node": (_CONTROL, "a\nb", _LONG),
            "token_group": (4096, 1 << 31),
            **_REFUSED_SHAPE,
            "placement.epoch": _PAST_VERSIONS,
            "placement.digest": _PAST_DIGESTS,
            "placement.layer_epochs": ([], [0], [0] * 4, [LAST_VERSION] * 3),
            "placement.local_physical_to_logical": _WRONG_SHAPES,
            "placement.log2phy": _WRONG_SHAPES,
            "agent_version": (_CONTROL, _LONG),
            "group_id": ("", _CONTROL, _LONG),
            "highest_term": _PAST_VERSIONS,
        },
    ),
    "welcome": Kind(
        st.builds(Welcome, _TEXTS, _VERSIONS, st.integers(1, 1 << 16), st.floats(0.05, 60), reportings()),
        encode_welcome,
        decode_welcome,
        {
            "protocol_version": (0, 1),
            "service_version": (_CONTROL, _LONG),
            "leader_term": _PAST_VERSIONS,
            "report_steps": (0, (1 << 16) + 1),
            "heartbeat_seconds": (float("nan"),),
            "reporting.source_sums": ACCEPTED,
            "reporting.one_in": _PAST_BLOCKS,
            "reporting.report_steps": ((1 << 16) + 1,),
        },
    ),
    "reporting": Kind(
        reportings(),
        encode_reporting,
        decode_reporting,
        {"source_sums": ACCEPTED, "one_in": _PAST_BLOCKS, "report_steps": ((1 << 16) + 1,)},
    ),
    "heat_report": Kind(
        heat_reports(),
        encode_heat_report,
        lambda message: decode_heat_report(message, SHAPE, MOST_STEPS),
        {
            "first_step": _PAST_STEPS,
            "layer_epochs": ([], [0] * 4, [LAST_VERSION] * 3, [(1 << 64) - 1] * 3),
            "slot_counts": _BAD_COUNTS,
            "source_counts": _BAD_COUNTS,
            "source_sums": (*_BAD_COUNTS, _array(SHAPE.layers, SHAPE.experts, value=-1), _array(2, 3, 4)),
            "step_phases": (b"", b"\x00" * 4, b"\x04", b"\x01" * (MOST_STEPS + 1)),
            "dropped_steps": _PAST_STEPS,
            "step_tokens": ([1] * (MOST_STEPS + 1),),
            "step_micros": ([1] * (MOST_STEPS + 1),),
        },
    ),
    "plan": Kind(
        plans(),
        encode_plan,
        lambda message: decode_plan(message, SHAPE, RANK),
        {
            "plan_id": _PAST_VERSIONS,
            "leader_term": _PAST_VERSIONS,
            "base_epoch": _PAST_VERSIONS,
            "base_digest": _PAST_DIGESTS,
            "layers.layer": (3, 1 << 31),
            "layers.physical_to_logical": _WRONG_SHAPES,
            "layers.log2phy": _WRONG_SHAPES,
            "layers.log2phy_digests": ([], [0], [0, 0], [LAST_DIGEST] * 2),
            "layers.moves": (_array(1, 4), _array(1, 5, value=-1), _array(1, 5, value=9)),
            "digest": (*_PAST_DIGESTS, 0),
        },
    ),
    "plan_status": Kind(
        st.builds(
            PlanStatus,
            _VERSIONS,
            st.sampled_from(PlanState),
            st.integers(0, 511),
            _TEXTS,
            _VERSIONS,
            _DIGESTS,
            st.integers(0, MOST_BYTES - 1),
            _SECONDS,
            _SECONDS,
            _STEPS,
        ),
        encode_plan_status,
        decode_plan_status,
        {
            "plan_id": _PAST_VERSIONS,
            "layer": (512, 1 << 31),
            "state": (0, 6, 99),
            "reason": ACCEPTED,
            "epoch": _PAST_VERSIONS,
            "digest": _PAST_DIGESTS,
            "bytes_received": (MOST_BYTES, (1 << 64) - 1),
            "transfer_seconds": _NO_SECONDS,
            "commit_seconds": _NO_SECONDS,
            "step": _PAST_STEPS,
        },
    ),
    "heartbeat": Kind(
        st.builds(Heartbeat, _STEPS, _VERSIONS, _DIGESTS, _TEXTS),
        encode_heartbeat,
        decode_heartbeat,
        {"step": _PAST_STEPS, "epoch": _PAST_VERSIONS, "digest": _PAST_DIGESTS, "error": ACCEPTED},
    ),
    "served": Kind(
        served_models(),
        encode_served,
        decode_served,
        {
            **_REFUSED_SHAPE,
            "ranks": (0, 1, 1 << 20),
            "nodes": ([], [0] * 3, [4096] * 2),
            "physical_to_logical": (*_WRONG_SHAPES, _array(SHAPE.layers, SHAPE.ranks, SHAPE.slots)),
            "layer_epochs": ([], [0] * 4, [LAST_VERSION] * 3),
            "pending_steps": (0, (1 << 20) + 1),
            "log2phy": (*_WRONG_SHAPES, _array(SHAPE.ranks, SHAPE.layers, SHAPE.experts, value=99)),
        },
    ),
    "switched": Kind(
        switched_layers(),
        encode_switched,
        lambda message: decode_switched(message, SHAPE),
        {
            "layer": (3, 1 << 31),
            "epoch": _PAST_VERSIONS,
            "physical_to_logical": (*_WRONG_SHAPES, _array(SHAPE.ranks, SHAPE.slots)),
            "log2phy": (*_WRONG_SHAPES, _array(SHAPE.ranks, SHAPE.experts, value=99)),
        },
    ),
    "deployment_status": Kind(
        deployment_statuses(),
        encode_deployment_status,
        decode_deployment_status,
        {
            "deployment": ("", "a\x1b", "x" * 64),
            "layers": (513, 1 << 31),
            "experts": (4097, 1 << 31),
            "ranks": (4097, 1 << 31),
            "slots": (513, 1 << 31),
            "agents_connected": (4097, 1 << 31),
            "epoch": _PAST_VERSIONS,
            "digest": _PAST_DIGESTS,
            "par": _NO_RATIOS,
            "window_steps": ((1 << 16) + 1, 1 << 31),
            "steps_received": _PAST_TOTALS,
            "steps_lost": _PAST_TOTALS,
            "layers_switched": _PAST_TOTALS,
            "experts_moved": _PAST_TOTALS,
            "bytes_moved": _PAST_TOTALS,
            "paused": ACCEPTED,
            "plan_id": _PAST_VERSIONS,
            "last_decision": ACCEPTED,
            "problems": (["x"] * 8193,),
            "leader_term": _PAST_VERSIONS,
            "worth.steps": ((1 << 16) + 1, 1 << 31),
            "worth.left_alone_ms": _NO_RATIOS,
            "worth.serving_ms": _NO_RATIOS,
            "worth.best_ms": _NO_RATIOS,
            "worth.best": ACCEPTED,
            "worth.gain_ms": _NOT_FINITE,
            "worth.gain_low_ms": _NOT_FINITE,
            "worth.gain_high_ms": _NOT_FINITE,
            "worth.price_kind": ("", "free", _CONTROL),
            "worth.price": ACCEPTED,
            "worth.timed_steps": ((1 << 16) + 1, 1 << 31),
            "worth.step_ms": _NOT_FINITE,
            "worth.gain_percent": _NOT_FINITE,
            "worth.tokens_per_second": _NOT_FINITE,
            "worth.tokens_per_second_won": _NOT_FINITE,
            "worth.verdict": ACCEPTED,
            "move_price.price": _NO_RATIOS,
            "move_price.kind": ("", "free", _CONTROL),
            "move_price.reason": ACCEPTED,
        },
    ),
    "layer_status": Kind(
        st.builds(LayerStatus, st.integers(0, 511), _RATIOS, _MEASURED, _VERSIONS),
        encode_layer_status,
        decode_layer_status,
        {
            "layer": (512, 1 << 31),
            "par": _NO_RATIOS,
            "planned_par": _NOT_MEASURED,
            "epoch": _PAST_VERSIONS,
        },
    ),
    "agent_status": Kind(
        st.builds(
            AgentStatus,
            *(st.integers(0, 4095), _TEXTS, st.booleans(), _STEPS, _VERSIONS, _TEXTS, _TEXTS, _STEPS),
            st.none() | _SECONDS,
        ),
        encode_agent_status,
        decode_agent_status,
        {
            "rank": (4096, 1 << 31),
            "node": (_CONTROL, _LONG),
            "connected": ACCEPTED,
            "step": (2 * LAST_STEP, (1 << 64) - 1),
            "epoch": _PAST_VERSIONS,
            "error": ACCEPTED,
            "agent_version": (_CONTROL, _LONG),
            "dropped_steps": _PAST_STEPS,
            "silent_seconds": _NO_SECONDS,
        },
    ),
    "placement": Kind(
        st.builds(
            lambda epoch, digest, placement: PlacementInForce(
                epoch, digest, placement, placement.default_log2phy()
            ),
            *(_VERSIONS, _DIGESTS, placements()),
        ),
        encode_placement,
        decode_placement,
        {
            "epoch": _PAST_VERSIONS,
            "digest": _PAST_DIGESTS,
            "experts": (0, 1 << 20),
            "physical_to_logical": (*_WRONG_SHAPES, _array(SHAPE.layers, SHAPE.ranks, SHAPE.slots)),
            "log2phy": (*_WRONG_SHAPES, _array(SHAPE.ranks, SHAPE.layers, SHAPE.experts, value=99)),
        },
    ),
    "past_plan": Kind(
        past_plans(),
        encode_past_plan,
        decode_past_plan,
        {
            "plan_id": _PAST_VERSIONS,
            "at": _NO_SECONDS,
            "leader_term": _PAST_VERSIONS,
            "base_epoch": _PAST_VERSIONS,
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
            "points.at": _NO_SECONDS,
            "points.par": _NOT_MEASURED,
            "points.par_planned": _NOT_MEASURED,
            "points.noise_floor": _NOT_MEASURED,
            "points.layers_switched": _PAST_TOTALS,
            "rank_loads": (_array(1), _array(1, 1, value=-1), _array(1, 1, value=1 << 30)),
            "load_steps": ((1 << 16) + 1, 1 << 31),
            **{f"last_decision.{name}": values for name, values in _REFUSED_DECISION.items()},
            **{f"last_plan.{name}": values for name, values in _REFUSED_DECISION.items()},
        },
    ),
}

BY_NAME: dict[str, type[Message]] = {
    "hello": agent_pb2.Hello,
    "welcome": agent_pb2.Welcome,
    "heat_report": agent_pb2.HeatReport,
    "reporting": agent_pb2.Reporting,
    "plan": agent_pb2.Plan,
    "plan_status": agent_pb2.PlanStatus,
    "heartbeat": agent_pb2.Heartbeat,
    "served": operator_pb2.ServedModel,
    "switched": operator_pb2.SwitchedLayer,
    "deployment_status": operator_pb2.DeploymentStatus,
    "layer_status": operator_pb2.LayerStatus,
    "agent_status": operator_pb2.AgentStatus,
    "placement": operator_pb2.GetPlacementResponse,
    "past_plan": operator_pb2.PastPlan,
    "balance": operator_pb2.GetBalanceResponse,
}
