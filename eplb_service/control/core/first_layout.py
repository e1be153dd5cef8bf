"""The layout that a forming of ranks came with: what is meant by leaving a deployment alone."""

from __future__ import annotations

from dataclasses import dataclass

from eplb_service.control.core.live_placement import LivePlacement
from eplb_service.control.core.membership import Group
from eplb_service.planner.outlook import Serving


@dataclass(frozen=True)
class FirstLayout:
    """What was served when the ranks of a forming first came together, with whichever service that was.

    Parameters
    ----------
    group_id
        Of the forming.
    layout
        Placement and tables.
    """

    group_id: str
    layout: Serving

    def is_what(self, live: LivePlacement) -> bool:
        """Whether it was just met, and is served as it is."""
        return self.layout.placement is live.placement

    def is_of(self, group: Group | None) -> bool:
        """Whether these are the ranks that came with it."""
        if group is None or group.group_id != self.group_id:
            return False
        shape, placement = group.shape, self.layout.placement
        return (shape.layers, shape.experts, shape.ranks, shape.slots) == (
            placement.layers,
            placement.experts,
            placement.ranks,
            placement.slots,
        )
