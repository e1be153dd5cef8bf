"""Settings of a decision: their defaults, their bounds, and the help that users read.

``PlannerSettings`` is the one place that declares them; the options of all commands, the service's environment and its
YAML file follow from its fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from numbers import Integral, Real
from typing import Any, Literal

from eplb_core.cost.curve import CostCurve, CurveError, read_curve
from eplb_core.placement import MAX_ENTRIES

POLICIES = ("none", "deepseek", "flashlb")
"""``none`` never moves an expert. ``deepseek`` is DeepSeek's EPLB: greedy replica counts and LPT packing on the sum of
the window. ``flashlb`` is this project's solver, built on the three ideas of FlashLB (an EPLB policy of vLLM-Ascend):
replica counts and placement searched jointly, an objective over many episodes, and layer-wise cherry-picking. It is not
FlashLB's code; ``docs/research/solver.md`` measures the two side by side."""

TABLES, EVEN, DEAL, STEP = "tables", "even", "deal", "step"
SPLITS = (TABLES, EVEN, DEAL, STEP)
"""Split of an expert's tokens over its replicas. ``tables``: each source rank sends them to the replica that its
log2phy names (vLLM-Ascend); ``even``: the host spreads them over the replicas itself, token by token (vLLM);
``deal``: each source rank sends them in turn to the entries of its dealing table; ``step``: all ranks split each
step's tokens alike, so that the hottest rank is as cool as the placement allows (the live layer's stepwise split;
SGLang's LPLB)."""

AUTO: Literal["auto"] = "auto"
"""The ``move_price`` that is computed from what moves cost."""
NumberOrAuto = float | Literal["auto"]


class SettingsError(ValueError):
    """A setting that no planner could follow; the message names it and its bounds."""


def _setting(default: Any, kind: Any, help: str, *, least: float | None = None) -> Any:
    """A field with the type of its option, the text that explains it to users, and its lower bound."""
    return field(default=default, metadata={"kind": kind, "help": help, "least": least})


