"""Local decisions of policy mode, made in the same way for all engines."""

from __future__ import annotations

import logging
from collections import Counter

import numpy.typing as npt

from eplb_core.planner.engine_decision import place_for_engine
from eplb_core.planner.settings import AUTO, EVEN, PlannerSettings
from worker_agent.policy.figures import Int64

_log = logging.getLogger("eplb.agent")

FAILURES: Counter[str] = Counter()
"""Number of decisions in this process that failed, by type of error."""


def decide(
    heat_NLE: npt.ArrayLike,
    old_LP: npt.ArrayLike,
    ranks: int,
    *,
    nodes: int = 1,
    split: str = EVEN,
    timed: bool = True,
) -> Int64 | None:
    """Place the experts of all layers for an engine that moves the weights itself.

    The function never raises an exception, because its caller is the engine. It counts errors in ``FAILURES`` and logs
    the first one of each type. The result depends only on the arguments, not on a clock, a time budget or environment
    variables. However, the kernels' sums may be rounded differently on CPUs with different vector units, so
    ``agreement.Agreement`` distributes the first rank's result.

    Parameters
    ----------
    heat_NLE, old_LP, ranks, nodes
        As for ``engine_decision.place_for_engine``.
    split
        The engine's split of an expert's tokens over its replicas; one of ``planner.settings.SPLITS``.
    timed
        False if the engine passes only the sum of its window. In that case, a change is not weighed against the cost
        of its moves, because a single part does not show how much the heat varies.

    Returns
    -------
    ndarray or None
        int64 ``[L, P]``, new placement. An expert that stays on its rank keeps its slot. ``None`` if the engine's own
        policy must decide, because of an error.

    Examples
    --------
    >>> import numpy as np
    >>> heat_NLE = np.tile([2000, 1000, 6000, 1000], (8, 1, 1))
    >>> decide(heat_NLE, [[0, 1, 2, 3, 0, 1]], ranks=2).tolist()
    [[0, 1, 2, 3, 0, 2]]
    """
    try:
        settings = PlannerSettings(split=split, threads=1, move_price=AUTO if timed else 0.0)
        return place_for_engine(heat_NLE, old_LP, ranks, nodes, settings)
    except Exception as error:
        name = type(error).__name__
        FAILURES[name] += 1
        if FAILURES[name] == 1:
            _log.error("the planner failed; the engine's own policy decides instead", exc_info=error)
        return None
