"""The settings of a decision: their defaults, their bounds, and the help that users read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from eplb_service.cost.curve import CostCurve
from eplb_service.placement import MOST_ENTRIES

POLICIES = ("none", "deepseek", "flashlb")
"""``none`` never moves an expert. ``deepseek`` is DeepSeek's EPLB: greedy replica counts and LPT packing on the sum of
the window. ``flashlb`` is this project's solver, built on the three ideas of FlashLB (an EPLB policy of vLLM-Ascend):
replica counts and placement searched jointly, an objective over many episodes, and layer-wise cherry-picking. It is not
FlashLB's code; ``docs/solver.md`` measures the two side by side."""

TABLES, EVEN, DEAL, STEP = "tables", "even", "deal", "step"
SPLITS = (TABLES, EVEN, DEAL, STEP)
"""How a host splits an expert's tokens over its replicas. ``tables``: each source rank sends them to the replica that
its log2phy names (vLLM-Ascend); ``even``: the host spreads them over the replicas itself, token by token (vLLM);
``deal``: each source rank sends them in turn to the entries of its dealing table; ``step``: all ranks split each step's
tokens alike, so that the hottest rank is as cool as the placement allows (the live layer's stepwise split; SGLang's
LPLB)."""

AUTO: Literal["auto"] = "auto"
"""The ``move_price`` that is computed from what moves cost."""
NumberOrAuto = float | Literal["auto"]


class SettingsError(ValueError):
    """A setting that no planner could follow; the message names it and its bounds."""


