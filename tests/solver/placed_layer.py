"""A randomly placed case, with the data types of the kernels and those of their slow twins."""

from __future__ import annotations

import numpy as np

from eplb_core.placement import check_layer
from eplb_core.solver.construction import Assignment, assignment_of
from eplb_core.solver.model import LayerLayout, _normalise, homes, with_covariance
from eplb_core.solver.tables import fixed_rule, slots_by_expert
from tests.solver.layers_of import Case
from tests.solver.slow import heat


class PlacedLayer:
    """A random legal placement with even shares, and its heat in float32 and float64."""

    def __init__(self, case: Case, z: float, seed: int = 0) -> None:
        self.case = case
        self.z = z
        self.generator = np.random.default_rng(seed)
        self.weight_N = np.linspace(1, 2, len(case.heat_NE))
        self.scaled_EN, self.share_N = _normalise(case.heat_NE, self.weight_N, case.ranks)
        self.heat32 = with_covariance(self.scaled_EN, self.share_N)
        self.heat = self.scaled_EN.astype(float), self.share_N.astype(float)
        self.phy2log_RS = random_placement(case.ranks, case.slots, case.experts, self.generator)
        self.share_RS = heat.even_shares(self.phy2log_RS)

    def assignment(self) -> Assignment:
        return assignment_of(self.phy2log_RS, self.share_RS.astype(np.float32), self.heat32)

    def risks(self) -> np.ndarray:
        return heat.rank_risks(self.phy2log_RS, self.share_RS, *self.heat, self.z)

    @property
    def rounding(self) -> float:
        """Bound on a risk's float32 error.

        The variance, whose root is taken, is a small difference of large numbers.
        """
        peak = max(self.case.ranks, 1)
        return 1e-5 * peak + (2e-3 * peak if self.z else 0.0)


def random_placement(ranks: int, slots: int, experts: int, generator: np.random.Generator) -> np.ndarray:
    """Draw legal replica counts, and place each expert on the ranks with the most free slots, int32 ``[R, S]``.

    The slots are shuffled.
    """
    replicas_E = np.ones(experts, dtype=int)
    for _ in range(ranks * slots - experts):
        replicas_E[generator.choice(np.flatnonzero(replicas_E < ranks))] += 1
    rows: list[list[int]] = [[] for _ in range(ranks)]
    for expert in np.argsort(-replicas_E, kind="stable"):
        emptiest = sorted(range(ranks), key=lambda r: (len(rows[r]), generator.random()))
        for r in emptiest[: replicas_E[expert]]:
            rows[r].append(int(expert))
    phy2log_RS = generator.permuted(np.array(rows, dtype=np.int32), axis=1)
    check_layer(phy2log_RS, experts)
    return np.ascontiguousarray(phy2log_RS)


def deployed_on(
    phy2log_RS: np.ndarray,
    share_GE: np.ndarray,
    log2phy_GE: np.ndarray | None = None,
    node_R: np.ndarray | None = None,
    node_G: np.ndarray | None = None,
) -> LayerLayout:
    """Return a current layout with this placement, by default on one node and with the engines' tables."""
    sources, experts = share_GE.shape
    if log2phy_GE is None:
        log2phy_GE = fixed_rule(*slots_by_expert(phy2log_RS, experts), sources)
    node_R, node_G = (
        np.zeros(size, dtype=np.int32) if node is None else node
        for node, size in ((node_R, len(phy2log_RS)), (node_G, sources))
    )
    return LayerLayout(phy2log_RS, log2phy_GE, share_GE, homes(phy2log_RS, experts), node_R, node_G)
