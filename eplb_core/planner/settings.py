"""Planner settings: defaults, bounds and help texts.

``PlannerSettings`` is the single source of truth. The command-line options, the service's environment variables and the
keys of its YAML file are derived from its fields.
"""

# Annotations must be evaluated eagerly, because the types of the fields are also the types of the options.

import math
import operator
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from numbers import Integral, Real
from typing import Any, Literal

from eplb_core.cost.curve import CostCurve, read_curve
from eplb_core.placement import MAX_ENTRIES

POLICIES = ("none", "deepseek", "flashlb")
"""Policies of the planner.

- ``none`` never moves an expert.
- ``deepseek`` is DeepSeek's EPLB: greedy replica counts and LPT packing, based on the window's total heat.
- ``flashlb`` is this project's solver. It is built on the three ideas of FlashLB, an EPLB policy of vLLM-Ascend: a
  joint search of replica counts and placement, an objective over many episodes, and layer-wise cherry-picking. It is
  not FlashLB's code; ``docs/research/solver.md`` compares the two.
"""

TABLES = "tables"
EVEN = "even"
DEAL = "deal"
STEP = "step"
SPLITS = (TABLES, EVEN, DEAL, STEP)
"""Splits of an expert's tokens over its replicas.

- ``tables``: each source rank sends them to the replica given by its log2phy table (vLLM-Ascend).
- ``even``: the host itself spreads them evenly over the replicas, token by token (vLLM).
- ``deal``: each source rank sends them to the entries of its dealing table in turn.
- ``step``: all ranks compute the same split of each step's tokens, which minimises the hottest rank's load under the
  current placement (the live layer's stepwise split; SGLang's LPLB).
"""

AUTO: Literal["auto"] = "auto"
"""Value of ``move_price`` that requests a price computed from the cost of moves."""
NumberOrAuto = float | Literal["auto"]

WINDOW_STEPS = 512
"""Default for the maximum number of steps that a decision uses."""
DECISION_INTERVAL = 256
"""Default for the maximum number of steps between decisions."""

_BOUNDS = {
    "ge": (operator.ge, "{} or more"),
    "gt": (operator.gt, "more than {}"),
    "le": (operator.le, "{} or less"),
}
"""For each kind of bound, its comparison and its text in errors."""


class SettingsError(ValueError):
    """A setting is invalid. The message names the setting and its bounds."""


def _setting(default: Any, help: str, *, serve_only: bool = False, **bounds: float) -> Any:
    """Declare a field of ``PlannerSettings``.

    Parameters
    ----------
    default
        Default value.
    help
        Help text of the option.
    serve_only
        True if the setting has no effect on recorded heat, because it requires the step times or the device of live
        ranks.
    bounds
        Bounds of a number, named as in ``_BOUNDS``.
    """
    return field(default=default, metadata={"help": help, "serve_only": serve_only, "bounds": bounds})