def _setting(default: Any, help: str) -> Any:
    """A field with the text that explains it to users."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class PlannerSettings:
    """How decisions are made.

    Each field's metadata holds the ``help`` that commands, service and docs show.

    Raises
    ------
    SettingsError
        Where a value is out of bounds.
    """

    policy: str = _setting(
        "flashlb",
        f"How layers are placed: {', '.join(POLICIES)}. flashlb is this project's own solver, built on the three ideas "
        "of FlashLB (vLLM-Ascend); deepseek is DeepSeek's greedy EPLB; none never moves an expert.",
    )
    par_threshold: float = _setting(
        1.02,
        "Layers whose peak-to-average ratio, in episodes, is at or below it are left alone (cherry-picking).",
    )
    min_gain: float = _setting(0.01, "Peak-to-average ratio that a layer must win to be worth switching.")
    max_layers: int | None = _setting(
        None, "Most layers that change in one decision, worst first. By default all that are worth it."
    )
    move_price: float | Literal["auto"] = _setting(
        AUTO,
        "Fraction of its peak-to-average ratio that a layer must win to have every slot moved; moving one slot costs "
        "its share of that. auto: from what moves cost, which is what the ranks have measured of transfers, slowed "
        "steps and commits, and until then an expert's bytes, link_bandwidth and layer_ms; over the steps that the "
        "plan is expected to serve.",
    )
    link_bandwidth: float = _setting(
        25.0,
        "GB/s at which a rank receives weights while it serves; prices moves where move_price is auto, until the "
        "ranks have measured it.",
    )
    layer_ms: float = _setting(
        0.4,
        "Milliseconds that one layer's experts take in a step; prices moves where move_price is auto, as "
        "long as neither a cost curve nor the time of steps is known.",
    )
    episodes: int = _setting(
        64, "Most episodes that a window's steps are summed into; 1 plans on the sum of the window."
    )
    z: float | None = _setting(
        None,
        "Standard deviations above the mean at which the search takes a rank's load. "
        "By default where the hottest of so many ranks is expected.",
    )
    half_lives: tuple[float, ...] = _setting(
        (math.inf, 0.5, 0.25, 0.1, 0.05, 0.025),
        "Half-lives of heat to choose from, as fractions of the window, separated by commas; the one that forecasts a "
        "layer best is taken, and the first where the window is too short for that.",
    )
    trimmed_mean: bool = _setting(
        True,
        "Place for what experts have between bursts, where that forecasts better.",
    )
    tree_search: bool = _setting(
        True,
        "Search replica counts together with the placement by tree search, in small layers. Without it, replica counts "
        "are greedy.",
    )
    annealing: bool = _setting(
        True, "Improve placements made from scratch by simulated annealing where ranks have few slots."
    )
    local_search: bool = _setting(True, "Improve placements by swapping experts and exchanging replicas.")
    swaps: bool = _setting(True, "Let the local search swap two experts between ranks.")
    exchanges: bool = _setting(
        True, "Let the local search turn a spare replica of one expert into a replica of another."
    )
    table_swaps: bool = _setting(
        True, "Swap experts once more at the shares of tokens that solved dealing tables really give."
    )
    table_kicks: bool = _setting(
        True,
        "Exchange replicas at random in small layers of few slots whose dealing tables do worse than even shares.",
    )
    holdout: bool = _setting(
        True,
        "Make only changes that, fitted to the older half of the window, pay for themselves on the newer half.",
    )
    sureness: float = _setting(
        1.96,
        "Standard errors by which what a change won on the newer half of the window must be above the price of its "
        "moves; 0 takes the mean as it is.",
    )
    price_ladder: bool = _setting(
        True, "Try dearer moves than the true price on the older half, so that only lasting gains are bought."
    )
    volatility: bool = _setting(
        True,
        "Leave a layer alone whose ratio is no more than the jumps of its experts' heat make of balanced ranks.",
    )
    solve_tables: bool = _setting(
        True,
        "Choose dealing tables (log2phy) from the measured source heat. Without it, by the engines' fixed rule.",
    )
    split: str = _setting(
        TABLES,
        f"How the host splits an expert's tokens over its replicas: {', '.join(SPLITS)}. tables: each source rank "
        "sends them to the replica that its log2phy names (vLLM-Ascend); even: the host spreads them evenly (vLLM); "
        "deal: each source rank sends them to several replicas in turn, as its dealing table says; "
        "step: each step's tokens are split so that the hottest rank is as cool as can be.",
    )
    deal_width: int = _setting(
        16,
        "Most entries that a dealing table has for each expert where split is deal; shares are multiples of one entry. "
        "A host that can do fewer gets fewer.",
    )
    split_overhead_us: float | None = _setting(
        None,
        "Microseconds per layer that a stepwise split takes itself; gains under cost_curve are net of it. Assumed by "
        "default.",
    )
    warm: bool = _setting(
        True,
        "Start from the deployed placement and weigh every change against it. "
        "Without it, each picked layer is placed from scratch.",
    )
    expert_groups: int | None = _setting(
        None,
        "Groups of neighbouring experts, as the router has them, that each stay on one node with all their replicas "
        "(hierarchical placement). By default experts may be on any node.",
    )
    cost_curve: CostCurve | None = _setting(  # noqa: RUF009, a field like the others
        None,
        "File of cost curves (eplb calibrate), or FILE:PHASE: lower the slowest rank's time by it, not its tokens. By "
        "default, and with a linear curve, tokens are balanced.",
    )
    fitted_curve: bool = _setting(
        False,
        "While ranks serve, plan by a cost curve that is fitted to their own step times, where it fits the steps held "
        "out of it; until then, and where cost_curve is given, as without this.",
    )
    seed: int = _setting(0, "Seed of the solver's random choices; the same seed gives the same placement.")
    threads: int | None = _setting(
        None, "Layers solved at the same time; results do not depend on it. By default one per CPU."
    )
    budget_ms: float | None = _setting(
        None,
        "Time budget of a decision in milliseconds: no further layer is begun after it, worst layers come first, and "
        "what is left improves layers placed from scratch. Results then depend on the machine. By default the effort "
        "is fixed.",
    )

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise SettingsError(f"policy is {self.policy!r}; choose one of {', '.join(POLICIES)}")
        if self.split not in SPLITS:
            raise SettingsError(f"split is {self.split!r}; choose one of {', '.join(SPLITS)}")
        self._at_least("par_threshold", 1.0)
        self._at_least("min_gain", 0.0)
        self._at_least("sureness", 0.0)
        for name in ("link_bandwidth", "layer_ms"):
            self._at_least(name, 0.0)
            if getattr(self, name) == 0:
                raise SettingsError(f"{name} is 0; it must be more")
        self._at_least("episodes", 1)
        self._at_least("seed", 0)
        self._at_least("deal_width", 1)
        if self.deal_width > MOST_ENTRIES:
            raise SettingsError(
                f"deal_width is {self.deal_width}; a dealing table has at most {MOST_ENTRIES} entries"
            )
        price: Any = self.move_price
        if price is None or (isinstance(price, str) and price != AUTO):
            raise SettingsError(f"move_price is {price!r}; it must be a number, 0.0 or more, or auto")
        if price != AUTO:
            self._at_least("move_price", 0.0)
        for name, bound in (
            ("max_layers", 1),
            ("expert_groups", 1),
            ("threads", 1),
            ("z", 0.0),
            ("split_overhead_us", 0.0),
        ):
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
        self._refuse_what_does_not_go_together()

    def _refuse_what_does_not_go_together(self) -> None:
        for name in ("cost_curve", "fitted_curve"):
            if getattr(self, name) and self.expert_groups is not None:
                raise SettingsError(f"{name} and expert_groups do not go together; leave one of them out")
        if self.fitted_curve and self.split == STEP:
            raise SettingsError(
                "fitted_curve and split step do not go together: ranks whose tokens are even in every step do not show "
                "what uneven ones would cost; measure a curve (eplb calibrate) and give it as cost_curve"
            )

    def _at_least(self, name: str, bound: float) -> None:
        value = getattr(self, name)
        if not math.isfinite(value) or value < bound:
            raise SettingsError(f"{name} is {value}; it must be a finite number, {bound} or more")


def is_default(settings: PlannerSettings, name: str) -> bool:
    """Whether nobody has set ``name`` to anything else than it is by default."""
    default = next(one.default for one in fields(PlannerSettings) if one.name == name)
    return bool(getattr(settings, name) == default)
