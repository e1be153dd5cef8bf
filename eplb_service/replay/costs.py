"""Costs in a replay. The same figures price decisions and are charged for them, and each figure states its origin."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from eplb_core.cost.curve import CostCurve, curve_document
from eplb_core.cost.moving import MovingCosts
from eplb_core.figures import digits, size_text
from eplb_core.placement import part_end
from eplb_core.planner.price import ASSUMED_BYTES, SplitCost, move_price
from eplb_core.planner.settings import AUTO, NumberOrAuto, PlannerSettings
from eplb_service.replay.policy import ReplayError

_MOE_SHARE = 0.5
"""Fraction of a step assumed to be spent in the experts if ``layer_ms`` is not set, as in the service."""
_MIN_MOE_SHARE = 0.2
"""Lower bound on the fraction of a step spent in the experts, for estimates. Both bounds were chosen by hand to cover
the fractions that engines report, from small decode batches to prefill."""
_MAX_MOE_SHARE = 0.8
"""Upper bound on the fraction of a step spent in the experts, for estimates."""
_DEFAULTS = PlannerSettings()
VOTE_INTERVAL = 4
"""Number of forward passes between votes while a plan is in progress; the agent's default."""
VOTE_LAG = 2
"""Number of passes from the start of a vote until the ranks read its outcome."""
PICK_UP_PASSES = 8 + VOTE_LAG
"""Number of passes from a plan's arrival at the ranks to the start of its first transfer.

Ranks without a plan vote every 16 passes, so a plan is pending for 0 to 15 passes before a vote confirms that all ranks
have it. The mean is assumed to be 8. The transfer starts when the ranks read that vote's outcome.
"""
PICK_UP_SOON_PASSES = 2 + VOTE_LAG
"""Value that replaces ``PICK_UP_PASSES`` if the previous plan ended less than ``BUSY_PASSES`` ago, because the ranks
then still vote every 4 passes."""
BUSY_PASSES = 64
"""Number of passes after a plan during which the ranks keep voting as often as during the plan."""
STAGING_BYTES = 512 << 20
"""Staging memory of a rank, in bytes; the agent's default."""


@dataclass(frozen=True)
class Assumption:
    """A figure that the results depend on.

    Parameters
    ----------
    name
        Name of the corresponding option.
    value
        Value, including its unit.
    source
        Origin: ``given``, ``recorded``, ``assumed``, or the source of a cost curve.
    """

    name: str
    value: str
    source: str


