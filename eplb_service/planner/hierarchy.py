"""Whether groups of experts can stay together on nodes, and in whose words not."""

from __future__ import annotations

import numpy as np

from eplb_service.placement import Placement
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.topology import Topology


def groups_on_nodes(settings: PlannerSettings, placement: Placement, topology: Topology) -> tuple[int, str]:
    """Groups of experts to keep together on nodes, 0 for none; and why none, where some were asked for.

    On one node every placement keeps them together.
    """
    groups = settings.expert_groups
    ranks_K = np.bincount(topology.nodes()[0])
    if groups is None or ranks_K.size == 1:
        return 0, ""
    if placement.experts % groups:
        return 0, f"{placement.experts} experts do not divide into {groups} groups"
    if groups % ranks_K.size:
        return 0, f"{groups} expert groups do not spread evenly over {ranks_K.size} nodes"
    if (ranks_K != ranks_K[0]).any():
        return 0, f"nodes have from {ranks_K.min()} to {ranks_K.max()} ranks"
    if placement.slots * ranks_K.size > placement.experts:
        return 0, f"a rank has more slots than one of {ranks_K.size} nodes would have experts"
    return groups, ""
