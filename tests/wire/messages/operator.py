"""Messages that operators and observers are answered with."""

from __future__ import annotations

from google.protobuf.message import Message
from hypothesis import strategies as st

from eplb_service.placement import default_log2phy
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
from eplb_service.wire.fields import LAST_STEP, LAST_VERSION
from eplb_service.wire.generated import operator_pb2
from eplb_service.wire.move_price import MOVE_PRICES, PricedMoves
from eplb_service.wire.watch import (
    ServedModel,
    SwitchedLayer,
    decode_served,
    decode_switched,
    encode_served,
    encode_switched,
)
from eplb_service.wire.worth import PRICES, Worth
from tests.wire.messages.kind import (
    ACCEPTED,
    CONTROL,
    DIGESTS,
    LONG,
    MEASURED,
    NO_SECONDS,
    NOT_MEASURED,
    PAST_BYTES,
    PAST_DIGESTS,
    PAST_STEPS,
    PAST_TOTALS,
    PAST_VERSIONS,
    RATIOS,
    REFUSED_SHAPE,
    SECONDS,
    SHAPE,
    STATED_BYTES,
    STEPS,
    TEXTS,
    VERSIONS,
    WRONG_SHAPES,
    Kind,
    layer_epochs,
    packed,
    placements,
)


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
    return SwitchedLayer(draw(st.integers(0, SHAPE.layers - 1)), draw(VERSIONS), phy2log_RS, table_RE)


def worths() -> st.SearchStrategy[Worth]:
    """What balancing may be worth."""
    times, steps, number = st.floats(0, 1e9), st.integers(0, 1 << 16), st.floats(-1e9, 1e9)
    return st.builds(
        Worth,
        steps,
        times,
        times,
        times,
        TEXTS,
        number,
        number,
        number,
        st.sampled_from(PRICES),
        TEXTS,
        steps,
        *(st.none() | number for _ in range(4)),
    )


_PRICED = st.builds(
    PricedMoves, RATIOS, st.sampled_from(MOVE_PRICES), TEXTS, *(st.none() | RATIOS for _ in range(3))
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
        epoch=draw(VERSIONS),
        digest=draw(DIGESTS),
        par=draw(RATIOS),
        window_steps=draw(st.integers(0, 1 << 16)),
        paused=draw(st.booleans()),
        plan_id=draw(VERSIONS),
        last_decision=draw(TEXTS),
        problems=tuple(draw(st.lists(TEXTS, max_size=3))),
        leader_term=draw(VERSIONS),
        worth=draw(st.none() | worths()),
        move_price=draw(st.none() | _PRICED),
        **{name: draw(st.integers(0, LAST_VERSION)) for name in totals},
    )


_NO_RATIOS = (float("nan"), float("inf"), -1.0)
_NOT_FINITE = (float("nan"), float("inf"), float("-inf"))

