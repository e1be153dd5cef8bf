"""Applies a plan: the placement and the tables after some layers have switched."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from eplb_service.placement.placement import Placement
from eplb_service.placement.validity import Int32, PlacementError, check_log2phy


def apply_layers(
    placement: Placement, log2phy: Int32, changes: Iterable[tuple[int, Int32, Int32]]
) -> tuple[Placement, Int32]:
    """Placement and tables after ``changes``; what was given stays as it was.

    Parameters
    ----------
    placement, log2phy
        What serves: the placement, and int32 ``[R, L, E]`` the tables of all source ranks, or of some; ``[R, L, E, D]``
        where they deal.
    changes
        Per layer its index, int32 ``[R, S]`` its new placement, and int32 ``[R, E]`` or ``[R, E, D]`` its new tables.

    Raises
    ------
    PlacementError
        Where a new layer, or one of its tables, cannot be served.
    """
    changed = list(changes)
    switched = placement.with_layers((layer, phy2log_RS) for layer, phy2log_RS, _ in changed)
    tables = np.array(log2phy, dtype=np.int32, order="C")
    for layer, phy2log_RS, table in changed:
        expected = tables[:, layer].shape
        if table.shape != expected:
            raise PlacementError(
                f"log2phy of layer {layer} has the shape {list(expected)}, got {list(table.shape)}"
            )
        check_log2phy(table, phy2log_RS, f"log2phy of layer {layer}", deals=table.ndim == 3)
        tables[:, layer] = table
    return switched, tables
