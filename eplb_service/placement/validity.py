"""Whether a placement and its tables can be served: checked here for the service, the agents and every file alike."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
"""An int32 array; the variable's name carries its dimensions."""


class PlacementError(ValueError):
    """A placement, table or move list that no set of ranks could serve; the message says where and why."""


def check_shape(experts: int, ranks: int, slots: int) -> None:
    """Raise ``PlacementError`` where no placement of this shape can exist."""
    if min(experts, ranks, slots) < 1:
        raise PlacementError(f"experts, ranks and slots must be positive, got {experts}, {ranks} and {slots}")
    if ranks * slots < experts:
        raise PlacementError(
            f"{ranks} ranks x {slots} slots = {ranks * slots} slots cannot hold {experts} experts; "
            f"use at least {-(-experts // ranks)} slots per rank"
        )
    if slots > experts:
        raise PlacementError(
            f"{slots} slots per rank must hold one of only {experts} experts twice; "
            f"use at most {experts} slots per rank"
        )


def check_layer(phy2log_RS: Int32, experts: int, where: str = "layer") -> None:
    """Raise ``PlacementError`` unless every expert is placed and none is twice on a rank."""
    if phy2log_RS.min() < 0 or phy2log_RS.max() >= experts:
        rank, slot = np.argwhere((phy2log_RS < 0) | (phy2log_RS >= experts))[0]
        found = int(phy2log_RS[rank, slot])
        raise PlacementError(
            f"{where}: rank {rank} slot {slot} names expert {found}, not one of 0..{experts - 1}"
        )
    missing = np.flatnonzero(np.bincount(phy2log_RS.ravel(), minlength=experts) == 0)
    if missing.size:
        raise PlacementError(f"{where}: expert {missing[0]} is in no slot ({missing.size} such experts)")
    in_order = np.sort(phy2log_RS, axis=1)
    twice = np.argwhere(in_order[:, 1:] == in_order[:, :-1])
    if twice.size:
        rank, slot = twice[0]
        raise PlacementError(f"{where}: expert {in_order[rank, slot]} is twice on rank {rank}")


def check_log2phy(
    log2phy: Int32, phy2log_RS: Int32, where: str = "log2phy", source: str = "rank", *, deals: bool = False
) -> None:
    """Raise ``PlacementError`` unless every entry of one layer's tables is a slot that holds its expert.

    Parameters
    ----------
    log2phy
        Integers ``[E]``, the table of one source, or ``[G, E]``, those of G sources.
    phy2log_RS
        int32 ``[R, S]``, a layer that ``check_layer`` has passed.
    where, source
        What the message calls the layer, and each of several sources.
    deals
        Whether tables have an axis of entries behind the others (``dealing``).
    """
    axes = log2phy.ndim - deals
    if axes not in (1, 2) or (deals and not log2phy.shape[-1]):
        expected = "[experts, entries]" if deals else "[experts]"
        raise PlacementError(f"{where}: a table has the shape {expected}, got {list(log2phy.shape)}")
    experts = log2phy.shape[axes - 1]
    table_GED = log2phy.reshape(-1, experts, log2phy.shape[-1] if deals else 1)
    expert_P = phy2log_RS.ravel()
    expert_E1 = np.arange(experts)[:, None]
    if table_GED.size == 0 or (table_GED.min() >= 0 and table_GED.max() < expert_P.size):
        wrong_GED = expert_P.take(table_GED) != expert_E1
    else:
        outside_GED = (table_GED < 0) | (table_GED >= expert_P.size)
        wrong_GED = outside_GED | (expert_P[np.where(outside_GED, 0, table_GED)] != expert_E1)
    if wrong_GED.any():
        table, expert, entry = (int(index) for index in np.argwhere(wrong_GED)[0])
        of = f"{where}, {source} {table}" if axes == 2 else where
        slot = int(table_GED[table, expert, entry])
        raise PlacementError(f"{of}: expert {expert} points to slot {slot}, which does not hold it")
