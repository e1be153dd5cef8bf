"""What all ranks serve together, put together of their Hellos; with many ranks that takes long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from eplb_service.control.core.errors import ConflictError
from eplb_service.control.core.live_placement import LivePlacement
from eplb_service.placement import Placement, PlacementError, with_entries
from eplb_service.wire.hello import Hello


@dataclass(frozen=True)
class Assembly:
    """What comes of the Hellos of all ranks.

    Parameters
    ----------
    hellos
        By rank.
    outcome
        What they serve, or why that is not one placement.
    """

    hellos: Mapping[int, Hello]
    outcome: LivePlacement | ConflictError

    @classmethod
    def of(cls, hellos: Mapping[int, Hello]) -> Assembly:
        """Put it together, with all that is needed to read heat under it."""
        try:
            live = assemble(hellos)
        except ConflictError as error:
            return cls(hellos, error)
        _ = live.placed_L
        return cls(hellos, live)

    def is_of(self, hellos: Mapping[int, Hello]) -> bool:
        """Whether it was made of these very Hellos."""
        return self.hellos.keys() == hellos.keys() and all(
            self.hellos[rank] is hello for rank, hello in hellos.items()
        )

    def result(self) -> LivePlacement:
        """What they serve; raises ``ConflictError`` where that is not one placement."""
        if isinstance(self.outcome, ConflictError):
            raise self.outcome
        return self.outcome


def assemble(hellos: Mapping[int, Hello]) -> LivePlacement:
    """What all ranks together serve; raises ``ConflictError`` where that is not one placement."""
    in_order = [hellos[rank] for rank in range(len(hellos))]
    first = in_order[0]
    phy2log_LRS = np.stack([hello.slots_LS for hello in in_order], axis=1)
    tables_RLE = np.stack([hello.log2phy_LE for hello in in_order])
    try:
        live = LivePlacement.of(
            Placement(phy2log_LRS, first.shape.experts), tables_RLE, first.epoch, first.layer_epochs
        )
    except PlacementError as error:
        raise ConflictError(f"the ranks' slots do not make a placement: {error}") from error
    if live.digest != first.digest:
        raise ConflictError(
            f"the ranks' slots together have the digest {live.digest:#x}, the ranks say {first.digest:#x}"
        )
    _check_token_groups(in_order)
    return live


def _check_token_groups(hellos: list[Hello]) -> None:
    first_of: dict[int, Hello] = {}
    for hello in hellos:
        first = first_of.setdefault(hello.token_group, hello)
        differs = np.flatnonzero(with_entries(first.log2phy_LE != hello.log2phy_LE, 1).any(axis=1))
        if differs.size:
            raise ConflictError(
                f"ranks {first.rank} and {hello.rank} see the same tokens (token group {hello.token_group}) but their "
                f"log2phy differ in layer {differs[0]}"
            )
