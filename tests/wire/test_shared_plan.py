"""What a plan shared by all ranks sends to each is what that rank's own plan, encoded by itself, would have been."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eplb_service.placement import Placement, default_log2phy
from eplb_service.wire.generated import agent_pb2
from eplb_service.wire.hello import Shape
from eplb_service.wire.plan import RankLayer, RankPlan, decode_plan, encode_plan, table_digest
from eplb_service.wire.shared_plan import SharedPlan


def plans(
    ranks: int, slots: int, experts: int, layers: int, width: int
) -> tuple[list[RankPlan], list[np.ndarray]]:
    """Of every rank, and the tables of each layer; the placement is linear, its tables are dealt ``width`` wide."""
    phy2log_RS = Placement.linear(1, experts, ranks, slots).phy2log_LRS[0]
    tables_RE = default_log2phy(phy2log_RS, experts)
    table = np.repeat(tables_RE[..., None], width, axis=2) if width > 1 else tables_RE
    digests = tuple(table_digest(own) for own in table)
    moves_M5 = np.zeros((0, 5), dtype=np.int32)
    made = [
        RankPlan.of(
            7,
            2,
            300,
            99,
            tuple(
                RankLayer(layer, phy2log_RS, table[rank], digests, moves_M5)
                for layer in reversed(range(layers))
            ),
        )
        for rank in range(ranks)
    ]
    return made, [table] * layers


@given(
    ranks=st.integers(1, 5),
    slots=st.integers(1, 40),
    spare=st.integers(0, 3),
    layers=st.integers(1, 4),
    width=st.integers(1, 3),
)
def test_each_rank_gets_its_own_plan(ranks: int, slots: int, spare: int, layers: int, width: int) -> None:
    experts = max(slots, ranks * slots - spare)
    own, tables = plans(ranks, slots, experts, layers, width)
    shared = SharedPlan.of(own[0], tables)
    for rank, plan in enumerate(own):
        received = agent_pb2.ConnectResponse.FromString(shared.response(rank))
        assert received.WhichOneof("message") == "plan"
        shape = Shape(ranks, layers, experts, slots, 64, width)
        decoded = decode_plan(received.plan, shape, rank)
        assert decoded.digest == plan.digest
        for got, want in zip(received.plan.layers, encode_plan(plan).layers, strict=True):
            assert got.layer == want.layer
            assert got.physical_to_logical == want.physical_to_logical
            assert got.log2phy_digests == want.log2phy_digests
            assert got.moves == want.moves
        for got_layer, want_layer in zip(decoded.layers, plan.layers, strict=True):
            np.testing.assert_array_equal(got_layer.log2phy_E, want_layer.log2phy_E)


def test_what_all_ranks_share_is_kept_once() -> None:
    own, tables = plans(ranks=64, slots=5, experts=256, layers=8, width=1)
    shared = SharedPlan.of(own[0], tables)
    alone = agent_pb2.ConnectResponse(plan=encode_plan(own[63])).SerializeToString()
    assert len(shared.response(63)) == len(alone)
    shared_bytes = len(shared.head) + sum(len(before) for before, _ in shared.layers)
    assert shared_bytes < len(alone)
