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
        check_tables_follow(tables[:, layer], table, phy2log_RS, layer)
        tables[:, layer] = table
    return switched, tables


def check_tables_follow(before: Int32, table: Int32, phy2log_RS: Int32, layer: int) -> None:
    """Raise ``PlacementError`` unless a layer's tables can take the place of those that it has.

    Parameters
    ----------
    before, table
        int32 ``[R, E]`` or ``[R, E, D]``.
    phy2log_RS
        The layer's new slots.
    layer
        Its index, for the message.
    """
    if table.shape != before.shape:
        raise PlacementError(
            f"log2phy of layer {layer} has the shape {list(before.shape)}, got {list(table.shape)}"
        )
    check_log2phy(table, phy2log_RS, f"log2phy of layer {layer}", deals=table.ndim == 3)
