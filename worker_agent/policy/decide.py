"""The decision of policy mode, which is the same function for all engines."""

from __future__ import annotations

import logging
from collections import Counter

import numpy as np
import numpy.typing as npt

from eplb_core.heat.window import Window, checked_heat
from eplb_core.placement import Int32, Placement, PlacementError, checked_foreign, repaired
from eplb_core.planner import decision
from eplb_core.planner.dealing import default_tables
from eplb_core.planner.plan import Layout
from eplb_core.planner.session import DecisionSession
from eplb_core.planner.settings import AUTO, EVEN, PlannerSettings
from eplb_core.planner.topology import Topology

_log = logging.getLogger("eplb.agent")

FAILURES: Counter[str] = Counter()
"""Number of decisions of this process that ended in an error, by the error's type."""


def decide(
    heat_NLE: npt.ArrayLike,
    old_LP: npt.ArrayLike,
    ranks: int,
    *,
    nodes: int = 1,
    split: str = EVEN,
    timed: bool = True,
) -> npt.NDArray[np.int64] | None:
    """Place the experts of all layers for an engine that moves the weights itself.

    The function never raises an exception, because its caller is the engine. It counts errors in ``FAILURES`` and logs
    the first one of each type. The result depends only on the arguments: there is no clock, no time budget, and no
    environment variable. However, the kernels' sums may be rounded differently on CPUs with other vector units, so the
    ranks do not each use their own result: ``agreement.Agreement`` distributes that of the first rank.

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
        Number of nodes, with the same number of consecutive ranks each. Transfers within a node are cheaper.
    split
        The engine's split of an expert's tokens over its replicas; one of ``planner.settings.SPLITS``.
    timed
        False if the engine gives only the sum of its window. A change is then not weighed against the cost of its
        moves, because a single part does not show how much the heat varies.

    Returns
    -------
    ndarray or None
        int64 ``[L, P]``, new placement. An expert that stays on its rank keeps its slot. ``None`` if the engine's own
        policy must decide: after an error, or if a slot is empty, as during elastic scaling.

    Examples
    --------
    There are two ranks with three slots each. Expert 2 is the hottest, but expert 1 has the second replica. The planner
    replaces that replica, which is one move:

    >>> import numpy as np
    >>> heat_NLE = np.tile([2000, 1000, 6000, 1000], (8, 1, 1))
    >>> decide(heat_NLE, [[0, 1, 2, 3, 0, 1]], ranks=2).tolist()
    [[0, 1, 2, 3, 0, 2]]
    """
    try:
        return _decide(np.asarray(heat_NLE), np.asarray(old_LP), ranks, nodes, split, timed)
    except Exception as error:
        name = type(error).__name__
        FAILURES[name] += 1
        if FAILURES[name] == 1:
            _log.error("the planner failed; the engine's own policy decides instead", exc_info=error)
        return None


def _decide(
    heat_NLE: npt.NDArray[np.generic],
    old_LP: npt.NDArray[np.generic],
    ranks: int,
    nodes: int,
    split: str,
    timed: bool,
) -> npt.NDArray[np.int64] | None:
    heat_NLE = checked_heat(heat_NLE)
    if old_LP.ndim != 2 or len(old_LP) != heat_NLE.shape[1] or old_LP.shape[1] % ranks:
        raise PlacementError(
            f"expected a placement of {heat_NLE.shape[1]} layers and a multiple of {ranks} slots, got shape "
            f"{list(old_LP.shape)}"
        )
    layers, physical = old_LP.shape
    old_LRS = old_LP.reshape(layers, ranks, physical // ranks)
    if (old_LRS < 0).any():
        return None
    busy_NLE = heat_NLE[heat_NLE.any(axis=(1, 2))]
    if not len(busy_NLE):
        return old_LP.astype(np.int64)
    settings = PlannerSettings(split=split, threads=1, move_price=AUTO if timed else 0.0)
    experts = heat_NLE.shape[2]
    placement = repaired(
        checked_foreign(old_LRS, experts), experts, physical // ranks, busy_NLE.sum(axis=0, dtype=np.float64)
    )
    inputs = decision.DecisionInputs(
        Window(busy_NLE),
        Layout(placement, default_tables(placement, split, settings.deal_width)),
        None,
        Topology(_consecutive(ranks, nodes), np.arange(ranks, dtype=np.int32)),
        settings,
        DecisionSession(),
    )
    plan, _ = decision.decide(inputs)
    new = inputs.layout.changed_by(plan).placement
    return _keeping_slots(old_LRS, new).reshape(layers, physical)


def _consecutive(ranks: int, nodes: int) -> Int32:
    """Return the node of each rank, int32 ``[R]``, with consecutive ranks on each node."""
    if ranks % nodes:
        nodes = 1
    return (np.arange(ranks) * nodes // ranks).astype(np.int32)


def _keeping_slots(old_LRS: npt.NDArray[np.generic], new: Placement) -> npt.NDArray[np.int64]:
    """Return the new placement with each expert that stays on its rank in its old slot, int64 ``[L, R, S]``.

    Examples
    --------
    Expert 1 stays on the first rank, so it keeps slot 1, and expert 2 takes the free slot:

    >>> new = Placement(np.array([[[1, 2], [3, 0]]], dtype=np.int32), experts=4)
    >>> _keeping_slots(np.array([[[0, 1], [3, 2]]]), new).tolist()
    [[[2, 1], [3, 0]]]
    """
    kept_LRS: npt.NDArray[np.int64] = new.phy2log_LRS.astype(np.int64)
    for layer, rank in np.argwhere((old_LRS != kept_LRS).any(axis=2)):
        old_S = old_LRS[layer, rank].tolist()
        new_S = kept_LRS[layer, rank].tolist()
        slots: list[int | None] = [None] * len(old_S)
        moved = []
        for expert in new_S:
            if expert in old_S:
                slots[old_S.index(expert)] = expert
            else:
                moved.append(expert)
        arriving = iter(moved)
        kept_LRS[layer, rank] = [next(arriving) if expert is None else expert for expert in slots]
    return kept_LRS
