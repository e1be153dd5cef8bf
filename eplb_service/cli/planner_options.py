"""Options of commands that run the planner: its settings, its policy, and the assumed costs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from eplb_core.placement import Placement
from eplb_core.planner.price import SplitCost
from eplb_core.planner.request import groups_on_nodes
from eplb_core.planner.settings import SPLITS, PlannerSettings, offline_options
from eplb_core.planner.topology import Topology
from eplb_service.cli.file_options import choices_per_step
from eplb_service.cli.options import UserError, only_if_given, option, setting_option
from eplb_service.cli.output import hint
from eplb_service.io.trace import Trace
from eplb_service.replay.costs import Assumption, Costs

PLANNER = "How decisions are made"
"""Section for the planner's settings."""
POLICY = option(
    "flashlb",
    "Policy: flashlb (this project's solver), deepseek, none, an ablation of flashlb, module:function, or an entry "
    "point of eplb.policies.",
)
WORKERS = option(None, "Processes; by default one per core.", min=1, section="Execution")
RAY = option(None, "Address of the Ray cluster to run on ('local': this machine).", section="Execution")


@dataclass(frozen=True)
class CostOptions:
    """Costs of steps, expert weights and switches."""

    SECTION: ClassVar[str] = "Costs (stated, not measured)"

    step_ms: float | None = option(
        None,
        "Time of a model step. Without it, plans take effect immediately and no times are reported.",
    )
    bytes_per_expert: int | None = option(
        None, "Bytes of one expert's weights in one layer; by default as recorded.", min=0
    )
    solve_ms: float | None = option(
        None, f"Time from the end of a window to the arrival of its plan; {Costs().solve_ms:g} by default."
    )
    link_share: float | None = option(
        None, f"Fraction of --link-bandwidth that transfers use; {Costs().link_share:g} by default."
    )
    model_layers: int | None = option(
        None,
        "Number of MoE layers in the served model, which determines how soon a plan takes effect; by default, as in "
        "the trace.",
        min=1,
    )
    commit_ms: float | None = option(
        None, "Pause of all ranks per switched layer; by default 0.5 plus the time to copy the weights."
    )

    def costs(self, settings: PlannerSettings, trace: Trace, ranks: int) -> Costs:
        """Return the costs that a replay of ``trace`` uses for its decisions and charges for them.

        Raises ``ReplayError`` if a value is out of bounds.
        """
        split = SplitCost.of(settings, ranks, trace.experts, choices_per_step(trace))
        values = {"bytes_per_expert": trace.facts.bytes_per_expert, **self._set_values()}
        return Costs.of(settings, trace.layers, split=split, **values)

    def assumptions(self, settings: PlannerSettings, costs: Costs) -> tuple[Assumption, ...]:
        """Return the assumptions on which a replay with these costs is based."""
        changed = {field.name for field in fields(PlannerSettings) if not settings.is_default(field.name)}
        return costs.assumptions(changed | set(self._set_values()))

    def _set_values(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if value is not None}


def planner_flags(*without: str) -> list[inspect.Parameter]:
    """Return an option for each planner setting, except those in ``without``, which the command declares itself."""
    return [
        setting_option(
            field.name,
            field.type,
            field.default,
            field.metadata["help"],
            section=PLANNER,
            callback=only_if_given if field.name == "split" else None,
        )
        for field in offline_options()
        if field.name not in without
    ]


def one_policy(policy: str, flag: str = "--policy") -> None:
    """Raise ``UserError`` unless ``policy``, the value of the option ``flag``, names a policy that can be imported."""
    from eplb_core.planner.policies import PolicyError, external_policy

    try:
        external_policy(policy)
    except PolicyError as error:
        raise UserError(f"{flag}: {error}") from error


def as_recorded(settings: PlannerSettings, trace: Trace, given: Mapping[str, Any]) -> PlannerSettings:
    """Return the settings with the split recorded in the trace, unless the user has ``given`` one."""
    if given.get("split") is None and trace.facts.split in SPLITS:
        return replace(settings, split=trace.facts.split)
    return settings


def check_groups(settings: PlannerSettings, experts: int, counts: Sequence[int], topology: Topology) -> None:
    """Check whether each expert group fits on one node, for each number of slots per rank in ``counts``.

    Prints a hint if the groups cannot stay together. Raises ``UserError`` if they do not divide the experts evenly.
    """
    groups = settings.expert_groups
    if groups and experts % groups:
        raise UserError(f"--expert-groups {groups} does not divide the {experts} experts evenly")
    for slots in counts:
        linear = Placement.linear(1, experts, topology.ranks, slots)
        _, why_ungrouped = groups_on_nodes(settings, linear, topology)
        if why_ungrouped:
            hint(f"--expert-groups has no effect: {why_ungrouped}")
            return


def check_windows(windows: Sequence[int], intervals: Sequence[int]) -> None:
    """Print a hint if a window is shorter than an interval, so that decisions miss some heat."""
    window = min(windows)
    interval = max(intervals)
    if window < interval:
        hint(f"with --window {window} and --interval {interval}, {unused_heat(window, interval)}")


def unused_heat(window: int, interval: int) -> str:
    """Return a clause that says which steps are used if the window is shorter than the interval."""
    return f"decisions use only the last {window} of every {interval} steps"


def assumptions_text(assumptions: Sequence[Assumption]) -> str:
    """Return the assumptions behind some results as one sentence, grouped by their source.

    Examples
    --------
    >>> assumptions_text([Assumption("step_ms", "30 ms", "stated"), Assumption("solve_ms", "50 ms", "assumed")])
    'Based on: step_ms 30 ms (stated); solve_ms 50 ms (assumed).'
    """
    by_source: dict[str, list[str]] = {}
    for assumption in assumptions:
        by_source.setdefault(assumption.source, []).append(f"{assumption.name} {assumption.value}")
    groups = (f"{', '.join(values)} ({source})" for source, values in by_source.items())
    return f"Based on: {'; '.join(groups)}."
