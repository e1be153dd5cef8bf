"""Every message of the wire: how good ones are drawn, encoded and decoded, and values that each field must refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from google.protobuf.message import Message
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eplb_service.placement import Placement, default_log2phy
from eplb_service.wire import operator as wire
from eplb_service.wire.agent import (
    MOST_BLOCKS,
    MOST_REPORT_STEPS,
    Heartbeat,
    Hello,
    PlanState,
    PlanStatus,
    Reporting,
    Shape,
    Welcome,
    decode_hello,
    decode_welcome,
)
from eplb_service.wire.codec import decode, encode, pack
from eplb_service.wire.fields import (
    LAST_DIGEST,
    LAST_MICROS,
    LAST_STEP,
    LAST_VERSION,
    LONGEST_TEXT,
    MOST_BYTES,
)
from eplb_service.wire.generated import agent_pb2, operator_pb2, tensor_pb2
from eplb_service.wire.heat import HeatReport, StepPhase, decode_heat_report
from eplb_service.wire.plan import RankLayer, RankPlan, decode_plan, table_digest

SHAPE = Shape(ranks=2, layers=3, experts=4, slots=3, bytes_per_expert=64)
RANK, MOST_STEPS = 1, 8
ACCEPTED: tuple[Any, ...] = ()
"""Marks a field that takes whatever its type can hold."""

VERSIONS, DIGESTS = st.integers(0, LAST_VERSION - 1), st.integers(0, LAST_DIGEST - 1)
STEPS, MICROS = st.integers(0, LAST_STEP - 1), st.integers(0, LAST_MICROS - 1)
STATED_BYTES = st.none() | st.integers(0, MOST_BYTES - 1)
SECONDS, RATIOS = st.floats(0, 1e6), st.floats(0, 1e300)
MEASURED = RATIOS | st.just(float("nan"))
TEXTS = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S"]), max_size=40)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True)
OUTCOMES = st.sampled_from(("", "done", "refused", "aborted", "timed_out", "interrupted"))
SMALL = st.integers(0, 511)


def packed(*shape: int, value: int = 0) -> tensor_pb2.PackedArray:
    return pack(np.full(shape, value, dtype=np.int64))


def past(limit: int) -> tuple[int, int]:
    return limit, (1 << 64) - 1


_CONTROL, _LONG = "rank\x1b[2J", "x" * (LONGEST_TEXT + 1)
_WRONG_SHAPES = (packed(1), packed(2, 2), tensor_pb2.PackedArray(), tensor_pb2.PackedArray(dtype=99))
_BAD_COUNTS = (packed(1), packed(1, SHAPE.layers, SHAPE.slots, value=-1), tensor_pb2.PackedArray())
_NO_SECONDS = (float("nan"), float("inf"), -1.0, 1e300)
_NO_RATIOS = (float("nan"), float("inf"), -1.0)
_NOT_MEASURED = (float("inf"), -1.0, float("-inf"))
_NOT_FINITE = (float("nan"), float("inf"), float("-inf"))
_NONE_KNOWN = ("well", "\x1b[2J")
_PAST_WINDOW = ((1 << 16) + 1, 1 << 31)
_REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("epoch", "base_epoch", "plan_id", "leader_term", "highest_term"), past(LAST_VERSION)),
    **dict.fromkeys(("digest", "base_digest"), past(LAST_DIGEST)),
    **dict.fromkeys(("step", "first_step", "dropped_steps", "calls"), (*past(LAST_STEP), (1 << 62) - 100)),
    **dict.fromkeys(("call_micros", "vote_micros"), past(LAST_MICROS)),
    **dict.fromkeys(
        ("bytes", "bytes_received", "staging_bytes", "ring_bytes", "bytes_per_expert"), past(MOST_BYTES)
    ),
    **dict.fromkeys(
        ("steps_received", "steps_lost", "layers_switched", "experts_moved", "bytes_moved"),
        past(LAST_VERSION + 1),
    ),
    **dict.fromkeys(
        ("at", "solve_seconds", "transfer_seconds", "commit_seconds", "silent_seconds"), _NO_SECONDS
    ),
    **dict.fromkeys(("par_seen", "par_planned", "noise_floor", "planned_par", "hindsight"), _NOT_MEASURED),
    **dict.fromkeys(("par", "left_alone_ms", "serving_ms", "best_ms"), _NO_RATIOS),
    **dict.fromkeys(("ms_per_move", "ms_per_megabyte", "ms_per_switch"), _NO_RATIOS),
    **dict.fromkeys(("gain_ms", "gain_low_ms", "gain_high_ms", "gain_percent", "step_ms"), _NOT_FINITE),
    **dict.fromkeys(("tokens_per_second", "tokens_per_second_won"), _NOT_FINITE),
    **dict.fromkeys(("steps", "timed_steps", "window_steps", "load_steps"), _PAST_WINDOW),
    **dict.fromkeys(("agent_version", "service_version", "node"), (_CONTROL, _LONG)),
    **dict.fromkeys(("reason", "error", "best", "last_decision", "verdict"), ACCEPTED),
    **dict.fromkeys(("paused", "changed", "connected", "rank_bound", "source_sums"), ACCEPTED),
    **dict.fromkeys(("price_kind", "kind"), ("", "free", _CONTROL)),
    **dict.fromkeys(("outcome",), _NONE_KNOWN),
    **dict.fromkeys(("layers", "committed"), (513, 1 << 31)),
    **dict.fromkeys(("ranks", "experts", "agents_connected"), (4097, 1 << 31)),
    "slots": (513, 1 << 31),
    "layer": (512, 1 << 31),
    "rank": (4096, 1 << 31),
    "deployment": ("", "-x", "a b", "a\x1b", "x" * 64),
    "layer_epochs": ([], [0] * 4, [LAST_VERSION] * 3, [(1 << 64) - 1] * 3),
    "one_in": (MOST_BLOCKS + 1, (1 << 32) - 1),
    "report_steps": (MOST_REPORT_STEPS + 1,),
    "dealing_width": (65, 1 << 20),
    "protocol_version": (0, 1, 1 << 31),
    "log2phy": _WRONG_SHAPES,
    "physical_to_logical": _WRONG_SHAPES,
    "local_physical_to_logical": _WRONG_SHAPES,
}
"""Values that fields of these names refuse in all messages, unless a message says otherwise."""
_SHAPES = {
    "shape.layers": (0, 1 << 20, 2),
    "shape.experts": (0, 1 << 20, 7, 5),
    "shape.slots": (0, 1 << 20, 5, 2),
}


@dataclass(frozen=True)
class Kind:
    """One message: good values, both directions, and by path what fields refuse otherwise than by their names."""

    message: type[Message]
    values: st.SearchStrategy[Any]
    decode: Callable[[Any], Any]
    otherwise: dict[str, tuple[Any, ...]]
    encode: Callable[[Any], Message] = encode

    def refused(self, path: str) -> tuple[Any, ...]:
        name = path.rsplit(".", maxsplit=1)[-1]
        return self.otherwise[path] if path in self.otherwise else _REFUSED[name]


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
def hellos(draw: st.DrawFn) -> Hello:
    placement, epoch, width = draw(placements()), draw(VERSIONS), draw(st.sampled_from((1, 3)))
    return Hello(
        deployment=draw(NAMES),
        rank=draw(st.integers(0, SHAPE.ranks - 1)),
        node=draw(TEXTS),
        token_group=draw(st.integers(0, 4095)),
        group_id=draw(TEXTS.filter(bool)),
        shape=replace(SHAPE, width=width, rank_bound=draw(st.booleans())),
        epoch=epoch,
        digest=draw(DIGESTS),
        layer_epochs=draw(layer_epochs(epoch)),
        slots_LS=np.ascontiguousarray(placement.phy2log_LRS[:, 0]),
        log2phy_LE=placement.default_log2phy(width)[0],
        agent_version=draw(TEXTS),
        highest_term=draw(VERSIONS),
    )


@st.composite
def heat_reports(draw: st.DrawFn) -> HeatReport:
    steps = draw(st.integers(1, MOST_STEPS))

    def counts(*shape: int) -> st.SearchStrategy[np.ndarray]:
        return hnp.arrays(np.int32, shape, elements=st.integers(0, 1 << 20))

    by_step = draw(st.none() | counts(steps, SHAPE.layers, SHAPE.experts))
    tokens = hnp.arrays(np.int64, (steps,), elements=st.integers(0, (1 << 32) - 1))
    phases = st.lists(st.sampled_from(StepPhase), min_size=steps, max_size=steps)
    return HeatReport(
        draw(STEPS),
        draw(layer_epochs()),
        draw(counts(steps, SHAPE.layers, SHAPE.slots)),
        np.array(draw(phases), dtype=np.uint8),
        by_step,
        draw(st.none() | tokens),
        draw(STEPS),
        draw(st.none() | counts(SHAPE.layers, SHAPE.experts)) if by_step is None else None,
        draw(st.none() | tokens),
    )


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
    return RankPlan.of(draw(VERSIONS), draw(VERSIONS), draw(VERSIONS), draw(DIGESTS), tuple(layers))


@st.composite
def served_models(draw: st.DrawFn) -> wire.ServedModel:
    placement = draw(placements())
    nodes_R = draw(st.tuples(*[st.integers(0, 4095)] * SHAPE.ranks))
    tables_RLE = draw(st.sampled_from((None, placement.default_log2phy())))
    return wire.ServedModel(
        SHAPE, nodes_R, placement, draw(layer_epochs()), draw(st.integers(1, 1 << 20)), tables_RLE
    )


@st.composite
def switched_layers(draw: st.DrawFn) -> wire.SwitchedLayer:
    phy2log_RS = draw(placements()).phy2log_LRS[0]
    table_RE = draw(st.sampled_from((None, default_log2phy(phy2log_RS, SHAPE.experts))))
    return wire.SwitchedLayer(draw(st.integers(0, SHAPE.layers - 1)), draw(VERSIONS), phy2log_RS, table_RE)


REPORTINGS = st.builds(
    Reporting, st.booleans(), st.integers(1, MOST_BLOCKS), st.integers(0, MOST_REPORT_STEPS)
)
_TIMES, _WINDOW, _NUMBERS = st.floats(0, 1e9), st.integers(0, 1 << 16), st.floats(-1e9, 1e9)
_WORTHS = st.builds(
    wire.Worth,
    *(_WINDOW, _TIMES, _TIMES, _TIMES, TEXTS, _NUMBERS, _NUMBERS, _NUMBERS),
    *(st.sampled_from(wire.TIME_PRICES), TEXTS, _WINDOW),
    *(st.none() | _NUMBERS for _ in range(4)),
)
_MOVE_PRICES = st.builds(
    wire.MovePrice, RATIOS, st.sampled_from(wire.MOVE_PRICES), TEXTS, *(st.none() | RATIOS for _ in range(3))
)
_STATUSES = st.builds(
    wire.DeploymentStatus,
    deployment=NAMES,
    **dict.fromkeys(("layers", "slots"), st.integers(0, 512)),
    **dict.fromkeys(("experts", "ranks", "agents_connected"), st.integers(0, 4096)),
    **dict.fromkeys(("epoch", "plan_id", "leader_term"), VERSIONS),
    **dict.fromkeys(
        ("steps_received", "steps_lost", "layers_switched", "experts_moved", "bytes_moved"),
        st.integers(0, LAST_VERSION),
    ),
    digest=DIGESTS,
    par=RATIOS,
    window_steps=_WINDOW,
    paused=st.booleans(),
    last_decision=TEXTS,
    problems=st.lists(TEXTS, max_size=3).map(tuple),
    worth=st.none() | _WORTHS,
    move_price=st.none() | _MOVE_PRICES,
)
_VERDICTS = st.lists(
    st.builds(
        wire.LayerVerdict,
        *(SMALL, MEASURED, MEASURED, MEASURED, SMALL, st.booleans(), TEXTS, st.none() | RATIOS),
        st.integers(0, MOST_BYTES - 1),
    ),
    min_size=1,
    max_size=3,
).map(tuple)
_DATES = st.floats(0, 1e10)
_PAST_PLANS = st.builds(
    wire.PastPlan,
    *(VERSIONS, _DATES, OUTCOMES, TEXTS, SMALL, _VERDICTS),
    leader_term=VERSIONS,
    base_epoch=VERSIONS,
)
_DECISIONS = st.builds(
    wire.PastPlan,
    *(VERSIONS, _DATES, OUTCOMES, TEXTS, SMALL, _VERDICTS),
    solve_seconds=SECONDS,
    moves=st.dictionaries(
        SMALL,
        hnp.arrays(np.int32, st.tuples(st.integers(1, 3), st.just(5)), elements=SMALL),
        min_size=1,
        max_size=2,
    ),
)
_BALANCES = st.builds(
    wire.Balance,
    st.lists(
        st.builds(wire.BalancePoint, _DATES, MEASURED, MEASURED, MEASURED, VERSIONS), min_size=1, max_size=3
    ).map(tuple),
    hnp.arrays(np.int32, (2, 3), elements=st.integers(0, 4_000_000)),
    *(_WINDOW, _DECISIONS, _DECISIONS),
)
_DECISION = {
    "moves.moves": (packed(1, 4), packed(1, 5, value=-1), tensor_pb2.PackedArray()),
    "verdicts.moves": (1 << 31,),
}

KINDS: dict[str, Kind] = {
    "hello": Kind(
        agent_pb2.Hello,
        hellos(),
        decode_hello,
        {
            **_SHAPES,
            "rank": (2, 1 << 31),
            "ep_size": (0, 1, 1 << 20),
            "token_group": (4096, 1 << 31),
            "group_id": ("", _CONTROL, _LONG),
        },
    ),
    "welcome": Kind(
        agent_pb2.Welcome,
        st.builds(Welcome, TEXTS, VERSIONS, st.integers(1, 1 << 16), st.floats(0.05, 60), REPORTINGS),
        decode_welcome,
        {"report_steps": (0, (1 << 16) + 1), "heartbeat_seconds": (float("nan"),)},
    ),
    "reporting": Kind(agent_pb2.Reporting, REPORTINGS, partial(decode, Reporting), {}),
    "heat_report": Kind(
        agent_pb2.HeatReport,
        heat_reports(),
        lambda message: decode_heat_report(message, SHAPE, MOST_STEPS),
        {
            "slot_counts": _BAD_COUNTS,
            "source_counts": _BAD_COUNTS,
            "source_sums": (*_BAD_COUNTS, packed(SHAPE.layers, SHAPE.experts, value=-1), packed(2, 3, 4)),
            "step_phases": (b"", b"\x00" * 4, b"\x04", b"\x01" * (MOST_STEPS + 1)),
            "step_tokens": ([1] * (MOST_STEPS + 1),),
            "step_micros": ([1] * (MOST_STEPS + 1),),
        },
    ),
    "plan": Kind(
        agent_pb2.Plan,
        plans(),
        lambda message: decode_plan(message, SHAPE, RANK),
        {
            "layers.layer": (3, 1 << 31),
            "layers.log2phy_digests": ([], [0], [0, 0], [LAST_DIGEST] * 2),
            "layers.moves": (packed(1, 4), packed(1, 5, value=-1), packed(1, 5, value=9)),
            "digest": (*past(LAST_DIGEST), 0),
        },
    ),
    "plan_status": Kind(
        agent_pb2.PlanStatus,
        st.builds(
            PlanStatus,
            *(VERSIONS, st.sampled_from(PlanState), SMALL, TEXTS, VERSIONS, DIGESTS),
            *(st.integers(0, MOST_BYTES - 1), SECONDS, SECONDS, STEPS),
        ),
        partial(decode, PlanStatus),
        {"state": (0, 6, 99)},
    ),
    "heartbeat": Kind(
        agent_pb2.Heartbeat,
        st.builds(
            Heartbeat, STEPS, VERSIONS, DIGESTS, TEXTS, STEPS, MICROS, MICROS, STATED_BYTES, STATED_BYTES
        ),
        partial(decode, Heartbeat),
        {},
    ),
    "served": Kind(
        operator_pb2.ServedModel,
        served_models(),
        wire.decode_served,
        {
            **_SHAPES,
            "ranks": (0, 1, 1 << 20),
            "nodes": ([], [0] * 3, [4096] * 2),
            "physical_to_logical": (*_WRONG_SHAPES, packed(SHAPE.layers, SHAPE.ranks, SHAPE.slots)),
            "pending_steps": (0, (1 << 20) + 1),
            "log2phy": (*_WRONG_SHAPES, packed(SHAPE.ranks, SHAPE.layers, SHAPE.experts, value=99)),
        },
        wire.encode_served,
    ),
    "switched": Kind(
        operator_pb2.SwitchedLayer,
        switched_layers(),
        lambda message: wire.decode_switched(message, SHAPE),
        {
            "layer": (3, 1 << 31),
            "physical_to_logical": (*_WRONG_SHAPES, packed(SHAPE.ranks, SHAPE.slots)),
            "log2phy": (*_WRONG_SHAPES, packed(SHAPE.ranks, SHAPE.experts, value=99)),
        },
    ),
    "deployment_status": Kind(
        operator_pb2.DeploymentStatus,
        _STATUSES,
        partial(decode, wire.DeploymentStatus),
        {"problems": (["x"] * 8193,), "worth.price": ACCEPTED, "move_price.price": _NO_RATIOS},
    ),
    "layer_status": Kind(
        operator_pb2.LayerStatus,
        st.builds(wire.LayerStatus, SMALL, RATIOS, MEASURED, VERSIONS),
        partial(decode, wire.LayerStatus),
        {},
    ),
    "agent_status": Kind(
        operator_pb2.AgentStatus,
        st.builds(
            wire.AgentStatus,
            *(st.integers(0, 4095), TEXTS, st.booleans(), STEPS, VERSIONS, TEXTS, TEXTS, STEPS),
            *(st.none() | SECONDS, STATED_BYTES, STATED_BYTES),
        ),
        partial(decode, wire.AgentStatus),
        {"step": past(2 * LAST_STEP)},
    ),
    "placement": Kind(
        operator_pb2.GetPlacementResponse,
        placements().map(lambda placement: (placement, placement.default_log2phy())),
        wire.decode_placement,
        {
            "experts": (0, 1 << 20),
            "physical_to_logical": (*_WRONG_SHAPES, packed(SHAPE.layers, SHAPE.ranks, SHAPE.slots)),
            "log2phy": (*_WRONG_SHAPES, packed(SHAPE.ranks, SHAPE.layers, SHAPE.experts, value=99)),
        },
        lambda served: wire.encode_placement(3, 4, *served),
    ),
    "past_plan": Kind(
        operator_pb2.PastPlan, _PAST_PLANS, partial(decode, wire.PastPlan), {"verdicts.moves": (1 << 31,)}
    ),
    "balance": Kind(
        operator_pb2.GetBalanceResponse,
        _BALANCES,
        partial(decode, wire.Balance),
        {
            "rank_loads": (packed(1), packed(1, 1, value=-1), packed(1, 1, value=1 << 30)),
            "points.par": _NOT_MEASURED,
            **{f"last_decision.{path}": values for path, values in _DECISION.items()},
            **{f"last_plan.{path}": values for path, values in _DECISION.items()},
        },
    ),
}