@dataclass(frozen=True)
class PlannerSettings:
    """Settings of a decision.

    The metadata of each field contains the ``help`` text and the ``bounds`` shown by the commands, the service and the
    documentation.

    Raises
    ------
    SettingsError
        If a value is out of bounds, or if two settings cannot be used together.

    Examples
    --------
    Settings for vLLM, which splits tokens evenly, with at most eight layer changes per decision:

    >>> settings = PlannerSettings(split="even", max_layers=8)
    >>> settings.move_price, settings.is_default("move_price")
    ('auto', True)

    Values are checked when the settings are created:

    >>> PlannerSettings(par_threshold=0.9)
    Traceback (most recent call last):
        ...
    eplb_core.planner.settings.SettingsError: par_threshold is 0.9; it must be a finite number, 1.0 or more

    ``planner_settings`` parses option values given as text:

    >>> planner_settings({"move_price": "0.3"}).move_price
    0.3
    """

    policy: str = _setting(
        "flashlb",
        "Policy: flashlb (this project's own solver, built on the ideas of vLLM-Ascend's FlashLB), deepseek "
        "(DeepSeek's greedy EPLB) or none (experts never move).",
    )
    par_threshold: float = _setting(
        1.02,
        "Maximum PAR, over episodes, at which a layer is left unchanged (cherry-picking).",
        ge=1.0,
    )
    min_gain: float = _setting(
        0.01,
        "Minimum gain required to change a layer, in PAR or, with a cost curve, as a share of the layer's time.",
        ge=0.0,
    )
    max_layers: int | None = _setting(
        None,
        "Maximum number of layers changed per decision, worst first; all by default.",
        ge=1,
    )
    move_price: float | Literal["auto"] = _setting(
        AUTO,
        "Gain required to move every slot of a layer, as a fraction of its PAR. auto: computed from the measured cost "
        "of moves, or, before the first measurement, from an expert's bytes, link_bandwidth and layer_ms.",
        ge=0.0,
    )
    link_bandwidth: float = _setting(
        25.0,
        "Full bandwidth of a rank's link in GB/s; transfers use a share of it. Used by move_price=auto until "
        "transfers have been measured.",
        gt=0.0,
    )
    layer_ms: float = _setting(
        0.4,
        "Milliseconds per step spent in one layer's experts. Used by move_price=auto until a cost curve or step times "
        "are available.",
        gt=0.0,
    )
    split: str = _setting(
        TABLES,
        "The host's split of an expert's tokens over its replicas. tables: one replica per source rank (vLLM-Ascend); "
        "even: evenly (vLLM); deal: several replicas in turn; step: according to each step's counts.",
    )
    deal_width: int = _setting(
        16, "Maximum number of entries per expert in a dealing table (split=deal).", ge=1, le=MAX_ENTRIES
    )
    expert_groups: int | None = _setting(
        None,
        "Number of groups of consecutive experts; each group is kept on one node (hierarchical placement). By default, "
        "experts are not grouped.",
        ge=1,
    )
    cost_curve: CostCurve | None = _setting(  # noqa: RUF009, declared like the other fields
        None,
        "Cost curve file (from eplb calibrate), or FILE:PHASE. A layer then changes only if the change shortens the "
        "time of its slowest rank.",
    )
    fitted_curve: bool = _setting(
        False,
        "Use a cost curve fitted to the ranks' step times, once the fit is good enough.",
        serve_only=True,
    )
    estimate_device: bool = _setting(
        True,
        "If no cost curve is set, leave a layer unchanged while its experts get so few tokens that steps wait only for "
        "weight reads, as estimated for the ranks' device.",
        serve_only=True,
    )
    seed: int = _setting(0, "Seed for the solver's random choices.", ge=0)
    threads: int | None = _setting(
        None,
        "Number of layers solved in parallel; by default, one per CPU. Results do not depend on it.",
        ge=1,
    )
    budget_ms: float | None = _setting(
        None,
        "Time budget per decision, in milliseconds. Layers are solved worst first, and none is started after the "
        "budget is spent, so results depend on the machine. Unlimited by default.",
        gt=0.0,
    )

    def __post_init__(self) -> None:
        for name, choices in (("policy", POLICIES), ("split", SPLITS)):
            if getattr(self, name) not in choices:
                raise SettingsError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(choices)}")
        for option in fields(self):
            self._check(option)
        if self.fitted_curve and self.split == STEP:
            raise SettingsError(
                "fitted_curve cannot be used with split=step: this split balances every step, so step times do not "
                "show the cost of imbalance; measure a curve (eplb calibrate) and set cost_curve"
            )

    def _check(self, option: Field[Any]) -> None:
        """Raise ``SettingsError`` if the value of a setting has the wrong type or is out of bounds."""
        value = getattr(self, option.name)
        if value in (None, AUTO) and value == option.default:
            return
        expected = None
        if option.name == "cost_curve" and not isinstance(value, CostCurve):
            expected = "a CostCurve, as returned by cost.read_curve"
        elif option.type is bool and not isinstance(value, bool):
            expected = "True or False"
        elif option.type in (int, int | None) and (
            isinstance(value, bool) or not isinstance(value, Integral)
        ):
            expected = "a whole number"
        for name, bound in option.metadata["bounds"].items():
            holds, text = _BOUNDS[name]
            if expected is None and not (
                isinstance(value, Real) and math.isfinite(value) and holds(value, bound)
            ):
                expected = f"a finite number, {text.format(bound)}"
        if expected is not None:
            raise SettingsError(f"{option.name} is {value!r}; it must be {expected}")

    @property
    def deciding_curve(self) -> CostCurve | None:
        """Cost curve according to which a change must save time; ``None`` if a change must lower the PAR.

        It is ``None`` if there is no curve, if time is proportional to tokens, or if the policy is not ``flashlb``.
        """
        curve = self.cost_curve
        return None if curve is None or curve.linear or self.policy != "flashlb" else curve

    def is_default(self, name: str) -> bool:
        """Return True if a setting has its default value.

        Parameters
        ----------
        name
            Name of the field.

        Returns
        -------
        bool
            True if the value equals the default.
        """
        return bool(getattr(self, name) == getattr(PlannerSettings, name))


def offline_options() -> tuple[Field[Any], ...]:
    """Return the fields of the settings that affect decisions on recorded heat."""
    return tuple(option for option in fields(PlannerSettings) if not option.metadata["serve_only"])


def planner_settings(values: Mapping[str, Any]) -> PlannerSettings:
    """Parse options keyed by name; settings that are not given, or are ``None``, have their default values.

    Raises
    ------
    SettingsError
        If a value is invalid.
    """
    parsed = {name: value for name, value in values.items() if value is not None}
    if "move_price" in parsed:
        try:
            parsed["move_price"] = number_or_auto(parsed["move_price"])
        except ValueError as error:
            raise SettingsError(f"move_price is {values['move_price']!r}; {error}") from error
    if isinstance(parsed.get("cost_curve"), str):
        try:
            parsed["cost_curve"] = read_curve(parsed["cost_curve"])
        except ValueError as error:
            raise SettingsError(str(error)) from error
    return PlannerSettings(**parsed)


def number_or_auto(value: Any) -> NumberOrAuto:
    """Parse a number or ``auto``. Raises ``ValueError`` if the value is neither."""
    try:
        return AUTO if value == AUTO else float(value)
    except (TypeError, ValueError):
        raise ValueError("expected a number, or auto") from None
