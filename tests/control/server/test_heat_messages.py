"""What watchers of heat are told comes back as it was, and a service that tells what cannot be is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from eplb_service.control.server.heat_messages import (
    read_served,
    read_switched,
    served_message,
    switched_message,
)
from eplb_service.control.server.heat_report import costs_little, read_heat_report
from eplb_service.control.server.hello import Shape
from eplb_service.control.server.refusal import RefusedError
from eplb_service.planner.topology import Topology
from eplb_service.wire.codec import WireError, pack
from eplb_service.wire.generated import operator_pb2
from tests.control.fake_group import (
    BYTES_PER_EXPERT,
    EXPERTS,
    LAYERS,
    RANKS,
    SLOTS,
    first_placement,
    heat_report,
    live_of,
    skewed_heat,
)

SHAPE = Shape(RANKS, LAYERS, EXPERTS, SLOTS, BYTES_PER_EXPERT)
TOPOLOGY = Topology(np.array([0, 0, 1, 1], dtype=np.int32), np.arange(4, dtype=np.int32))


def served() -> operator_pb2.ServedModel:
    return served_message(live_of(first_placement(), epoch=3), SHAPE, TOPOLOGY, pending_steps=64)


def test_what_is_served_comes_back_as_it_was() -> None:
    read = read_served(served())
    assert (read.shape, read.nodes_R, read.pending_steps) == (SHAPE, (0, 0, 1, 1), 64)
    assert read.layer_epochs == (3,) * LAYERS
    np.testing.assert_array_equal(read.placement.phy2log_LRS, first_placement().phy2log_LRS)
    slots_RS = first_placement().phy2log_LRS[1][::-1].copy()
    layer, epoch, read_RS = read_switched(switched_message(1, 4, slots_RS), read)
    assert (layer, epoch) == (1, 4)
    np.testing.assert_array_equal(read_RS, slots_RS)


def zeros(message: operator_pb2.ServedModel) -> None:
    message.physical_to_logical.CopyFrom(pack(np.zeros((LAYERS, RANKS, SLOTS), dtype=np.int32)))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda message: setattr(message, "ranks", 0), "ep_size is 0"),
        (lambda message: setattr(message.shape, "layers", 1 << 20), "layers is 1048576"),
        (lambda message: setattr(message, "ranks", RANKS + 1), "served.placement: expected the shape"),
        (zeros, "served.placement: layer 0"),
        (lambda message: message.nodes.append(0), "served.nodes"),
        (lambda message: message.layer_epochs.pop(), "served.layer_epochs"),
        (lambda message: setattr(message, "pending_steps", 0), "served.pending_steps is 0"),
        (lambda message: setattr(message, "pending_steps", 1 << 30), "served.pending_steps"),
    ],
)
def test_a_model_that_cannot_be_is_refused(
    spoil: Callable[[operator_pb2.ServedModel], object], says: str
) -> None:
    message = served()
    spoil(message)
    with pytest.raises((WireError, RefusedError), match=says):
        read_served(message)


def test_a_switch_that_cannot_be_is_refused() -> None:
    known, slots_RS = read_served(served()), first_placement().phy2log_LRS[0]
    with pytest.raises(WireError, match="layer 3 at epoch 1 is none of 3 layers"):
        read_switched(switched_message(LAYERS, 1, slots_RS), known)
    with pytest.raises(WireError, match=r"switched\.placement"):
        read_switched(switched_message(0, 1, np.zeros_like(slots_RS)), known)
    with pytest.raises(WireError, match=r"switched\.placement: expected the shape"):
        read_switched(switched_message(0, 1, slots_RS[:1]), known)


def test_a_report_is_read_without_a_copy_in_the_type_that_it_came_in() -> None:
    report = heat_report(live_of(first_placement()), 1, 16, skewed_heat(8))
    batch = read_heat_report(report, SHAPE, most_steps=8)
    assert batch.source_counts_TLE is not None
    assert batch.source_counts_TLE.dtype == np.uint8
    assert not batch.source_counts_TLE.flags.writeable
    np.testing.assert_array_equal(batch.source_counts_TLE, skewed_heat(8))
    assert batch.tokens_T is not None
    np.testing.assert_array_equal(batch.tokens_T, skewed_heat(8)[:, 0].sum(axis=1))
    report.step_tokens.append(1)
    with pytest.raises(WireError, match=r"step_tokens: expected one for each of 8 steps, got 9"):
        read_heat_report(report, SHAPE, most_steps=8)


def test_only_small_reports_without_deflated_counts_are_read_at_once() -> None:
    report = heat_report(live_of(first_placement()), 1, 16, skewed_heat(8))
    assert costs_little(report)
    report.slot_counts.CopyFrom(pack(np.zeros((16, 58, 256), dtype=np.int32)))
    assert not costs_little(report)
    report.slot_counts.CopyFrom(pack(np.random.default_rng(0).integers(0, 1 << 30, (16, 58, 512))))
    assert not costs_little(report)
