"""A plan must arrive as it was sent; one that no set of ranks could carry out must be refused by name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_service.placement import Placement, array_digest, default_log2phy
from eplb_service.wire.agent import Shape
from eplb_service.wire.codec import encode, pack
from eplb_service.wire.fields import WireError
from eplb_service.wire.generated import agent_pb2
from eplb_service.wire.plan import RankLayer, RankPlan, SharedPlan, check_moves, decode_plan, table_digest
from tests.wire.messages import equal

LAYERS, EXPERTS, RANKS, SLOTS = 3, 4, 2, 3
OLD_RS = Placement.linear(1, EXPERTS, RANKS, SLOTS).phy2log_LRS[0]  # [[0, 1, 2], [3, 0, 1]]
NEW_RS = np.array([[0, 1, 2], [3, 2, 1]], dtype=np.int32)
MOVES_M5 = np.array([[0, 2, 1, 1, 2]], dtype=np.int32)


def plan_for(rank: int, layers: tuple[int, ...] = (1,), width: int = 1) -> RankPlan:
    tables_RE = default_log2phy(NEW_RS, EXPERTS, width)
    digests = tuple(table_digest(table_E) for table_E in tables_RE)
    updates = tuple(RankLayer(layer, NEW_RS, tables_RE[rank], digests, MOVES_M5) for layer in layers)
    return RankPlan.of(7, 2, 5, 99, updates)


def decode(message: agent_pb2.Plan, rank: int = 0, width: int = 1) -> RankPlan:
    return decode_plan(message, Shape(RANKS, LAYERS, EXPERTS, SLOTS, 64, width), rank)


def test_a_dealing_table_of_another_width_or_with_a_wrong_entry_is_refused() -> None:
    message = encode(plan_for(0, width=4))
    for width in (1, 2):
        with pytest.raises(WireError, match=r"layers\[0\].log2phy: expected the shape \[4.*\], got \[4, 4\]"):
            decode(message, width=width)
    table_ED = plan_for(0, width=4).layers[0].log2phy_E.copy()
    table_ED[3, 2] = 0
    message.layers[0].log2phy.CopyFrom(pack(table_ED))
    with pytest.raises(WireError, match="layer 1 log2phy: expert 3 points to slot 0, which does not hold it"):
        decode(message, width=4)


def test_a_table_of_one_entry_has_the_digest_that_it_always_had() -> None:
    table_E = np.array([0, 1, 2, 3], dtype=np.int32)
    assert table_digest(table_E) == array_digest(table_E, salt="log2phy")
    assert table_digest(table_E[:, None]) != table_digest(table_E)


def test_ranks_agree_on_the_digest_though_their_tables_differ() -> None:
    first, second = plan_for(0), plan_for(1)
    assert not np.array_equal(first.layers[0].log2phy_E, second.layers[0].log2phy_E)
    assert first.digest == second.digest


def edited(field: str, value: object) -> Callable[[agent_pb2.Plan], None]:
    def edit(message: agent_pb2.Plan) -> None:
        getattr(message.layers[0], field).CopyFrom(pack(np.asarray(value)))

    return edit


def twice(message: agent_pb2.Plan) -> None:
    message.layers.append(message.layers[0])


def set_field(field: str, value: int) -> Callable[[agent_pb2.Plan], None]:
    return lambda message: setattr(message, field, value)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda message: message.ClearField("layers"), "names no layers"),
        (twice, "twice"),
        (set_field("digest", 1), "digest is 0x1"),
        (set_field("base_epoch", 6), "digest"),
        (set_field("plan_id", 8), "digest"),
        (edited("physical_to_logical", [[0, 1, 2], [0, 1, 2]]), "expert 3 is in no slot"),
        (edited("physical_to_logical", [[0, 1, 1], [3, 2, 1]]), "is twice on rank 0"),
        (edited("log2phy", [1, 1, 2, 3]), "expert 0 points to slot 1, which does not hold it"),
        (edited("log2phy", [0, 5, 2, 3]), "not the table that log2phy_digests lists for rank 0"),
        (edited("moves", [[0, 2, 1, 3, 2]]), r"moves\[0\] is .*: not among 2 ranks x 3 slots"),
        (edited("moves", [[1, 1, 1, 1, 2]]), "stays on its rank keeps its slot"),
        (edited("moves", [[0, 2, 1, 1, 0]]), "its destination is to hold another expert"),
        (edited("moves", [[0, 2, 1, 1, 2], [0, 2, 1, 1, 2]]), "same destination"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(
    spoil: Callable[[agent_pb2.Plan], None], says: str
) -> None:
    message = encode(plan_for(0))
    spoil(message)
    with pytest.raises(WireError, match=says):
        decode(message)


def test_a_table_meant_for_another_rank_is_refused() -> None:
    with pytest.raises(WireError, match="lists for rank 1"):
        decode(encode(plan_for(0)), rank=1)


def test_moves_that_lead_from_the_old_layer_to_the_new_pass() -> None:
    check_moves(OLD_RS, NEW_RS, MOVES_M5)
    check_moves(OLD_RS, OLD_RS, MOVES_M5[:0])


@pytest.mark.parametrize(
    ("new_RS", "moves_M5", "says"),
    [
        (NEW_RS, [[0, 1, 1, 1, 2]], "its source holds another expert"),
        (NEW_RS, np.zeros((0, 5), dtype=np.int32), "rank 1 slot 1 has no move to change to expert 2"),
        (OLD_RS, [[1, 1, 0, 0, 0]], "rank 0 slot 0 receives a move but keeps expert 0"),
    ],
)
def test_moves_from_another_placement_are_refused(new_RS: np.ndarray, moves_M5: object, says: str) -> None:
    with pytest.raises(WireError, match=says):
        check_moves(OLD_RS, new_RS, np.asarray(moves_M5, dtype=np.int32))


@given(
    ranks=st.integers(1, 5),
    slots=st.integers(1, 40),
    spare=st.integers(0, 3),
    layers=st.integers(1, 4),
    width=st.integers(1, 3),
)
def test_each_rank_gets_its_own_plan(ranks: int, slots: int, spare: int, layers: int, width: int) -> None:
    experts = max(slots, ranks * slots - spare)
    phy2log_RS = Placement.linear(1, experts, ranks, slots).phy2log_LRS[0]
    tables_RE = default_log2phy(phy2log_RS, experts, width)
    digests, no_moves = tuple(map(table_digest, tables_RE)), np.zeros((0, 5), dtype=np.int32)

    def plan_of(rank: int) -> RankPlan:
        numbers = reversed(range(layers))
        own = (RankLayer(layer, phy2log_RS, tables_RE[rank], digests, no_moves) for layer in numbers)
        return RankPlan.of(7, 2, 300, 99, tuple(own))

    shared = SharedPlan(plan_of(0), [tables_RE] * layers)
    for rank in range(ranks):
        sent = shared.response(rank)
        assert len(sent) == shared.size
        received = agent_pb2.ConnectResponse.FromString(sent).plan
        assert equal(
            decode_plan(received, Shape(ranks, layers, experts, slots, 64, width), rank), plan_of(rank)
        )
