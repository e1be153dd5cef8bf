"""Tests of plans on the wire: round trips per rank, shared digests, and rejection of impossible plans."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_core.placement import Placement, default_log2phy
from eplb_core.wire.agent import Shape
from eplb_core.wire.codec import encode, pack
from eplb_core.wire.fields import WireError
from eplb_core.wire.generated import agent_pb2
from eplb_core.wire.plan import (
    RankLayer,
    RankPlan,
    SharedPlan,
    check_sources,
    decode_plan,
    shared_digests,
    sources_of,
)
from tests.wire.messages import equal

LAYERS = 3
EXPERTS = 4
RANKS = 2
SLOTS = 3
OLD_RS = Placement.linear(1, EXPERTS, RANKS, SLOTS).phy2log_LRS[0]  # [[0, 1, 2], [3, 0, 1]]
NEW_RS = np.array([[0, 1, 2], [3, 2, 1]], dtype=np.int32)
SOURCE_RS = np.array([[0, 1, 2], [3, 2, 5]], dtype=np.int32)


def plan_for(rank: int, layers: tuple[int, ...] = (1,), width: int = 1) -> RankPlan:
    tables_RE = default_log2phy(NEW_RS, EXPERTS, width)
    updates = tuple(RankLayer(layer, NEW_RS, SOURCE_RS, tables_RE[rank], ()) for layer in layers)
    return RankPlan.of(7, 2, 5, 99, updates)


def decode(message: agent_pb2.Plan, width: int = 1) -> RankPlan:
    return decode_plan(message, Shape(RANKS, LAYERS, EXPERTS, SLOTS, 64, width))


def test_a_dealing_table_with_the_wrong_width_or_a_wrong_entry_is_rejected() -> None:
    message = encode(plan_for(0, width=4))
    for width in (1, 2):
        with pytest.raises(WireError, match=r"layers\[0\].log2phy: expected shape \[4.*\], got \[4, 4\]"):
            decode(message, width=width)
    table_ED = plan_for(0, width=4).layers[0].log2phy_E.copy()
    table_ED[3, 2] = 0
    message.layers[0].log2phy.CopyFrom(pack(table_ED))
    with pytest.raises(WireError, match="layer 1 log2phy: expert 3 points to slot 0, which does not hold it"):
        decode(message, width=4)


def test_ranks_with_different_tables_have_the_same_plan_digest() -> None:
    first = plan_for(0)
    second = plan_for(1)
    assert not np.array_equal(first.layers[0].log2phy_E, second.layers[0].log2phy_E)
    assert first.digest == second.digest


def edited(field: str, value: object) -> Callable[[agent_pb2.Plan], None]:
    def edit(message: agent_pb2.Plan) -> None:
        getattr(message.layers[0], field).CopyFrom(pack(np.asarray(value)))

    return edit


def repeat_layer(message: agent_pb2.Plan) -> None:
    message.layers.append(message.layers[0])


def set_field(field: str, value: int) -> Callable[[agent_pb2.Plan], None]:
    return lambda message: setattr(message, field, value)


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda message: message.ClearField("layers"), "plan.layers is empty"),
        (repeat_layer, "twice"),
        (set_field("digest", 1), "digest is 0x1"),
        (set_field("base_epoch", 6), "digest"),
        (edited("physical_to_logical", [[0, 1, 2], [0, 1, 2]]), "expert 3 has no slot"),
        (edited("physical_to_logical", [[0, 1, 1], [3, 2, 1]]), "appears twice on rank 0"),
        (edited("log2phy", [1, 1, 2, 3]), "expert 0 points to slot 1, which does not hold it"),
        (edited("sources", [[0, 1, 2], [3, 6, 5]]), "from slot 6, which is not one of the 2 x 3 slots"),
        (
            edited("sources", [[-1, 1, 2], [3, 2, 5]]),
            "rank 0 slot 0 gets its weights from slot -1, which is not",
        ),
        (edited("sources", [[0, 1, 2], [3, 3, 5]]), "stays on its rank must keep its slot"),
        (edited("sources", [[0, 1, 2], [3, 0, 5]]), "digest"),
    ],
)
def test_an_impossible_plan_is_rejected(damage: Callable[[agent_pb2.Plan], None], error: str) -> None:
    plan = encode(plan_for(0))
    damage(plan)
    with pytest.raises(WireError, match=error):
        decode(plan)


def test_each_token_group_has_one_digest() -> None:
    tables_RE = np.array([[0, 1], [0, 2], [0, 2], [3, 1]], dtype=np.int32)
    first, second = shared_digests(tables_RE, (5, 3, 3, 5))
    assert (first,) == shared_digests(tables_RE[1:3], (0, 0)) == shared_digests(tables_RE, (0, 1, 1, 3))
    assert second == shared_digests(tables_RE[:1].repeat(2, axis=0), (0, 0))[0] != first
    assert shared_digests(tables_RE, (0, 1, 2, 3)) == ()


def test_weights_come_only_from_slots_that_hold_the_expert() -> None:
    (layer,) = plan_for(0).layers
    check_sources(layer, OLD_RS)
    assert layer.moves_M5.tolist() == [[0, 2, 1, 1, 2]]
    np.testing.assert_array_equal(sources_of(layer.moves_M5, RANKS, SLOTS), SOURCE_RS)
    message = "rank 0 slot 0 gets its weights from slot 0, which does not hold its expert in layer 1"
    with pytest.raises(WireError, match=message):
        check_sources(layer, OLD_RS[:, ::-1])


@given(
    ranks=st.integers(1, 5),
    slots=st.integers(1, 40),
    spare=st.integers(0, 3),
    layers=st.integers(1, 4),
    width=st.integers(1, 3),
)
def test_each_rank_receives_its_own_tables(
    ranks: int, slots: int, spare: int, layers: int, width: int
) -> None:
    experts = max(slots, ranks * slots - spare)
    phy2log_RS = Placement.linear(1, experts, ranks, slots).phy2log_LRS[0]
    tables_RE = default_log2phy(phy2log_RS, experts, width)
    kept_RS = np.arange(ranks * slots, dtype=np.int32).reshape(ranks, slots)
    digests = shared_digests(tables_RE, [rank // 2 for rank in range(ranks)])

    def plan_of(rank: int) -> RankPlan:
        numbers = reversed(range(layers))
        updates = (RankLayer(layer, phy2log_RS, kept_RS, tables_RE[rank], digests) for layer in numbers)
        return RankPlan.of(7, 2, 300, 99, tuple(updates))

    shared = SharedPlan(plan_of(0), [tables_RE] * layers)
    for rank in range(ranks):
        sent = shared.response(rank)
        assert len(sent) == shared.size
        received = agent_pb2.ConnectResponse.FromString(sent).plan
        assert equal(decode_plan(received, Shape(ranks, layers, experts, slots, 64, width)), plan_of(rank))
