"""Candidates on several nodes: brought near, and how many of their tokens cross."""

from __future__ import annotations

from eplb_service.solver.candidates import Candidate
from eplb_service.solver.near_tables import crossing, near_tables
from eplb_service.solver.problem import EVEN, SOLVED, Deployed, Heat


def brought_near(candidate: Candidate, heat: Heat, deployed: Deployed, tables: int) -> Candidate:
    """The candidate with tables that keep more tokens on their nodes, no hotter on this heat.

    As it is where there is one node, or where tables are not the solver's to choose.
    """
    if tables != SOLVED or not deployed.node_R.any():
        return candidate
    log2phy_GE, par = near_tables(
        candidate.phy2log_RS,
        candidate.log2phy_GE,
        heat.demand.mean_E,
        heat.scaled_EN,
        heat.share_N,
        deployed.share_GE,
        deployed.node_G,
        deployed.node_R,
    )
    return candidate._replace(log2phy_GE=log2phy_GE, par=par)


def crossing_of(candidate: Candidate, heat: Heat, deployed: Deployed, tables: int) -> float:
    """Part of the tokens that leave their source's node; 0 on one node, or where the host asks no table."""
    if tables == EVEN or not deployed.node_R.any():
        return 0.0
    return crossing(
        candidate.log2phy_GE,
        deployed.share_GE,
        heat.demand.mean_E,
        deployed.node_G,
        deployed.node_R,
        candidate.phy2log_RS.shape[1],
    )
