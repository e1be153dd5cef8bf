"""Decision for an engine that moves the weights itself and keeps its own tables (policy mode)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_core.heat.window import Window, checked_heat
from eplb_core.placement import Int32, Placement, PlacementError, checked_foreign, repaired
from eplb_core.planner import decision
from eplb_core.planner.dealing import default_tables
from eplb_core.planner.plan import Layout
from eplb_core.planner.session import DecisionSession
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.topology import Topology


def place_for_engine(
    heat_NLE: npt.ArrayLike, old_LP: npt.ArrayLike, ranks: int, nodes: int, settings: PlannerSettings
) -> npt.NDArray[np.int64]:
    """Place the experts of all layers, starting from an engine's placement.

    The result depends only on the arguments, unless the settings limit the time. There is no schedule: the engine
    chooses when to request a decision.

    Parameters
    ----------
    heat_NLE
        Integers ``[N, L, E]``, tokens per part of the engine's window, layer and logical expert, oldest part first.
        Parts without any tokens are ignored.
    old_LP
        Integers ``[L, P]``, logical expert in each physical slot, sorted by rank. Any placement that serves all experts
        is accepted, even if an expert is in two slots of one rank.
    ranks
        R, number of ranks; P must be a multiple of it.
    nodes
        Number of nodes; each contains the same number of consecutive ranks. Transfers within a node are cheaper.
        Ignored if it does not divide R.
    settings
        Planner settings, which include the engine's split.

    Returns
    -------
    ndarray
        int64 ``[L, P]``, new placement. An expert that stays on its rank keeps its slot.

    Raises
    ------
    HeatError, PlacementError
        If an argument is invalid, or a slot is empty.

    Examples
    --------
    There are two ranks with three slots each. Expert 2 is the hottest, but expert 1 has the second replica. The planner
    replaces that replica, which is one move:

    >>> heat_NLE = np.tile([2000, 1000, 6000, 1000], (8, 1, 1))
    >>> place_for_engine(heat_NLE, [[0, 1, 2, 3, 0, 1]], 2, 1, PlannerSettings(split="even")).tolist()
    [[0, 1, 2, 3, 0, 2]]
    """
    heat_NLE = checked_heat(heat_NLE)
    old_LP = np.asarray(old_LP)
    layers, experts = heat_NLE.shape[1:]
    if old_LP.ndim != 2 or len(old_LP) != layers or not old_LP.size or old_LP.shape[1] % ranks:
        raise PlacementError(
            f"expected a placement of {layers} layers and a multiple of {ranks} slots, got shape "
            f"{list(old_LP.shape)}"
        )
    slots = old_LP.shape[1] // ranks
    old_LRS = checked_foreign(old_LP.reshape(layers, ranks, slots), experts)
    if (old_LRS < 0).any():
        raise PlacementError("the placement has empty slots")
    busy_NLE = heat_NLE[heat_NLE.any(axis=(1, 2))]
    if not len(busy_NLE):
        return old_LP.astype(np.int64)
    placement = repaired(old_LRS, experts, slots, busy_NLE.sum(axis=0, dtype=np.float64))
    inputs = decision.DecisionInputs(
        Window(busy_NLE),
        Layout(placement, default_tables(placement, settings.split, settings.deal_width)),
        None,
        Topology(_consecutive(ranks, nodes), np.arange(ranks, dtype=np.int32)),
        settings,
        DecisionSession(),
    )
    plan, _ = decision.decide(inputs)
    new = inputs.layout.changed_by(plan).placement
    return _keeping_slots(old_LRS, new).reshape(layers, -1)


def _consecutive(ranks: int, nodes: int) -> Int32:
    """Return the node of each rank, int32 ``[R]``, with consecutive ranks on each node."""
    if ranks % nodes:
        nodes = 1
    return (np.arange(ranks) * nodes // ranks).astype(np.int32)


def _keeping_slots(old_LRS: Int32, new: Placement) -> npt.NDArray[np.int64]:
    """Return the new placement with each expert that stays on its rank in its old slot, int64 ``[L, R, S]``.

    Examples
    --------
    Expert 1 stays on the first rank, so it keeps slot 1, and expert 2 takes the free slot:

    >>> new = Placement(np.array([[[1, 2], [3, 0]]], dtype=np.int32), experts=4)
    >>> _keeping_slots(np.array([[[0, 1], [3, 2]]], dtype=np.int32), new).tolist()
    [[[2, 1], [3, 0]]]
    """
    kept_LRS: npt.NDArray[np.int64] = new.phy2log_LRS.astype(np.int64)
    for layer, rank in np.argwhere((old_LRS != kept_LRS).any(axis=2)):
        old_S = old_LRS[layer, rank].tolist()
        new_S = kept_LRS[layer, rank].tolist()
        slots: list[int | None] = [None] * len(old_S)
        arriving = []
        for expert in new_S:
            if expert in old_S:
                slots[old_S.index(expert)] = expert
            else:
                arriving.append(expert)
        fillers = iter(arriving)
        kept_LRS[layer, rank] = [next(fillers) if expert is None else expert for expert in slots]
    return kept_LRS