@dataclass(frozen=True)
class Costs:
    """Costs that a replay uses to price its decisions and to charge for them.

    None of them is measured on the machine that runs the replay.

    Parameters
    ----------
    step_ms
        Milliseconds per recorded step of the model; 0 if unknown, in which case plans take effect immediately and no
        times are reported.
    solve_ms
        Milliseconds from the end of a window to the plan's arrival at the ranks.
    link_bandwidth
        Full bandwidth of a rank's link in GB/s.
    link_share
        Fraction of the link's time that transfers may use, which ``EPLB_AGENT_LINK_SHARE`` sets on the ranks.
    model_layers
        Number of MoE layers in the served model; 0 if the trace has all of them. Otherwise each layer of the trace
        represents several layers of a plan, so that plans take effect as fast as on the model. Times and bytes still
        cover only the trace's layers.
    bytes_per_expert
        Size of one expert's weights in one layer, in bytes; 0 if unknown, in which case the planner assumes a size.
    commit_ms
        Time for which all ranks stall per switched layer, in milliseconds; ``None`` to use the planner's assumption.
    layer_ms
        Time per step spent in one layer's experts, in milliseconds. Balancing can save only a part of it. With a cost
        curve, it is only used until the first steps have been served.
    move_price
        Move price; ``auto`` to compute it from these costs.
    curve
        Cost curve of the ranks; ``None`` to assume that time is proportional to the tokens of the hottest rank.
    split
        Cost of computing a stepwise split, used with a cost curve; ``None`` for other splits.
    layer_assumed
        True if ``layer_ms`` is a default. Decisions use it, but no time savings are derived from it.

    Raises
    ------
    ReplayError
        If a value is out of bounds.

    Examples
    --------
    58 layers take 0.5 ms each. At a PAR of 1.25 instead of 2.0, they take 37.5 % less time:

    >>> costs = Costs(step_ms=40.0, layer_ms=0.5)
    >>> costs.saved_ms(layers=58, par=1.25, par_left_alone=2.0)
    10.875
    """

    ESTIMATE_BASIS: ClassVar[str] = (
        f"if experts take {_MIN_MOE_SHARE:.0%} to {_MAX_MOE_SHARE:.0%} of the step, before the cost of moves"
    )

    step_ms: float = 0.0
    solve_ms: float = 200.0
    link_bandwidth: float = _DEFAULTS.link_bandwidth
    link_share: float = 0.25
    model_layers: int = 0
    bytes_per_expert: int = 0
    commit_ms: float | None = None
    layer_ms: float = _DEFAULTS.layer_ms
    move_price: NumberOrAuto = AUTO
    curve: CostCurve | None = None
    split: SplitCost | None = None
    layer_assumed: bool = False

    @classmethod
    def of(cls, settings: PlannerSettings, layers: int, **figures: Any) -> Costs:
        """Return the costs for a trace, from planner settings and additional figures.

        If the settings have the default layer time and a step time is given, the layers are assumed to take half of a
        step.

        Parameters
        ----------
        settings
            Settings with link bandwidth, layer time, move price and cost curve.
        layers
            Number of layers in the trace.
        figures
            Other fields of ``Costs``, keyed by name.

        Raises
        ------
        ReplayError
            If ``model_layers`` is less than ``layers``, or a value is out of bounds.
        """
        layer_ms = settings.layer_ms
        step_ms = figures.get("step_ms", 0.0)
        model_layers = figures.get("model_layers", 0)
        if 0 < model_layers < layers:
            raise ReplayError(
                f"model_layers is {model_layers}, but the trace has {layers} layers; use {layers} or more"
            )
        if settings.is_default("layer_ms") and step_ms:
            layer_ms = _MOE_SHARE * step_ms / max(model_layers, layers)
        return cls(
            link_bandwidth=settings.link_bandwidth,
            layer_ms=layer_ms,
            move_price=settings.move_price,
            curve=settings.cost_curve,
            layer_assumed=settings.is_default("layer_ms"),
            **figures,
        )

    def __post_init__(self) -> None:
        numbers = ("step_ms", "solve_ms", "link_bandwidth", "link_share", "model_layers", "bytes_per_expert")
        for name in (*numbers, "commit_ms", "layer_ms"):
            value = getattr(self, name)
            if value is not None and (not math.isfinite(value) or value < 0):
                raise ReplayError(f"{name} is {value}; it must be a finite number, 0 or more")
        for name in ("link_bandwidth", "link_share", "layer_ms"):
            if getattr(self, name) == 0:
                raise ReplayError(f"{name} is 0; it must be greater than 0")
        if self.link_share > 1:
            raise ReplayError(f"link_share is {self.link_share}; it must be at most 1")

    @property
    def expert_bytes(self) -> int:
        """Size of one expert's weights in one layer, in bytes, recorded or assumed."""
        return self.bytes_per_expert or ASSUMED_BYTES

    @property
    def moving(self) -> MovingCosts:
        """Costs of moves in the form that the planner accepts."""
        return MovingCosts(
            expert_seconds=self.expert_bytes / (self.link_bandwidth * 1e9),
            commit_seconds=None if self.commit_ms is None else self.commit_ms / 1e3,
            layer_ms=self.layer_ms,
            layer_source="as charged",
        )

    @property
    def solve_steps(self) -> int:
        """Number of steps from a window's end to the plan's arrival at the ranks; 0 if the step time is unknown."""
        return math.ceil(self.solve_ms / self.step_ms) if self.step_ms else 0

    def stall_ms(self, slots: int, received: int, layers: int) -> float:
        """Return the milliseconds by which moves and switches delay steps, according to the planner's move price.

        Parameters
        ----------
        slots
            Slots per rank.
        received
            Number of experts that the busiest rank receives.
        layers
            Number of layers that switch.
        """
        price = move_price(PlannerSettings(), slots, self.bytes_per_expert, moving=self.moving)
        assert price.ms_per_move is not None
        assert price.ms_per_switch is not None
        return received * price.ms_per_move + layers * price.ms_per_switch

    def arrival_steps(
        self,
        received_LR: Sequence[npt.NDArray[np.integer]],
        sent_LR: Sequence[npt.NDArray[np.integer]],
        rows: int,
        *,
        soon: bool = False,
    ) -> npt.NDArray[np.int64]:
        """Return the number of steps from the end of a window until each layer of its plan takes effect, int64 ``[L]``.

        All are 0 if the step time is unknown. Otherwise, the plan reaches the ranks after ``solve_ms`` and is picked up
        ``PICK_UP_PASSES`` passes later. Its parts (see ``part_end``) are then committed one after another:

        - Transferring a part takes as long as the busiest rank needs to transfer its experts over its share of the
          link, rounded up to whole steps (at least one).
        - The ranks vote on the part in the next pass whose number is a multiple of ``VOTE_INTERVAL``.
        - ``VOTE_LAG`` passes later, they read the outcome, commit the part and start the next one.

        Handshakes between ranks are not modelled.

        Parameters
        ----------
        received_LR
            Number of experts that each rank receives: one array of integers ``[R]`` per layer, in plan order.
        sent_LR
            Number of experts that each rank sends, in the same form.
        rows
            Number of experts that fit in a rank's staging memory (see ``staging_rows``).
        soon
            True if the previous plan ended less than ``BUSY_PASSES`` ago. The ranks then pick this one up after
            ``PICK_UP_SOON_PASSES``.

        Examples
        --------
        Solving takes 5 steps, picking up the plan takes 10, and each of the two parts takes 4:

        >>> costs = Costs(step_ms=40, solve_ms=200, bytes_per_expert=44_000_000)
        >>> received_LR = np.array([[1, 0], [1, 1], [0, 2]])
        >>> costs.arrival_steps(received_LR, received_LR[:, ::-1], rows=2).tolist()
        [19, 19, 23]
        """
        steps_L = np.zeros(len(received_LR), dtype=np.int64)
        if not self.step_ms:
            return steps_L
        expert_ms = 1e3 * self.expert_bytes / (self.link_bandwidth * self.link_share * 1e9)
        pick_up = PICK_UP_SOON_PASSES if soon else PICK_UP_PASSES
        step = self.solve_steps + pick_up
        moved_LC = np.concatenate([received_LR, sent_LR], axis=1)
        first = 0
        while first < len(received_LR):
            end = part_end(moved_LC, first, rows)
            busiest = int(moved_LC[first:end].sum(axis=0).max())
            transfer = max(1, math.ceil(busiest * expert_ms / self.step_ms))
            step += VOTE_INTERVAL * math.ceil((transfer + VOTE_LAG) / VOTE_INTERVAL)
            steps_L[first:end] = step
            first = end
        return steps_L

    def layers_each(self, changed: int, layers: int) -> npt.NDArray[np.int64]:
        """Return the number of model layers that each changed layer of the trace represents, int64 ``[changed]``.

        Parameters
        ----------
        changed
            Number of layers that a plan changes.
        layers
            Number of layers in the trace.

        Examples
        --------
        >>> Costs(model_layers=58).layers_each(changed=3, layers=4).tolist()
        [14, 15, 14]
        """
        return np.diff(np.arange(changed + 1) * max(self.model_layers, layers) // layers)

    def saved_ms(self, layers: int, par: float, par_left_alone: float) -> float | None:
        """Return the milliseconds per step saved by a lower PAR; ``None`` if the expert time is not given.

        The time of a layer's experts is assumed to be proportional to the PAR. The result is 0 if the step time is
        unknown.
        """
        if not self.step_ms:
            return 0.0
        return None if self.layer_assumed else layers * self.layer_ms * (1 - par / par_left_alone)

    def estimated_ms(self, par: float, par_left_alone: float) -> tuple[float, float] | None:
        """Return the range of milliseconds per step that a lower PAR may save.

        The result is ``None`` unless the step time is given but the expert time is not.
        """
        if not self.step_ms or not self.layer_assumed or self.curve is not None:
            return None
        saved_share = 1 - par / par_left_alone
        ends = [moe_share * self.step_ms * saved_share for moe_share in (_MIN_MOE_SHARE, _MAX_MOE_SHARE)]
        return min(ends), max(ends)

    def estimate_text(self, par: float, par_left_alone: float) -> str | None:
        """Format the range from ``estimated_ms``, labelled as an estimate.

        Examples
        --------
        >>> Costs(step_ms=40.0, layer_assumed=True).estimate_text(par=1.2, par_left_alone=1.6)
        'estimated saving: 2 to 8 ms per 40 ms step, if experts take 20% to 80% of the step, before the cost of moves'
        """
        estimate = self.estimated_ms(par, par_left_alone)
        if estimate is None:
            return None
        low, high = (digits(ms, 2) for ms in estimate)
        return (
            f"estimated saving: {low} to {high} ms per {digits(self.step_ms)} ms step, {self.ESTIMATE_BASIS}"
        )

    def assumptions(self, given: Collection[str]) -> tuple[Assumption, ...]:
        """Return the figures that the results depend on; ``given`` contains the options that the user set."""
        values = {
            "move_price": f"{self.move_price}",
            "link_bandwidth": f"{self.link_bandwidth:g} GB/s",
            "bytes_per_expert": size_text(self.expert_bytes),
            "commit_ms": "0.5 ms plus a copy" if self.commit_ms is None else f"{self.commit_ms:g} ms",
            "layer_ms": f"{digits(self.layer_ms)} ms" + (" at first" if self.curve is not None else ""),
        }
        if self.step_ms:
            values |= {
                "step_ms": f"{self.step_ms:g} ms",
                "solve_ms": f"{self.solve_ms:g} ms",
                "link_share": f"{self.link_share:g}",
                "model_layers": f"{self.model_layers}" if self.model_layers else "as in the trace",
            }
        else:
            values["step_ms"] = "not given, so plans take effect at once"
        sources = dict.fromkeys(values, "assumed")
        if self.bytes_per_expert:
            sources["bytes_per_expert"] = "recorded"
        sources |= {name: "given" for name in values if name in given}
        assumptions = [_curve_assumption(self.curve)]
        assumptions += [Assumption(name, value, sources[name]) for name, value in values.items()]
        if self.split is not None and self.curve is not None:
            assumptions.append(Assumption("split_overhead_us", str(self.split), "assumed"))
        return tuple(assumptions)

    def plain(self) -> dict[str, Any]:
        """Return the costs as a JSON document."""
        curve = None if self.curve is None else curve_document(self.curve)
        return {**asdict(replace(self, curve=None)), "curve": curve}


def _curve_assumption(curve: CostCurve | None) -> Assumption:
    if curve is None:
        return Assumption(
            "cost_curve", "linear: time is proportional to the hottest rank's tokens", "assumed"
        )
    fit = "fit quality unknown" if curve.fit is None else str(curve.fit)
    return Assumption("cost_curve", str(curve), f"{curve.source}; {fit}")
