"""Every message of the protocol: strategies for valid messages, codecs, and invalid values of each field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from google.protobuf.message import Message
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eplb_core.heat.phase import StepPhase
from eplb_core.placement import Placement, default_log2phy
from eplb_core.wire import operator as wire
from eplb_core.wire.agent import (
    MAX_BLOCKS,
    MAX_REPORT_STEPS,
    Balance,
    CallOff,
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
from eplb_core.wire.codec import decode, encode, pack
from eplb_core.wire.engine import DecideRequest, decode_decide_request
from eplb_core.wire.fields import (
    MAX_BYTES,
    MAX_DIGEST,
    MAX_MICROS,
    MAX_STEP,
    MAX_TEXT,
    MAX_VERSION,
)
from eplb_core.wire.generated import agent_pb2, operator_pb2, tensor_pb2
from eplb_core.wire.heat import HeatReport, decode_heat_report
from eplb_core.wire.plan import RankLayer, RankPlan, decode_plan, sources_of

SHAPE = Shape(ranks=2, layers=3, experts=4, slots=3, bytes_per_expert=64)
RANK = 1
MAX_STEPS = 8
ACCEPTED: tuple[Any, ...] = ()
"""Marks a field that accepts every value of its type."""

VERSIONS = st.integers(0, MAX_VERSION - 1)
DIGESTS = st.integers(0, MAX_DIGEST - 1)
STEPS = st.integers(0, MAX_STEP - 1)
MICROS = st.integers(0, MAX_MICROS - 1)
STATED_BYTES = st.none() | st.integers(0, MAX_BYTES - 1)
SECONDS = st.floats(0, 1e6)
TEXTS = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S"]), max_size=40)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True)
SMALL = st.integers(0, 511)


def packed(*shape: int, value: int = 0) -> tensor_pb2.PackedArray:
    return pack(np.full(shape, value, dtype=np.int64))


def past(limit: int) -> tuple[int, int]:
    return limit, (1 << 64) - 1


_CONTROL = "rank\x1b[2J"
_LONG = "x" * (MAX_TEXT + 1)
_WRONG_SHAPES = (packed(1), packed(2, 2), tensor_pb2.PackedArray(), tensor_pb2.PackedArray(dtype=99))
_BAD_COUNTS = (packed(1), packed(1, SHAPE.layers, SHAPE.slots, value=-1), tensor_pb2.PackedArray())
_INVALID: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("epoch", "base_epoch", "plan_id", "leader_term", "highest_term"), past(MAX_VERSION)),
    **dict.fromkeys(("digest", "base_digest"), past(MAX_DIGEST)),
    **dict.fromkeys(("step", "first_step", "dropped_steps", "calls", "call_micros", "vote_micros"), ACCEPTED),
    **dict.fromkeys(("bytes_received", "staging_bytes", "ring_bytes", "bytes_per_expert"), past(MAX_BYTES)),
    **dict.fromkeys(("transfer_seconds", "commit_seconds"), (float("nan"), float("inf"), -1.0, 1e300)),
    **dict.fromkeys(("agent_version", "service_version", "node", "device"), (_CONTROL, _LONG)),
    **dict.fromkeys(
        ("reason", "error", "rank_bound", "entry_by_row", "observed", "splits_by_step", "source_sums"),
        ACCEPTED,
    ),
    **dict.fromkeys(("log2phy", "physical_to_logical", "local_physical_to_logical"), _WRONG_SHAPES),
    "layer": (512, 1 << 31),
    "deployment": ("", "-x", "a b", "a\x1b", "x" * 64),
    "layer_epochs": ([], [0] * 4, [MAX_VERSION] * 3, [(1 << 64) - 1] * 3),
    "one_in": (MAX_BLOCKS + 1, (1 << 32) - 1),
    "report_steps": (MAX_REPORT_STEPS + 1,),
    "dealing_width": (65, 1 << 20),
    "protocol_version": (0, 1, 1 << 31),
}
"""Invalid values by field name. A message can override them (``Kind.overrides``)."""
_SHAPES = {
    "shape.layers": (0, 1 << 20, 2),
    "shape.experts": (0, 1 << 20, 7, 5),
    "shape.slots": (0, 1 << 20, 5, 2),
}


@dataclass(frozen=True)
class Kind:
    """One message type: valid values, encoder, decoder, and the invalid values that override ``_INVALID``."""

    message: type[Message]
    values: st.SearchStrategy[Any]
    decode: Callable[[Any], Any]
    overrides: dict[str, tuple[Any, ...]]
    encode: Callable[[Any], Message] = encode

    def invalid(self, path: str) -> tuple[Any, ...]:
        name = path.rsplit(".", maxsplit=1)[-1]
        return self.overrides[path] if path in self.overrides else _INVALID[name]


def equal(first: Any, second: Any) -> bool:
    """Compare field by field. Arrays are compared by value, because their integer type can change on the wire."""
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        return first is not None and second is not None and np.array_equal(first, second)
    if isinstance(first, Placement):
        return equal(first.phy2log_LRS, second.phy2log_LRS)
    if is_dataclass(first):
        return all(equal(getattr(first, field.name), getattr(second, field.name)) for field in fields(first))
    if isinstance(first, tuple):
        return len(first) == len(second) and all(equal(*pair) for pair in zip(first, second, strict=True))
    return bool(first == second)


def placements() -> st.SearchStrategy[Placement]:
    """Draw placements of ``SHAPE``: the linear one with its experts permuted in each layer."""
    first = Placement.linear(SHAPE.layers, SHAPE.experts, SHAPE.ranks, SHAPE.slots)
    orders = st.lists(st.permutations(range(SHAPE.experts)), min_size=SHAPE.layers, max_size=SHAPE.layers)
    return orders.map(
        lambda names: Placement(
            np.stack([np.array(order)[row] for order, row in zip(names, first.phy2log_LRS, strict=True)]),
            SHAPE.experts,
        )
    )


def layer_epochs(highest: int = MAX_VERSION - 1) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*[st.integers(0, highest)] * SHAPE.layers)


@st.composite
def hellos(draw: st.DrawFn) -> Hello:
    placement = draw(placements())
    epoch = draw(VERSIONS)
    width = draw(st.sampled_from((1, 3)))
    return Hello(
        deployment=draw(NAMES),
        rank=draw(st.integers(0, SHAPE.ranks - 1)),
        node=draw(TEXTS),
        token_group=draw(st.integers(0, 4095)),
        group_id=draw(TEXTS.filter(bool)),
        shape=replace(
            SHAPE,
            width=width,
            rank_bound=draw(st.booleans()),
            entry_by_row=draw(st.booleans()),
            observed=draw(st.booleans()),
            splits_by_step=draw(st.booleans()),
        ),
        epoch=epoch,
        digest=draw(DIGESTS),
        layer_epochs=draw(layer_epochs(epoch)),
        slots_LS=np.ascontiguousarray(placement.phy2log_LRS[:, 0]),
        log2phy_LE=placement.default_log2phy(width)[0],
        agent_version=draw(TEXTS),
        highest_term=draw(VERSIONS),
        device=draw(TEXTS),
    )


@st.composite
def heat_reports(draw: st.DrawFn) -> HeatReport:
    steps = draw(st.integers(1, MAX_STEPS))

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
    """Draw plans that move one expert per layer from rank 0 to rank 1."""
    layers = []
    for layer in draw(st.lists(st.integers(0, SHAPE.layers - 1), min_size=1, unique=True)):
        new_RS = draw(placements()).phy2log_LRS[layer]
        tables_RE = default_log2phy(new_RS, SHAPE.experts)
        slot = draw(st.integers(0, SHAPE.slots - 1))
        moves_M5 = np.array([[0, 0, RANK, slot, new_RS[RANK, slot]]], dtype=np.int32)
        source_RS = sources_of(moves_M5, *new_RS.shape)
        digests = draw(st.just(()) | st.tuples(DIGESTS))
        layers.append(RankLayer(layer, new_RS, source_RS, tables_RE[RANK], digests))
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


@st.composite
def decide_requests(draw: st.DrawFn) -> DecideRequest:
    parts = draw(st.integers(1, 4))
    counts = st.integers(0, 1 << 20)
    slots = st.integers(0, SHAPE.experts - 1)
    return DecideRequest(
        deployment=draw(NAMES),
        ranks=SHAPE.ranks,
        nodes=draw(st.integers(1, 4096)),
        experts=SHAPE.experts,
        heat_NLE=draw(hnp.arrays(np.int32, (parts, SHAPE.layers, SHAPE.experts), elements=counts)),
        phy2log_LP=draw(hnp.arrays(np.int32, (SHAPE.layers, SHAPE.ranks * SHAPE.slots), elements=slots)),
        split=draw(TEXTS),
        sum_only=draw(st.booleans()),
    )


REPORTINGS = st.builds(Reporting, st.booleans(), st.integers(1, MAX_BLOCKS), st.integers(0, MAX_REPORT_STEPS))
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
    "balance": Kind(
        agent_pb2.Balance,
        st.builds(Balance, st.floats(0, 4096), STEPS),
        partial(decode, Balance),
        {"par": (-1.0, float("nan"), float("inf"), 5000.0), "steps": ACCEPTED},
    ),
    "heat_report": Kind(
        agent_pb2.HeatReport,
        heat_reports(),
        lambda message: decode_heat_report(message, SHAPE, MAX_STEPS),
        {
            "slot_counts": _BAD_COUNTS,
            "source_counts": _BAD_COUNTS,
            "source_sums": (*_BAD_COUNTS, packed(SHAPE.layers, SHAPE.experts, value=-1), packed(2, 3, 4)),
            "step_phases": (b"", b"\x00" * 4, b"\x05", b"\x01" * (MAX_STEPS + 1)),
            "step_tokens": ([1] * (MAX_STEPS + 1),),
            "step_micros": ([1] * (MAX_STEPS + 1),),
        },
    ),
    "plan": Kind(
        agent_pb2.Plan,
        plans(),
        lambda message: decode_plan(message, SHAPE),
        {
            "layers.layer": (3, 1 << 31),
            "layers.log2phy_digests": ([MAX_DIGEST],),
            "layers.sources": (*_WRONG_SHAPES, packed(SHAPE.ranks, SHAPE.slots, value=-1)),
            "digest": (*past(MAX_DIGEST), 0),
        },
    ),
    "plan_status": Kind(
        agent_pb2.PlanStatus,
        st.builds(
            PlanStatus,
            *(VERSIONS, st.sampled_from(PlanState), SMALL, TEXTS, VERSIONS, DIGESTS),
            *(st.integers(0, MAX_BYTES - 1), SECONDS, SECONDS, STEPS),
        ),
        partial(decode, PlanStatus),
        {"state": (0, 7, 99)},
    ),
    "call_off": Kind(agent_pb2.CallOff, st.builds(CallOff, VERSIONS), partial(decode, CallOff), {}),
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
    "decide": Kind(
        agent_pb2.DecideRequest,
        decide_requests(),
        decode_decide_request,
        {
            "split": (_CONTROL, _LONG),
            "sum_only": ACCEPTED,
            "ranks": (0, 4, 1 << 20),
            "nodes": (0, 1 << 20),
            "experts": (0, 5, 1 << 20),
            "heat": (*_WRONG_SHAPES, packed(1, SHAPE.layers, SHAPE.experts, value=-1), packed(1025, 3, 4)),
            "physical_to_logical": (*_WRONG_SHAPES, packed(SHAPE.layers, 5), packed(2, 6)),
        },
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
}
