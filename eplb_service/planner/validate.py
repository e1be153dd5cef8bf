"""Checks that what a decision is given fits together, and that what it answers can be served."""

from __future__ import annotations

from eplb_service.heat.window import HeatError, Window
from eplb_service.placement import Int32, Placement, PlacementError, check_layer, check_log2phy
from eplb_service.planner.topology import Topology, TopologyError


def check_arguments(window: Window, placement: Placement, log2phy_RLE: Int32, topology: Topology) -> None:
    """Check that the arguments of a decision do not contradict each other.

    Raises
    ------
    HeatError, PlacementError, TopologyError
        Naming the two that do.
    """
    if (window.layers, window.experts) != (placement.layers, placement.experts):
        raise HeatError(
            f"heat of {window.layers} layers x {window.experts} experts does not fit a placement of "
            f"{placement.layers} x {placement.experts}"
        )
    placement.check_log2phy(log2phy_RLE)
    if window.source_RLE is not None and window.source_RLE.shape[0] != placement.ranks:
        raise HeatError(
            f"source heat of {window.source_RLE.shape[0]} ranks does not fit {placement.ranks} ranks"
        )
    if topology.ranks != placement.ranks:
        raise TopologyError(f"a topology of {topology.ranks} ranks does not fit {placement.ranks} ranks")


def flaw_of(phy2log_RS: Int32, log2phy_GE: Int32, experts: int) -> str:
    """What is wrong with an answer, empty where nothing is: no layer is switched unless its answer was checked."""
    try:
        check_layer(phy2log_RS, experts)
        check_log2phy(log2phy_GE, phy2log_RS, "log2phy", source="source")
    except PlacementError as error:
        return str(error)
    return ""