KINDS: dict[str, Kind] = {
    "served": Kind(
        served_models(),
        encode_served,
        decode_served,
        {
            **REFUSED_SHAPE,
            "ranks": (0, 1, 1 << 20),
            "nodes": ([], [0] * 3, [4096] * 2),
            "physical_to_logical": (*WRONG_SHAPES, packed(SHAPE.layers, SHAPE.ranks, SHAPE.slots)),
            "layer_epochs": ([], [0] * 4, [LAST_VERSION] * 3),
            "pending_steps": (0, (1 << 20) + 1),
            "log2phy": (*WRONG_SHAPES, packed(SHAPE.ranks, SHAPE.layers, SHAPE.experts, value=99)),
        },
    ),
    "switched": Kind(
        switched_layers(),
        encode_switched,
        lambda message: decode_switched(message, SHAPE),
        {
            "layer": (3, 1 << 31),
            "epoch": PAST_VERSIONS,
            "physical_to_logical": (*WRONG_SHAPES, packed(SHAPE.ranks, SHAPE.slots)),
            "log2phy": (*WRONG_SHAPES, packed(SHAPE.ranks, SHAPE.experts, value=99)),
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
            "epoch": PAST_VERSIONS,
            "digest": PAST_DIGESTS,
            "par": _NO_RATIOS,
            "window_steps": ((1 << 16) + 1, 1 << 31),
            "steps_received": PAST_TOTALS,
            "steps_lost": PAST_TOTALS,
            "layers_switched": PAST_TOTALS,
            "experts_moved": PAST_TOTALS,
            "bytes_moved": PAST_TOTALS,
            "paused": ACCEPTED,
            "plan_id": PAST_VERSIONS,
            "last_decision": ACCEPTED,
            "problems": (["x"] * 8193,),
            "leader_term": PAST_VERSIONS,
            "worth.steps": ((1 << 16) + 1, 1 << 31),
            "worth.left_alone_ms": _NO_RATIOS,
            "worth.serving_ms": _NO_RATIOS,
            "worth.best_ms": _NO_RATIOS,
            "worth.best": ACCEPTED,
            "worth.gain_ms": _NOT_FINITE,
            "worth.gain_low_ms": _NOT_FINITE,
            "worth.gain_high_ms": _NOT_FINITE,
            "worth.price_kind": ("", "free", CONTROL),
            "worth.price": ACCEPTED,
            "worth.timed_steps": ((1 << 16) + 1, 1 << 31),
            "worth.step_ms": _NOT_FINITE,
            "worth.gain_percent": _NOT_FINITE,
            "worth.tokens_per_second": _NOT_FINITE,
            "worth.tokens_per_second_won": _NOT_FINITE,
            "worth.verdict": ACCEPTED,
            "move_price.price": _NO_RATIOS,
            "move_price.kind": ("", "free", CONTROL),
            "move_price.reason": ACCEPTED,
            "move_price.ms_per_move": _NO_RATIOS,
            "move_price.ms_per_megabyte": _NO_RATIOS,
            "move_price.ms_per_switch": _NO_RATIOS,
        },
    ),
    "layer_status": Kind(
        st.builds(LayerStatus, st.integers(0, 511), RATIOS, MEASURED, VERSIONS),
        encode_layer_status,
        decode_layer_status,
        {
            "layer": (512, 1 << 31),
            "par": _NO_RATIOS,
            "planned_par": NOT_MEASURED,
            "epoch": PAST_VERSIONS,
        },
    ),
    "agent_status": Kind(
        st.builds(
            AgentStatus,
            *(st.integers(0, 4095), TEXTS, st.booleans(), STEPS, VERSIONS, TEXTS, TEXTS, STEPS),
            st.none() | SECONDS,
            *(STATED_BYTES, STATED_BYTES),
        ),
        encode_agent_status,
        decode_agent_status,
        {
            "rank": (4096, 1 << 31),
            "node": (CONTROL, LONG),
            "connected": ACCEPTED,
            "step": (2 * LAST_STEP, (1 << 64) - 1),
            "epoch": PAST_VERSIONS,
            "error": ACCEPTED,
            "agent_version": (CONTROL, LONG),
            "dropped_steps": PAST_STEPS,
            "silent_seconds": NO_SECONDS,
            "staging_bytes": PAST_BYTES,
            "ring_bytes": PAST_BYTES,
        },
    ),
    "placement": Kind(
        st.builds(
            lambda epoch, digest, placement: PlacementInForce(
                epoch, digest, placement, placement.default_log2phy()
            ),
            *(VERSIONS, DIGESTS, placements()),
        ),
        encode_placement,
        decode_placement,
        {
            "epoch": PAST_VERSIONS,
            "digest": PAST_DIGESTS,
            "experts": (0, 1 << 20),
            "physical_to_logical": (*WRONG_SHAPES, packed(SHAPE.layers, SHAPE.ranks, SHAPE.slots)),
            "log2phy": (*WRONG_SHAPES, packed(SHAPE.ranks, SHAPE.layers, SHAPE.experts, value=99)),
        },
    ),
}

BY_NAME: dict[str, type[Message]] = {
    "served": operator_pb2.ServedModel,
    "switched": operator_pb2.SwitchedLayer,
    "deployment_status": operator_pb2.DeploymentStatus,
    "layer_status": operator_pb2.LayerStatus,
    "agent_status": operator_pb2.AgentStatus,
    "placement": operator_pb2.GetPlacementResponse,
}
