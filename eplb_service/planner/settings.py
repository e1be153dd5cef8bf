"""What an operator may set about a decision; it checks itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

POLICIES = ("none", "deepseek", "flashlb")
"""``none`` never moves; ``deepseek`` is greedy replicas and LPT packing; ``flashlb`` is the search."""

SPLITS = ("tables", "even")
"""``tables``: each source rank sends an expert's tokens to the replica that its log2phy names (vLLM-Ascend); ``even``:
the host spreads them over the replicas itself, token by token (vLLM)."""


class SettingsError(ValueError):
    """A setting that no planner could follow; the message names it and its bounds."""


@dataclass(frozen=True)
class PlannerSettings:
    """How decisions are made.

    Parameters
    ----------
    policy
        One of ``POLICIES``.
    par_threshold
        Layers whose peak-to-average ratio is at or below it are left alone (cherry-picking).
    min_gain
        Peak-to-average ratio that a layer must win to be worth switching.
    max_layers
        Most layers per decision, worst first; ``None`` for all.
    move_price
        Part of its peak-to-average ratio that a layer must win to have every slot moved; one slot costs its share.
    episodes
        Most episodes that a window is summed into; 1 plans on the plain sum.
    z
        Standard deviations above its mean at which a rank's load is taken; ``None`` for where the hottest of so many
        ranks is expected.
    half_lives
        How fast old episodes may fade, as parts of the window; back-testing chooses for each layer. The first is
        taken where the window is too short to test.
    tree_search
        Search replica counts together with the placement, by tree in small layers and by annealing where ranks have
        few slots; off: greedy counts.
    local_search
        Improve the placement by swaps and replica exchanges.
    solve_tables
        Choose log2phy from measured source heat; off: the engines' fixed rule.
    split
        How the host splits an expert's tokens over its replicas, one of ``SPLITS``.
    warm
        Start from what is deployed and weigh it against a fresh placement; off: every picked layer is placed anew.
    expert_groups
        Groups of neighbouring experts, as the router has them, that each stay on one node with all their copies
        (hierarchical placement); ``None`` for experts on any node.
    seed
        Of every random choice: the annealing of a search.
    threads
        Layers solved at a time; ``None`` for one each CPU. Results do not depend on it.
    budget_ms
        Milliseconds after which no further layer is begun, the worst having come first; what is left of them improves
        layers that are placed anew. ``None`` for a fixed effort. What is decided with a budget depends on the machine.

    Raises
    ------
    SettingsError
        Where a value is out of bounds.
    """

    policy: str = "flashlb"
    par_threshold: float = 1.02
    min_gain: float = 0.01
    max_layers: int | None = None
    move_price: float = 0.3
    episodes: int = 64
    z: float | None = None
    half_lives: tuple[float, ...] = (math.inf, 0.5, 0.25, 0.1, 0.05, 0.025)
    tree_search: bool = True
    local_search: bool = True
    solve_tables: bool = True
    split: str = "tables"
    warm: bool = True
    expert_groups: int | None = None
    seed: int = 0
    threads: int | None = None
    budget_ms: float | None = None

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise SettingsError(f"policy is {self.policy!r}; choose one of {', '.join(POLICIES)}")
        if self.split not in SPLITS:
            raise SettingsError(f"split is {self.split!r}; choose one of {', '.join(SPLITS)}")
        self._at_least("par_threshold", 1.0)
        self._at_least("min_gain", 0.0)
        self._at_least("move_price", 0.0)
        self._at_least("episodes", 1)
        self._at_least("seed", 0)
        for name, bound in (("max_layers", 1), ("expert_groups", 1), ("threads", 1), ("z", 0.0)):
            if getattr(self, name) is not None:
                self._at_least(name, bound)
        if self.budget_ms is not None and not self.budget_ms > 0:
            raise SettingsError(
                f"budget_ms is {self.budget_ms}; give the planner some time, or None for no bound"
            )
        if not self.half_lives or not all(half_life > 0 for half_life in self.half_lives):
            raise SettingsError(
                f"half_lives is {self.half_lives}; name at least one, each above 0 (inf: no fading)"
            )

    def _at_least(self, name: str, bound: float) -> None:
        value = getattr(self, name)
        if not math.isfinite(value) or value < bound:
            raise SettingsError(f"{name} is {value}; it must be a finite number, {bound} or more")
