"""Costs of a replay: by the same numbers decisions are made and charged, and each is listed with its origin."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from eplb_core.cost.curve import CostCurve, plain_curve
from eplb_core.cost.moving import MovingCosts
from eplb_core.figures import digits, size_text
from eplb_core.placement import part_end
from eplb_core.planner.price import ASSUMED_BYTES, SplitCost, move_price
from eplb_core.planner.settings import AUTO, NumberOrAuto, PlannerSettings
from eplb_service.replay.policy import ReplayError

_MOE_SHARE = 0.5
"""Part of a step that experts are taken for where ``layer_ms`` is not stated, as in the service."""
_MIN_MOE_SHARE = 0.2
_MAX_MOE_SHARE = 0.8
"""Range of that part for estimates; chosen by hand to hold what engines report from small decode batches to prefill."""
_DEFAULTS = PlannerSettings()
VOTE_INTERVAL = 4
"""Passes between votes while a plan is under way; the agent's default."""
VOTE_LAG = 2
"""Passes from the start of a vote until the ranks read its outcome."""
PICK_UP_PASSES = 8 + VOTE_LAG
"""Passes from a plan's arrival at the ranks to the start of its first transfer.

Ranks without a plan vote every 16 passes, so a plan waits 0 to 15 passes for the vote that finds it on all ranks. The
mean is assumed to be 8. The transfer starts when the ranks read that vote's outcome.
"""
PICK_UP_SOON_PASSES = 2 + VOTE_LAG
"""The same within ``BUSY_PASSES`` after another plan ended, when the ranks still vote every 4 passes."""
BUSY_PASSES = 64
"""Passes after a plan for which the ranks keep voting as often as during it."""
STAGING_BYTES = 512 << 20
"""Memory of a rank for incoming experts; the agent's default."""


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
        Time of a recorded step of the model; 0 if not stated. Plans then take effect at once and no times are reported.
    solve_ms
        From the end of a window to the plan at the ranks.
    link_bandwidth
        GB/s of a rank's link, before ``link_share``.
    link_share
        Share of the link's time that transfers use, as ``EPLB_AGENT_LINK_SHARE`` sets it on the ranks.
    model_layers
        MoE layers of the served model; 0 if the trace has them all. Otherwise each layer of the trace represents
        several layers of a plan, so that plans take effect at the pace of the model. Times and bytes are still those
        of the trace's layers.
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
        f"if experts take {_MIN_MOE_SHARE:.0%} to {_MAX_MOE_SHARE:.0%} of it, before the cost of moves"
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
    def of(cls, settings: PlannerSettings, layers: int, **stated: Any) -> Costs:
        """Return the costs that ``settings`` state for a trace with ``layers`` layers, and those only a replay has.

        If the layer time is not stated but the step time is, each layer takes an equal share of half a step.

        Raises ``ReplayError`` if ``model_layers`` is stated and less than ``layers``.
        """
        layer_ms = settings.layer_ms
        step_ms = stated.get("step_ms", 0.0)
        model_layers = stated.get("model_layers", 0)
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
            **stated,
        )

    def __post_init__(self) -> None:
        numbers = ("step_ms", "solve_ms", "link_bandwidth", "link_share", "model_layers", "bytes_per_expert")
        for name in (*numbers, "commit_ms", "layer_ms"):
            value = getattr(self, name)
            if value is not None and (not math.isfinite(value) or value < 0):
                raise ReplayError(f"{name} is {value}; it must be a finite number, zero or more")
        for name in ("link_bandwidth", "link_share", "layer_ms"):
            if getattr(self, name) == 0:
                raise ReplayError(f"{name} is 0; it must be more")
        if self.link_share > 1:
            raise ReplayError(f"link_share is {self.link_share}; it must be at most 1")

    @property
    def expert_bytes(self) -> int:
        """Size of an expert in bytes, recorded or assumed."""
        return self.bytes_per_expert or ASSUMED_BYTES

    @property
    def moving(self) -> MovingCosts:
        """Costs of moves as the planner takes them."""
        return MovingCosts(
            expert_seconds=self.expert_bytes / (self.link_bandwidth * 1e9),
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

    def arrival_steps(
        self,
        received_LR: Sequence[npt.NDArray[np.integer]],
        sent_LR: Sequence[npt.NDArray[np.integer]],
        rows: int,
        *,
        soon: bool = False,
    ) -> npt.NDArray[np.int64]:
        """Return the steps from the end of a window until each layer of its plan takes effect, int64 ``[L]``.

        All are 0 if no step time is stated. Otherwise the plan reaches the ranks after ``solve_ms``, and waits
        ``PICK_UP_PASSES`` for their vote. Its parts (see ``part_end``) then switch one after another. The transfer of a
        part takes as long as the busiest rank needs for its experts on its share of the link, rounded up to whole
        steps, at least one. The ranks vote on the part at the next multiple of ``VOTE_INTERVAL``. ``VOTE_LAG`` passes
        later they read the outcome, which switches the part and starts the next one. Handshakes between ranks are not
        modelled.

        Parameters
        ----------
        received_LR, sent_LR
            Experts that each rank receives and sends in each layer, in the plan's order: integers ``[R]`` per layer.
        rows
            Experts that a rank's staging holds (see ``staging_rows``).
        soon
            True if the previous plan ended less than ``BUSY_PASSES`` ago. The ranks then pick this one up after
            ``PICK_UP_SOON_PASSES``.

        Examples
        --------
        Solving takes 5 steps, picking up the plan 10, and each of the two parts 4:

        >>> costs = Costs(step_ms=40, solve_ms=200, bytes_per_expert=44_000_000)
        >>> received_LR = np.array([[1, 0], [1, 1], [0, 2]])
        >>> costs.arrival_steps(received_LR, received_LR[:, ::-1], rows=2).tolist()
        [19, 19, 23]
        """
        steps_L = np.zeros(len(received_LR), dtype=np.int64)
        if not self.step_ms:
            return steps_L
        expert_ms = 1e3 * self.expert_bytes / (self.link_bandwidth * self.link_share * 1e9)
        waits = PICK_UP_SOON_PASSES if soon else PICK_UP_PASSES
        step = math.ceil(self.solve_ms / self.step_ms) + waits
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
            Layers of the trace that a plan changes.
        layers
            Layers of the trace.

        Examples
        --------
        >>> Costs(model_layers=58).layers_each(changed=3, layers=4).tolist()
        [14, 15, 14]
        """
        return np.diff(np.arange(changed + 1) * max(self.model_layers, layers) // layers)

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
        ends = [part * self.step_ms * share for part in (_MIN_MOE_SHARE, _MAX_MOE_SHARE)]
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
            "bytes_per_expert": size_text(self.expert_bytes),
            "commit_ms": "0.5 ms and a copy" if self.commit_ms is None else f"{self.commit_ms:g} ms",
            "layer_ms": f"{digits(self.layer_ms)} ms" + (" at first" if self.curve is not None else ""),
        }
        if self.step_ms:
            texts |= {
                "step_ms": f"{self.step_ms:g} ms",
                "solve_ms": f"{self.solve_ms:g} ms",
                "link_share": f"{self.link_share:g}",
                "model_layers": f"{self.model_layers}" if self.model_layers else "those of the trace",
            }
        else:
            texts["step_ms"] = "not given, so plans take effect at once"
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
