"""What a decision is given must fit together, and what it says must be servable."""

from __future__ import annotations

from eplb_service.heat.window import HeatError, Window
from eplb_service.placement import Int32, Placement, PlacementError, check_layer, check_log2phy
from eplb_service.planner.topology import Topology, TopologyError
from eplb_service.solver.validity import placeable, tables_hold


def check_agreement(window: Window, placement: Placement, log2phy_RLE: Int32, topology: Topology) -> None:
    """Raise ``HeatError``, ``PlacementError`` or ``TopologyError`` where the arguments contradict each other."""
    if (window.layers, window.experts) != (placement.layers, placement.experts):
        raise HeatError(
            f"heat of {window.layers} layers x {window.experts} experts does not fit a placement of "
            f"{placement.layers} x {placement.experts}"
        )
    wanted = (placement.ranks, placement.layers, placement.experts)
    if log2phy_RLE.shape != wanted:
        raise PlacementError(f"log2phy has the shape {list(wanted)}, got {list(log2phy_RLE.shape)}")
    for layer in range(placement.layers):
        check_tables(log2phy_RLE[:, layer], placement.phy2log_LRS[layer], f"log2phy of layer {layer}, rank")
    if window.source_RLE is not None and window.source_RLE.shape[0] != placement.ranks:
        raise HeatError(
            f"source heat of {window.source_RLE.shape[0]} ranks does not fit {placement.ranks} ranks"
        )
    if topology.ranks != placement.ranks:
        raise TopologyError(f"a topology of {topology.ranks} ranks does not fit {placement.ranks} ranks")


def flaw_of(phy2log_RS: Int32, log2phy_GE: Int32, experts: int) -> str:
    """What is wrong with an answer, empty where nothing is: no layer is switched on the solver's word alone."""
    try:
        if not placeable(phy2log_RS.copy(), experts):
            check_layer(phy2log_RS, experts)
        check_tables(log2phy_GE, phy2log_RS, "table of source")
    except PlacementError as error:
        return str(error)
    return ""


def check_tables(log2phy_GE: Int32, phy2log_RS: Int32, where: str) -> None:
    """``check_log2phy`` for all tables of one layer; one by one only where something is wrong."""
    # Copies are alike in layout, whatever they are of, so that the kernel is compiled for one kind alone.
    if not tables_hold(log2phy_GE.copy(), phy2log_RS.copy()):
        for table, log2phy_E in enumerate(log2phy_GE):
            check_log2phy(log2phy_E, phy2log_RS, f"{where} {table}")
