"""Options of the commands that read a trace: how it is read, ranks and slots, the planner's settings, and costs."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import typer

from eplb_core.atomic_write import check_output
from eplb_core.heat.window import HeatError
from eplb_core.placement import Int32, Placement, PlacementError
from eplb_core.planner.price import SplitCost
from eplb_core.planner.request import groups_on_nodes
from eplb_core.planner.settings import PlannerSettings, offline_options, planner_options
from eplb_core.planner.topology import Topology
from eplb_service.cli.options import (
    SEVERAL,
    UserError,
    argument,
    one_of,
    option,
    setting_option,
    whole_numbers,
)
from eplb_service.io.named_arrays import MEANINGS, ReadAs
from eplb_service.io.open_trace import KNOWN, naming, open_trace
from eplb_service.io.placement_file import FORMATS, SUFFIXES, placement_format, read_foreign, read_map
from eplb_service.io.routes import DEFAULT_BATCH
from eplb_service.io.trace import Trace
from eplb_service.replay.costs import Assumption, Costs

PLANNER = "How decisions are made"
"""Heading of the planner's settings."""
_TRACE_HELP = f"Trace: {KNOWN}; the content decides the format."
_SLOTS = "Ranks and slots"
HEAT = option(help=_TRACE_HELP)
TRACE = argument(help=_TRACE_HELP)
FORMAT = option(
    None,
    f"One of {', '.join(FORMATS)}; by default by the name of the file (.json: vllm-ascend).",
    section="Results",
)
FIRST_LAYER = option(
    None,
    "The model's number of its first MoE layer, for sglang and tensorrt-llm; by default as recorded, otherwise 0.",
    min=0,
    section="Results",
)
DRAFT_LAYERS = option(
    None,
    "Layers of a draft (MTP) model that follow the last one; each gets a row with the experts in order.",
    min=0,
    section="Results",
)
PLACEMENT = option(
    None, "Placement at the start (.npz, .json, .yaml, .pt); by default experts in order.", section=_SLOTS
)
WORKERS = option(None, "Processes; as many as cores by default.", min=1, section="How it is run")
RAY = option(None, "Run on the Ray cluster at this address ('local': here).", section="How it is run")

_STEPS_READ = 64


def hint(text: str) -> None:
    """Warn the user on stderr about something that is legal and probably not meant."""
    typer.echo(f"eplb: hint: {text}", err=True)


