"""A layer is switched: what is staged and the new tables go into place, between two forward passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from eplb_service.placement import expert_map
from eplb_service.wire.plan import RankLayer
from worker_agent.adapters.live_layer import LiveLayer, PlacementAware
from worker_agent.swap.actions import Commit
from worker_agent.swap.commit_register import FatalSwitchError
from worker_agent.swap.staging import check_installed, install
from worker_agent.swap.transfer import TransferResult


def staged_for(commit: Commit, held: TransferResult | None) -> TransferResult:
    """What is held, if it is what a commit switches to; raises ``FatalSwitchError`` where it is not."""
    if held is None or held.generation != commit.generation:
        raise FatalSwitchError(
            f"layer {commit.layer.layer} was voted in, but its weights are not staged on this rank"
        )
    return held


class LayerCommit:
    """One rank's live layers, switched one at a time.

    Parameters
    ----------
    layers
        The live layers.
    rank, experts
        This rank, and the number of logical experts per layer.
    verify
        Whether what is installed is held against what was staged.
    on_commit
        Called with the index of a layer that has just been installed.
    """

    def __init__(
        self,
        layers: Sequence[LiveLayer],
        rank: int,
        experts: int,
        verify: bool,
        on_commit: Callable[[int], None] | None,
    ) -> None:
        self._layers = layers
        self._rank = rank
        self._experts = experts
        self._verify = verify
        self._on_commit = on_commit

    def install(self, update: RankLayer, result: TransferResult) -> tuple[int, float]:
        """Switch one layer to what its transfer has staged.

        Returns
        -------
        written, seconds
            Bytes of weights written, and the time that it took.

        Raises
        ------
        FatalSwitchError
            Whatever fails before the layer is in place.
        """
        began = time.perf_counter()
        try:
            live = self._layers[update.layer]
            local_E = torch.from_numpy(expert_map(update.phy2log_RS[self._rank], self._experts))
            log2phy_E = torch.from_numpy(update.log2phy_E)
            written = install(live, result.staged, result.slots, local_E, log2phy_E)
            if isinstance(live, PlacementAware):
                live.install_placement(update.phy2log_RS)
            if self._verify:
                check_installed(live, result.staged, result.slots)
            if self._on_commit is not None:
                self._on_commit(update.layer)
        except Exception as error:
            raise FatalSwitchError(f"layer {update.layer} could not be installed: {error}") from error
        return written, time.perf_counter() - began
