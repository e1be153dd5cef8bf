"""Costs of a replay: by the same numbers decisions are made and charged, and each is listed with its origin."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from eplb_service.cost.curve import CostCurve, plain_curve
from eplb_service.cost.moving import MovingCosts
from eplb_service.figures import digits, size_text
from eplb_service.planner.price import ASSUMED_BYTES, SplitCost, move_price
from eplb_service.planner.settings import AUTO, NumberOrAuto, PlannerSettings
from eplb_service.replay.policy import ReplayError

_MOE_SHARE = 0.5
"""Part of a step that experts are taken for where ``layer_ms`` is not stated, as in the service."""
_LEAST_MOE_SHARE = 0.2
_MOST_MOE_SHARE = 0.8
"""Range of that part for estimates; chosen by hand to hold what engines report from small decode batches to prefill."""
_DEFAULTS = PlannerSettings()


@dataclass(frozen=True)
class Assumption:
    """One number that results rest on: the name of its option, its value with its unit, and its origin."""

    name: str
    value: str
    source: str


@dataclass(frozen=True)
class Costs:
    """Costs that decisions are made by and charged with; nothing is measured on the machine that replays.

    Parameters
    ----------
    step_ms
        Time of a step of the model as recorded; 0 where not stated, and then nothing is late and no time is reported.
    solve_ms
        From the end of a window to the plan at the ranks.
    link_bandwidth
        GB/s that a rank receives while it serves.
    bytes_per_expert
        Weights of one expert in one layer; 0 where not known, and then the planner's assumption is taken.
    commit_ms
        Standstill of all ranks per switched layer; ``None`` for what the planner assumes.
    layer_ms
        Time of one layer's experts in a step, which balance wins a part of; where there is a curve, as long as nothing
        has been served.
    move_price
        Price of moves that decisions go by; ``auto`` for the one that follows from these costs.
    curve
        What tokens cost; ``None`` where time follows the hottest rank's tokens.
    split
        Cost of a stepwise split itself, under a curve; ``None`` where the host splits otherwise.
    layer_assumed
        True if ``layer_ms`` is a default. Decisions use it, but reported times do not.

    Raises ``ReplayError`` on a value out of bounds.
    """

    ESTIMATE_BASIS: ClassVar[str] = (
        f"if experts take {_LEAST_MOE_SHARE:.0%} to {_MOST_MOE_SHARE:.0%} of it, before the cost of moves"
    )

    step_ms: float = 0.0
    solve_ms: float = 200.0
    link_bandwidth: float = _DEFAULTS.link_bandwidth
    bytes_per_expert: int = 0
    commit_ms: float | None = None
    layer_ms: float = _DEFAULTS.layer_ms
    move_price: NumberOrAuto = AUTO
    curve: CostCurve | None = None
    split: SplitCost | None = None
    layer_assumed: bool = False

    @classmethod
    def of(cls, settings: PlannerSettings, layers: int, **stated: Any) -> Costs:
        """Costs that ``settings`` state for a model of so many layers, and those that only a replay has.

        A layer's time that is not stated is its share of half the step, where that is stated.
        """
        layer_ms, step_ms = settings.layer_ms, stated.get("step_ms", 0.0)
        if settings.is_default("layer_ms") and step_ms:
            layer_ms = _MOE_SHARE * step_ms / layers
        return cls(
            link_bandwidth=settings.link_bandwidth,
            layer_ms=layer_ms,
            move_price=settings.move_price,
            curve=settings.cost_curve,
            layer_assumed=settings.is_default("layer_ms"),
            **stated,
        )

    def __post_init__(self) -> None:
        for name in ("step_ms", "solve_ms", "link_bandwidth", "bytes_per_expert", "commit_ms", "layer_ms"):
            value = getattr(self, name)
            if value is not None and (not math.isfinite(value) or value < 0):
                raise ReplayError(f"{name} is {value}; it must be a finite number, zero or more")
        for name in ("link_bandwidth", "layer_ms"):
            if getattr(self, name) == 0:
                raise ReplayError(f"{name} is 0; it must be more")

    @property
    def moving(self) -> MovingCosts:
        """Costs of moves as the planner takes them."""
        return MovingCosts(
            expert_seconds=(self.bytes_per_expert or ASSUMED_BYTES) / (self.link_bandwidth * 1e9),
            commit_seconds=None if self.commit_ms is None else self.commit_ms / 1e3,
            layer_ms=self.layer_ms,
            layer_source="as charged",
        )

    def stall_ms(self, slots: int, received: int, layers: int) -> float:
        """Milliseconds of steps lost to moves and switches, as the planner prices them.

        Parameters
        ----------
        slots
            Slots of a rank.
        received
            Experts that the busiest rank receives.
        layers
            Layers that switch.
        """
        price = move_price(PlannerSettings(), slots, self.bytes_per_expert, moving=self.moving)
        assert price.ms_per_move is not None
        assert price.ms_per_switch is not None
        return received * price.ms_per_move + layers * price.ms_per_switch

    def delay_steps(self, experts_received: int) -> int:
        """Steps from the end of a window until its decision serves; the busiest rank receives so many experts."""
        if self.step_ms == 0:
            return 0
        seconds = self.moving.expert_seconds
        assert seconds is not None
        return math.ceil((self.solve_ms + experts_received * seconds * 1e3) / self.step_ms)

    def saved_ms(self, layers: int, par: float, par_left_alone: float) -> float | None:
        """Return the time per step that a smaller ratio saves, or ``None`` if the experts' time is not stated.

        A layer's experts take time in proportion to the ratio. 0 if no step time is stated.
        """
        if not self.step_ms:
            return 0.0
        return None if self.layer_assumed else layers * self.layer_ms * (1 - par / par_left_alone)

    def estimated_ms(self, par: float, par_left_alone: float) -> tuple[float, float] | None:
        """Return the range of the time per step that a smaller ratio may save, if only the step time is stated."""
        if not self.step_ms or not self.layer_assumed or self.curve is not None:
            return None
        share = 1 - par / par_left_alone
        ends = [part * self.step_ms * share for part in (_LEAST_MOE_SHARE, _MOST_MOE_SHARE)]
        return min(ends), max(ends)

    def estimate_text(self, par: float, par_left_alone: float) -> str | None:
        """Return that range for people, marked as an estimate."""
        found = self.estimated_ms(par, par_left_alone)
        if found is None:
            return None
        low, high = (digits(ms, 2) for ms in found)
        return f"estimate: {low} to {high} ms of a step of {digits(self.step_ms)} ms, {self.ESTIMATE_BASIS}"

    def assumptions(self, given: Collection[str]) -> tuple[Assumption, ...]:
        """Numbers that results rest on; ``given`` names those that a user stated."""
        found = [_curve(self.curve)]
        texts = {
            "move_price": f"{self.move_price}",
            "link_bandwidth": f"{self.link_bandwidth:g} GB/s",
            "bytes_per_expert": size_text(self.bytes_per_expert or ASSUMED_BYTES),
            "commit_ms": "0.5 ms and a copy" if self.commit_ms is None else f"{self.commit_ms:g} ms",
            "layer_ms": f"{digits(self.layer_ms)} ms" + (" at first" if self.curve is not None else ""),
        }
        if self.step_ms:
            texts |= {"step_ms": f"{self.step_ms:g} ms", "solve_ms": f"{self.solve_ms:g} ms"}
        sources = {"bytes_per_expert": "recorded" if self.bytes_per_expert else "assumed"}
        found += [
            Assumption(name, text, "given" if name in given else sources.get(name, "assumed"))
            for name, text in texts.items()
        ]
        if self.split is not None and self.curve is not None:
            found.append(Assumption("split_overhead_us", str(self.split), "assumed"))
        return tuple(found)

    def plain(self) -> dict[str, Any]:
        """Costs as JSON has them."""
        curve = None if self.curve is None else plain_curve(self.curve)
        return {**asdict(replace(self, curve=None)), "curve": curve}


def _curve(curve: CostCurve | None) -> Assumption:
    if curve is None:
        return Assumption("cost_curve", "linear: time follows the tokens of the hottest rank", "assumed")
    fit = "no fit is known" if curve.fit is None else str(curve.fit)
    return Assumption("cost_curve", str(curve), f"{curve.source}; {fit}")
