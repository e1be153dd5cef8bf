"""A layer switches to what its own transfer has staged, or this rank serves no more."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_service.placement import Placement
from eplb_service.wire.plan import RankLayer
from worker_agent.swap.actions import Commit
from worker_agent.swap.commit_register import FatalSwitchError
from worker_agent.swap.installed import Installed
from worker_agent.swap.layer_commit import LayerCommit, staged_for
from worker_agent.swap.transfer import TransferResult

LAYERS = 2
PLACEMENT = Placement.linear(LAYERS, 4, 2, 3)
BEFORE = Installed.first(0, PLACEMENT, PLACEMENT.default_log2phy()[0])


def commit(generation: int) -> Commit:
    phy2log_RS = PLACEMENT.phy2log_LRS[1]
    layer = RankLayer(1, phy2log_RS, BEFORE.log2phy_LE[1], (0, 0), np.zeros((0, 5), dtype=np.int32))
    after = BEFORE.with_layer(1, phy2log_RS, BEFORE.log2phy_LE[1])
    return Commit(9, generation, layer, BEFORE, after)


def test_what_the_commit_s_own_transfer_staged_is_taken() -> None:
    held = TransferResult(3, [], [], 0, 0.0)
    assert staged_for(commit(3), held) is held


@pytest.mark.parametrize("held", [None, TransferResult(2, [], [], 0, 0.0), TransferResult(4, [], [], 0, 0.0)])
def test_a_commit_without_its_staged_weights_is_fatal(held: TransferResult | None) -> None:
    with pytest.raises(FatalSwitchError, match="layer 1 was voted in, but its weights are not staged"):
        staged_for(commit(3), held)


def test_a_layer_that_cannot_be_installed_is_fatal() -> None:
    class Broken:
        def expert_weights(self) -> list[object]:
            raise OSError("the device is gone")

    layers = LayerCommit([Broken(), Broken()], 0, 4, True, None)  # type: ignore[list-item]
    with pytest.raises(FatalSwitchError, match="layer 1 could not be installed: the device is gone"):
        layers.install(commit(3).layer, TransferResult(3, [], [], 0, 0.0))
