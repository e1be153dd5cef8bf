"""Messages of the stream between an agent and the service."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from google.protobuf.message import Message
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eplb_service.placement import default_log2phy, even_log2phy
from eplb_service.wire.fields import LAST_DIGEST, LAST_MICROS, LAST_VERSION, MOST_BYTES
from eplb_service.wire.generated import agent_pb2, tensor_pb2
from eplb_service.wire.heat import HeatReport, StepPhase, decode_heat_report, encode_heat_report
from eplb_service.wire.hello import (
    Hello,
    Welcome,
    decode_hello,
    decode_welcome,
    encode_hello,
    encode_welcome,
)
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
from tests.wire.messages.kind import (
    ACCEPTED,
    CONTROL,
    DIGESTS,
    LONG,
    NO_SECONDS,
    PAST_BYTES,
    PAST_DIGESTS,
    PAST_STEPS,
    PAST_VERSIONS,
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

RANK = 1
MOST_STEPS = 8
MICROS = st.integers(0, LAST_MICROS - 1)
PAST_MICROS = (LAST_MICROS, (1 << 64) - 1)


@st.composite
def hellos(draw: st.DrawFn) -> Hello:
    placement, epoch, width = draw(placements()), draw(VERSIONS), draw(st.sampled_from((1, 3)))
    return Hello(
        deployment=draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True)),
        rank=draw(st.integers(0, SHAPE.ranks - 1)),
        node=draw(TEXTS),
        token_group=draw(st.integers(0, 4095)),
        group_id=draw(TEXTS.filter(bool)),
        shape=replace(SHAPE, width=width, rank_bound=draw(st.booleans())),
        epoch=epoch,
        digest=draw(DIGESTS),
        layer_epochs=draw(layer_epochs(epoch)),
        slots_LS=np.ascontiguousarray(placement.phy2log_LRS[:, 0]),
        log2phy_LE=even_log2phy(placement, width)[0],
        agent_version=draw(TEXTS),
        highest_term=draw(VERSIONS),
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
        draw(STEPS),
        draw(layer_epochs()),
        slots_TLS,
        np.array(draw(phases), dtype=np.uint8),
        by_step,
        draw(st.none() | tokens),
        draw(STEPS),
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
    return RankPlan.of(draw(VERSIONS), draw(VERSIONS), draw(VERSIONS), draw(DIGESTS), tuple(layers))


_BAD_COUNTS = (packed(1), packed(1, SHAPE.layers, SHAPE.slots, value=-1), tensor_pb2.PackedArray())
_PAST_BLOCKS = (MOST_BLOCKS + 1, (1 << 32) - 1)

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
            "node": (CONTROL, "a\nb", LONG),
            "token_group": (4096, 1 << 31),
            **REFUSED_SHAPE,
            "placement.epoch": PAST_VERSIONS,
            "placement.digest": PAST_DIGESTS,
            "placement.layer_epochs": ([], [0], [0] * 4, [LAST_VERSION] * 3),
            "placement.local_physical_to_logical": WRONG_SHAPES,
            "placement.log2phy": WRONG_SHAPES,
            "agent_version": (CONTROL, LONG),
            "group_id": ("", CONTROL, LONG),
            "highest_term": PAST_VERSIONS,
        },
    ),
    "welcome": Kind(
        st.builds(Welcome, TEXTS, VERSIONS, st.integers(1, 1 << 16), st.floats(0.05, 60), reportings()),
        encode_welcome,
        decode_welcome,
        {
            "protocol_version": (0, 1),
            "service_version": (CONTROL, LONG),
            "leader_term": PAST_VERSIONS,
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
            "first_step": PAST_STEPS,
            "layer_epochs": ([], [0] * 4, [LAST_VERSION] * 3, [(1 << 64) - 1] * 3),
            "slot_counts": _BAD_COUNTS,
            "source_counts": _BAD_COUNTS,
            "source_sums": (*_BAD_COUNTS, packed(SHAPE.layers, SHAPE.experts, value=-1), packed(2, 3, 4)),
            "step_phases": (b"", b"\x00" * 4, b"\x04", b"\x01" * (MOST_STEPS + 1)),
            "dropped_steps": PAST_STEPS,
            "step_tokens": ([1] * (MOST_STEPS + 1),),
            "step_micros": ([1] * (MOST_STEPS + 1),),
        },
    ),
    "plan": Kind(
        plans(),
        encode_plan,
        lambda message: decode_plan(message, SHAPE, RANK),
        {
            "plan_id": PAST_VERSIONS,
            "leader_term": PAST_VERSIONS,
            "base_epoch": PAST_VERSIONS,
            "base_digest": PAST_DIGESTS,
            "layers.layer": (3, 1 << 31),
            "layers.physical_to_logical": WRONG_SHAPES,
            "layers.log2phy": WRONG_SHAPES,
            "layers.log2phy_digests": ([], [0], [0, 0], [LAST_DIGEST] * 2),
            "layers.moves": (packed(1, 4), packed(1, 5, value=-1), packed(1, 5, value=9)),
            "digest": (*PAST_DIGESTS, 0),
        },
    ),
    "plan_status": Kind(
        st.builds(
            PlanStatus,
            VERSIONS,
            st.sampled_from(PlanState),
            st.integers(0, 511),
            TEXTS,
            VERSIONS,
            DIGESTS,
            st.integers(0, MOST_BYTES - 1),
            SECONDS,
            SECONDS,
            STEPS,
        ),
        encode_plan_status,
        decode_plan_status,
        {
            "plan_id": PAST_VERSIONS,
            "layer": (512, 1 << 31),
            "state": (0, 6, 99),
            "reason": ACCEPTED,
            "epoch": PAST_VERSIONS,
            "digest": PAST_DIGESTS,
            "bytes_received": PAST_BYTES,
            "transfer_seconds": NO_SECONDS,
            "commit_seconds": NO_SECONDS,
            "step": PAST_STEPS,
        },
    ),
    "heartbeat": Kind(
        st.builds(
            Heartbeat, STEPS, VERSIONS, DIGESTS, TEXTS, STEPS, MICROS, MICROS, STATED_BYTES, STATED_BYTES
        ),
        encode_heartbeat,
        decode_heartbeat,
        {
            "step": PAST_STEPS,
            "epoch": PAST_VERSIONS,
            "digest": PAST_DIGESTS,
            "error": ACCEPTED,
            "calls": PAST_STEPS,
            "call_micros": PAST_MICROS,
            "vote_micros": PAST_MICROS,
            "staging_bytes": PAST_BYTES,
            "ring_bytes": PAST_BYTES,
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
}