@dataclass(frozen=True)
class PlannerSettings:
    """Settings of a decision.

    Each field's metadata holds the ``help`` that commands, service and docs show, and the ``kind`` that its text is
    parsed as.

    Raises
    ------
    SettingsError
        Where a value is out of bounds.
    """

    policy: str = _setting(
        "flashlb",
        str,
        "Placement by flashlb (this project's own solver, built on the ideas of FlashLB of vLLM-Ascend), deepseek "
        "(DeepSeek's greedy EPLB) or none (no expert ever moves).",
    )
    par_threshold: float = _setting(
        1.02, float, "PAR, in episodes, up to which a layer is left alone (cherry-picking).", least=1.0
    )
    min_gain: float = _setting(0.01, float, "PAR that a layer must win to be worth switching.", least=0.0)
    max_layers: int | None = _setting(
        None, int, "Most layers that change in one decision, worst first; all by default.", least=1
    )
    move_price: float | Literal["auto"] = _setting(
        AUTO,
        NumberOrAuto,
        "Fraction of its PAR that a layer must win to have every slot moved. auto: by the measured cost of moves, "
        "until then by an expert's bytes, link_bandwidth and layer_ms.",
        least=0.0,
    )
    link_bandwidth: float = _setting(
        25.0,
        float,
        "Full bandwidth of a rank's link in GB/s, of which transfers use a share; for move_price auto until measured.",
        least=0.0,
    )
    layer_ms: float = _setting(
        0.4,
        float,
        "Milliseconds of one layer's experts in a step, for move_price auto until a cost curve or steps say.",
        least=0.0,
    )
    split: str = _setting(
        TABLES,
        str,
        "Split of an expert's tokens over its replicas by the host. tables: one replica per source rank (vLLM-Ascend); "
        "even: evenly (vLLM); deal: several replicas in turn; step: by each step's counts.",
    )
    deal_width: int = _setting(
        16, int, "Most entries per expert of a dealing table, where split is deal.", least=1
    )
    expert_groups: int | None = _setting(
        None,
        int,
        "Groups of neighbouring experts that each stay on one node (hierarchical placement); none by default.",
        least=1,
    )
    cost_curve: CostCurve | None = _setting(  # noqa: RUF009, a field like the others
        None,
        str,
        "File of cost curves (eplb calibrate), or FILE:PHASE: the slowest rank's time is lowered, not its tokens.",
    )
    fitted_curve: bool = _setting(
        False, bool, "While ranks serve, plan by a cost curve fitted to their own step times, once it fits."
    )
    estimate_device: bool = _setting(
        True,
        bool,
        "Without a cost curve, leave a layer alone while its experts get so few tokens that, by an estimate for the "
        "ranks' device, a step only waits for their weights to be read.",
    )
    seed: int = _setting(0, int, "Seed of the solver's random choices.", least=0)
    threads: int | None = _setting(
        None,
        int,
        "Layers solved at the same time; by default one per CPU. Results do not depend on it.",
        least=1,
    )
    budget_ms: float | None = _setting(
        None,
        float,
        "Milliseconds after which a decision begins no further layer, worst first; by default it begins all. Results "
        "then depend on the machine.",
        least=0.0,
    )

    def __post_init__(self) -> None:
        for name, choices in (("policy", POLICIES), ("split", SPLITS)):
            if getattr(self, name) not in choices:
                raise SettingsError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(choices)}")
        for option in planner_options():
            self._check_kind(option)
            value, least = getattr(self, option.name), option.metadata["least"]
            if least is None or value == (AUTO if option.name == "move_price" else None):
                continue
            if not isinstance(value, Real) or not math.isfinite(value) or value < least:
                raise SettingsError(
                    f"{option.name} is {value!r}; it must be a finite number, {least} or more"
                )
        for name in ("link_bandwidth", "layer_ms", "budget_ms"):
            if getattr(self, name) == 0:
                raise SettingsError(f"{name} is 0; it must be more")
        if self.deal_width > MAX_ENTRIES:
            raise SettingsError(
                f"deal_width is {self.deal_width}; a dealing table has at most {MAX_ENTRIES} entries"
            )
        for name in ("cost_curve", "fitted_curve"):
            if getattr(self, name) and self.expert_groups is not None:
                raise SettingsError(f"{name} and expert_groups do not go together; leave one of them out")
        if self.fitted_curve and self.split == STEP:
            raise SettingsError(
                "fitted_curve and split step do not go together: ranks whose tokens are even in every step do not show "
                "what uneven ones would cost; measure a curve (eplb calibrate) and give it as cost_curve"
            )

    def _check_kind(self, option: Field[Any]) -> None:
        """Raise ``SettingsError`` if a whole number or a switch is anything else."""
        value, kind = getattr(self, option.name), option.metadata["kind"]
        if option.name == "cost_curve" and not isinstance(value, CostCurve | None):
            raise SettingsError(
                f"cost_curve is {value!r}; it must be a CostCurve, as cost.read_curve returns it"
            )
        if value is None or kind not in (int, bool):
            return
        if kind is bool and not isinstance(value, bool):
            raise SettingsError(f"{option.name} is {value!r}; it must be True or False")
        if kind is int and (isinstance(value, bool) or not isinstance(value, Integral)):
            raise SettingsError(f"{option.name} is {value!r}; it must be a whole number")

    def is_default(self, name: str) -> bool:
        """Return whether a setting has its default value.

        Parameters
        ----------
        name
            Name of the field.

        Returns
        -------
        bool
            False where it was set to anything else.
        """
        return bool(getattr(self, name) == getattr(PlannerSettings, name))


def planner_options() -> tuple[Field[Any], ...]:
    """All settings in order: name and default, and as metadata ``kind`` and ``help``.

    A cost curve is the text that names its file.
    """
    return fields(PlannerSettings)


def planner_settings(values: Mapping[str, Any]) -> PlannerSettings:
    """Settings of options by name; those left out have their defaults.

    Raises
    ------
    SettingsError
        On a value that no planner could follow.
    """
    parsed = dict(values)
    try:
        if "move_price" in parsed:
            parsed["move_price"] = number_or_auto(parsed["move_price"])
        if isinstance(parsed.get("cost_curve"), str):
            parsed["cost_curve"] = read_curve(parsed["cost_curve"])
    except ValueError as error:
        named = "" if isinstance(error, CurveError) else f"move_price is {values['move_price']!r}; "
        raise SettingsError(f"{named}{error}") from error
    return PlannerSettings(**parsed)


def number_or_auto(value: Any) -> NumberOrAuto:
    """Parse a setting of that kind from text or a file; raises ``ValueError`` where it is neither."""
    try:
        return AUTO if value == AUTO else float(value)
    except (TypeError, ValueError):
        raise ValueError("expected a number, or auto") from None