def check_groups(settings: PlannerSettings, experts: int, counts: Sequence[int], topology: Topology) -> None:
    """Check for each number of slots per rank if every expert group can stay on one node.

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
    """Print a hint if the window is shorter than the interval, so that decisions miss some heat."""
    window = min(windows)
    interval = max(intervals)
    if window < interval:
        hint(f"with --window {window} and --interval {interval}, {unused_heat(window, interval)}")


def unused_heat(window: int, interval: int) -> str:
    """Return a clause that says which steps decisions use if the window is shorter than the interval."""
    return f"decisions use only the last {window} of every {interval} steps"


@dataclass(frozen=True)
class ReadingOptions:
    """Meaning of a file that does not state it itself."""

    SECTION: ClassVar[str] = "How the trace is read"

    read_as: str | None = option(
        None, f"What the file's array is, where it is not named: {', '.join(MEANINGS)}.", "--as"
    )
    map: Path | None = option(
        None,
        "Expert in each slot [layers, slots], for tokens by slot; matched by layer number if it has them.",
    )
    experts: int | None = option(None, "Logical experts per layer, where the file does not name them.", min=1)
    batch: int | None = option(
        None, f"Requests decoded side by side, where routes become steps; {DEFAULT_BATCH} by default.", min=1
    )
    top_k: int | None = option(None, "Choices of a token, where routes do not say it.", min=1)

    def reading(self) -> ReadAs:
        """Return how a file is to be read; raises ``UserError`` on an unknown meaning, or a map that cannot be read."""
        meaning = None if self.read_as is None else one_of("--as names", self.read_as, MEANINGS)
        read_as = ReadAs()
        if self.map is not None:
            try:
                read_as = read_map(self.map)
            except (HeatError, PlacementError) as error:
                raise UserError(f"{self.map}: {error}") from error
        return replace(read_as, meaning=meaning, experts=self.experts, batch=self.batch, top_k=self.top_k)

    def open(self, path: Path) -> Trace:
        """Open a trace, with a hint on stderr if most experts of a layer never get a token.

        Raises ``HeatError``, and ``UserError`` if it has no tokens at all: nothing could be learned.
        """
        trace = open_trace(path, self.reading())
        busy_LE = np.zeros((trace.layers, trace.experts), dtype=np.bool_)
        with naming(path):
            for first in range(0, trace.steps, _STEPS_READ):
                busy_LE |= trace.heat(first, min(trace.steps, first + _STEPS_READ)).any(axis=0)
                if busy_LE.all():
                    return trace
        if not busy_LE.any():
            raise UserError(
                f"{path}: all of its {trace.steps} steps hold zero tokens; record while the model serves"
            )
        idle_L = (~busy_LE).sum(axis=1)
        layer = int(idle_L.argmax())
        if 2 * idle_L[layer] > trace.experts:
            number = (trace.facts.layer_numbers or range(trace.layers))[layer]
            hint(
                f"in layer {number}, {idle_L[layer]} of {trace.experts} experts never get a token; check that the "
                "recording is long enough and that these are experts, not slots"
            )
        return trace


@dataclass(frozen=True)
class RankOptions:
    """The expert-parallel group."""

    SECTION: ClassVar[str] = _SLOTS

    ranks: int = option(help="Ranks of the expert-parallel group.", min=1)
    nodes: str | None = option(
        None,
        "Number of nodes, filled in order; or each rank's node, with commas. By default as recorded, or one.",
    )
    token_group: int = option(1, "Neighbouring ranks that see the same tokens and share their tables.", min=1)

    def topology(self, trace: Trace) -> Topology:
        """Nodes and token groups of the ranks; raises ``UserError`` where that cannot be."""
        if self.ranks % self.token_group:
            raise UserError(f"--token-group {self.token_group} does not divide {self.ranks} ranks")
        nodes_R = trace.facts.nodes_R if len(trace.facts.nodes_R) == self.ranks else (0,) * self.ranks
        if self.nodes is not None:
            nodes_R = self._nodes([part.strip() for part in self.nodes.split(",")])
        groups_R = np.arange(self.ranks, dtype=np.int32) // self.token_group
        return Topology(np.asarray(nodes_R, dtype=np.int32), groups_R, trace.facts.bytes_per_expert)

    def _nodes(self, parts: list[str]) -> tuple[int, ...]:
        numbers = [int(part) for part in parts if part.isdecimal() and len(part) < 5]
        if len(numbers) == len(parts) == self.ranks:
            return tuple(numbers)
        if len(numbers) == len(parts) == 1 and numbers[0] and self.ranks % numbers[0] == 0:
            return tuple(rank * numbers[0] // self.ranks for rank in range(self.ranks))
        raise UserError(
            f"--nodes {self.nodes!r}: expected a count over which {self.ranks} ranks spread evenly, or the number of "
            "each rank's node"
        )


@dataclass(frozen=True)
class SlotOptions:
    """The number of slots."""

    SECTION: ClassVar[str] = _SLOTS

    slots: str | None = option(
        None, "Expert slots per rank and layer; several for replay and sweep.", metavar=SEVERAL
    )
    redundant: str | None = option(
        None, "Slots per layer beyond one per expert, instead of --slots.", metavar=SEVERAL
    )

    def counts(self, experts: int, ranks: int) -> list[int]:
        """Slots per rank to try; raises ``UserError`` where they do not spread evenly over the ranks."""
        if self.slots is not None and self.redundant is not None:
            raise UserError("give either --slots or --redundant")
        if self.slots is not None:
            return whole_numbers("--slots", self.slots)
        return slots_of_redundant(experts, ranks, self.redundant or str(-experts % ranks))

    def count(self, experts: int, ranks: int) -> int:
        """The one number of slots per rank; raises ``UserError`` where several are given, or none."""
        if self.slots is None and self.redundant is None:
            raise UserError(
                "give --slots (expert slots per rank) or --redundant (slots per layer beyond the experts)"
            )
        counts = self.counts(experts, ranks)
        if len(counts) > 1:
            raise UserError("a placement has one number of slots; `eplb replay` compares several")
        return counts[0]


@dataclass(frozen=True)
class CostOptions:
    """Costs of a step, of an expert's weights and of a switch."""

    SECTION: ClassVar[str] = "Costs (stated, not measured)"

    step_ms: float | None = option(
        None, "Time of a model step; by default plans take effect at once and no times are reported."
    )
    bytes_per_expert: int | None = option(
        None, "Bytes of the weights of one expert in one layer; by default as recorded.", min=0
    )
    solve_ms: float | None = option(
        None, f"From the end of a window to the plan; {Costs().solve_ms:g} by default."
    )
    link_share: float | None = option(
        None, f"Share of --link-bandwidth that transfers use; {Costs().link_share:g} by default."
    )
    model_layers: int | None = option(
        None,
        "MoE layers of the served model, which determine how soon plans take effect; by default the trace's.",
        min=1,
    )
    commit_ms: float | None = option(
        None, "Standstill of all ranks per switched layer; 0.5 and a copy by default."
    )

    def costs(self, settings: PlannerSettings, trace: Trace, ranks: int) -> Costs:
        """Costs of a replay of ``trace``, by which it decides and which it charges.

        Raises ``ReplayError`` on a value out of bounds.
        """
        split = SplitCost.of(settings, ranks, trace.experts, choices_per_step(trace))
        stated = {"bytes_per_expert": trace.facts.bytes_per_expert, **self._given()}
        return Costs.of(settings, trace.layers, split=split, **stated)

    def assumptions(self, settings: PlannerSettings, costs: Costs) -> tuple[Assumption, ...]:
        """The numbers that results with these costs rest on."""
        changed = {one.name for one in planner_options() if not settings.is_default(one.name)}
        return costs.assumptions(changed | set(self._given()))

    def _given(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if value is not None}


