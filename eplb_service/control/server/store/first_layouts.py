"""The layout that a forming of ranks came with, as the store keeps it: what "left alone" means after a restart too."""

from __future__ import annotations

import sqlite3
import zlib

import numpy as np

from eplb_service.control.core.first_layout import FirstLayout
from eplb_service.placement import Int32, Placement
from eplb_service.planner.outlook import Serving

FIRST_LAYOUTS = """
-- log2phy: zlib, [ranks, layers, experts] or with entries behind; NULL where it follows from the placement by the rule.
CREATE TABLE IF NOT EXISTS first_layouts (
    deployment TEXT PRIMARY KEY REFERENCES deployments (name) ON DELETE CASCADE,
    group_id TEXT NOT NULL,
    experts INTEGER NOT NULL,
    layers INTEGER NOT NULL,
    ranks INTEGER NOT NULL,
    slots INTEGER NOT NULL,
    entries INTEGER NOT NULL,
    phy2log BLOB NOT NULL,
    log2phy BLOB
)
"""
_MOST_TABLE_BYTES = 256 << 20
"""Where tables are larger the layout is not kept, and a restarted service measures from what it meets."""


def save_first_layout(database: sqlite3.Connection, name: str, first: FirstLayout) -> None:
    """Remember it in place of an earlier forming's; ``name`` is known."""
    placement, log2phy_RLE = first.layout.placement, first.layout.log2phy_RLE
    database.execute("DELETE FROM first_layouts WHERE deployment = ?", (name,))
    if log2phy_RLE.nbytes > _MOST_TABLE_BYTES:
        return
    by_rule = log2phy_RLE.ndim == 3 and np.array_equal(log2phy_RLE, placement.default_log2phy())
    database.execute(
        "INSERT INTO first_layouts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            name,
            first.group_id,
            placement.experts,
            placement.layers,
            placement.ranks,
            placement.slots,
            log2phy_RLE.shape[3] if log2phy_RLE.ndim == 4 else 0,
            _packed(placement.phy2log_LRS),
            None if by_rule else _packed(log2phy_RLE),
        ),
    )


def first_layout(database: sqlite3.Connection, name: str) -> FirstLayout | None:
    """What was remembered of a deployment; raises ``ValueError`` where that is no layout."""
    row = database.execute(
        "SELECT group_id, experts, layers, ranks, slots, entries, phy2log, log2phy FROM first_layouts "
        "WHERE deployment = ?",
        (name,),
    ).fetchone()
    if row is None:
        return None
    group_id, experts, layers, ranks, slots, entries, phy2log, log2phy = row
    placement = Placement(_unpacked(phy2log, (layers, ranks, slots)), experts)
    if log2phy is None:
        return FirstLayout(group_id, Serving(placement, placement.default_log2phy()))
    behind = (entries,) if entries else ()
    log2phy_RLE = _unpacked(log2phy, (ranks, layers, experts, *behind))
    placement.check_log2phy(log2phy_RLE)
    return FirstLayout(group_id, Serving(placement, log2phy_RLE))


def _packed(values: Int32) -> bytes:
    return zlib.compress(np.ascontiguousarray(values, dtype="<i4").tobytes(), 1)


def _unpacked(blob: bytes, shape: tuple[int, ...]) -> Int32:
    most = 4 * int(np.prod(shape))
    try:
        content = zlib.decompressobj().decompress(blob, most + 1)
    except zlib.error as error:
        raise ValueError(f"a stored layout is damaged: {error}") from error
    return np.frombuffer(content, dtype="<i4").reshape(shape).astype(np.int32)
