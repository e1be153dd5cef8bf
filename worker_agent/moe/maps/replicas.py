"""Where each expert's copies stand, as hosts that choose among copies themselves want it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eplb_service.placement import Int32, check_layer


@dataclass(frozen=True)
class ReplicaTable:
    """All copies of each logical expert of one layer."""

    log2phys_EC: Int32
    """int32 ``[E, C]``: physical ids in ascending order, -1 where an expert has fewer copies than C."""

    counts_E: Int32
    """int32 ``[E]``."""


def replica_table(phy2log_RS: Int32, experts: int, columns: int | None = None) -> ReplicaTable:
    """The copies of each expert under a placement; C is the most that any expert has, or ``columns``.

    Raises ``PlacementError`` where the placement is not valid and ``ValueError`` where ``columns`` are too few.
    """
    check_layer(phy2log_RS, experts)
    flat_P = phy2log_RS.ravel()
    counts_E = np.bincount(flat_P, minlength=experts).astype(np.int32)
    most = int(counts_E.max())
    if columns is None:
        columns = most
    elif columns < most:
        raise ValueError(f"an expert has {most} copies, which do not fit {columns} columns")
    log2phys_EC = np.full((experts, columns), -1, dtype=np.int32)
    by_expert_P = np.argsort(flat_P, kind="stable").astype(np.int32)
    first_E = np.cumsum(counts_E) - counts_E
    column_P = np.arange(flat_P.size) - np.repeat(first_E, counts_E)
    log2phys_EC[flat_P[by_expert_P], column_P] = by_expert_P
    return ReplicaTable(log2phys_EC, counts_E)