def planner_flags(*without: str) -> list[inspect.Parameter]:
    """Return an option for each setting of the planner that affects recorded heat, except for those in ``without``."""
    kinds = typing.get_type_hints(PlannerSettings)
    return [
        setting_option(one.name, kinds[one.name], one.default, one.metadata["help"], section=PLANNER)
        for one in offline_options()
        if one.name not in without
    ]


POLICY = option(
    "flashlb",
    "Policy: flashlb (this project's solver), deepseek, none, one of flashlb's ablations, module:function, or an entry "
    "point of eplb.policies.",
)


def one_policy(policy: str) -> None:
    """Raise ``UserError`` unless ``--policy`` names a policy that can be imported."""
    from eplb_core.planner.policies import PolicyError, external_policy

    try:
        external_policy(policy)
    except PolicyError as error:
        raise UserError(f"--policy: {error}") from error


def placed_at_start(path: Path | None, trace: Trace, ranks: int) -> Int32 | None:
    """The placement of --placement ``[L, R, S]``, or ``None``; raises ``UserError`` or ``PlacementError``."""
    if path is None:
        return None
    placed_LRS = read_foreign(path, trace.experts, ranks, trace.facts.layer_numbers)
    if len(placed_LRS) != trace.layers:
        raise UserError(f"--placement has {len(placed_LRS)} layers, the trace {trace.layers}")
    return placed_LRS


def check_placement_output(
    out: Path | None, format: str | None, first_layer: int | None, draft_layers: int | None = None
) -> None:
    """Raise ``UserError``, ``OutputError`` or ``PlacementError`` where a placement could not be written so."""
    if out is None:
        if any(stated is not None for stated in (format, first_layer, draft_layers)):
            raise UserError("--format, --first-layer and --draft-layers say how a file is written; add --out")
        return
    check_output(out, SUFFIXES)
    placement_format(out, format)


def slots_of_redundant(experts: int, ranks: int, text: str) -> list[int]:
    """Slots per rank for each number of redundant experts in ``text``; raises ``UserError`` where one is uneven."""
    counts = []
    for redundant in whole_numbers("--redundant", text, least=0):
        if (experts + redundant) % ranks:
            raise UserError(
                f"{experts} experts and {redundant} redundant ones do not spread evenly over {ranks} ranks; "
                f"use --redundant {-experts % ranks} or that plus a multiple of {ranks}"
            )
        counts.append((experts + redundant) // ranks)
    return counts


def choices_per_step(trace: Trace) -> float:
    """Tokens over all experts of a layer in a step, mean over a few steps."""
    heat_TLE = trace.heat(0, min(trace.steps, _STEPS_READ))
    return float(heat_TLE.sum(axis=2).mean())


def basis_text(rests_on: Sequence[Assumption]) -> str:
    """The numbers that results rest on in one sentence, those of one origin together."""
    by_source: dict[str, list[str]] = {}
    for one in rests_on:
        by_source.setdefault(one.source, []).append(f"{one.name} {one.value}")
    parts = (f"{', '.join(values)} ({source})" for source, values in by_source.items())
    return f"This rests on: {'; '.join(parts)}."
