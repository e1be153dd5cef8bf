"""Options of the commands that read a trace: how it is read, ranks and slots, the planner's settings, and costs."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from eplb_service.atomic_write import check_output
from eplb_service.cli.options import (
    SEVERAL,
    UserError,
    argument,
    one_of,
    option,
    setting_option,
    whole_numbers,
)
from eplb_service.heat.window import Counts, HeatError
from eplb_service.io.named_arrays import MEANINGS, ReadAs
from eplb_service.io.open_trace import KNOWN, naming, open_trace
from eplb_service.io.placement_file import FORMATS, SUFFIXES, placement_format, read_phy2log, read_placement
from eplb_service.io.routes import DEFAULT_BATCH
from eplb_service.io.trace import Trace
from eplb_service.placement import Int32, PlacementError
from eplb_service.planner.price import SplitCost
from eplb_service.planner.settings import PlannerSettings, planner_options
from eplb_service.planner.topology import Topology
from eplb_service.replay.costs import Assumption, Costs

PLANNER = "How decisions are made"
"""Heading of the planner's settings."""
HEAT = option(help=f"Trace: {KNOWN}; the content decides the format.")
TRACE = argument(help=f"Trace: {KNOWN}; the content decides the format.")
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
WORKERS = option(None, "Processes; as many as cores by default.", min=1, section="How it is run")
RAY = option(None, "Run on the Ray cluster at this address ('local': here).", section="How it is run")

_COSTS = Costs()
_STEPS_READ = 64


@dataclass(frozen=True)
class ReadingOptions:
    """Meaning of a file that does not state it itself."""

    SECTION: ClassVar = "How the trace is read"

    read_as: str | None = option(
        None, f"What the file's array is, where it is not named: {', '.join(MEANINGS)}.", "--as"
    )
    map: Path | None = option(None, "Expert in each slot [layers, slots], for tokens by slot.")
    experts: int | None = option(None, "Logical experts per layer, where the file does not name them.", min=1)
    batch: int = option(DEFAULT_BATCH, "Requests decoded side by side, where routes become steps.", min=1)
    top_k: int | None = option(None, "Choices of a token, where routes do not say it.", min=1)

    def reading(self) -> ReadAs:
        """Return how a file is to be read; raises ``UserError`` on an unknown meaning, or a map that cannot be read."""
        meaning = None if self.read_as is None else one_of("--as names", self.read_as, MEANINGS)
        phy2log = None
        if self.map is not None:
            try:
                phy2log = read_phy2log(self.map)
            except (HeatError, PlacementError) as error:
                raise UserError(f"{self.map}: {error}") from error
        return ReadAs(meaning, phy2log, self.experts, self.batch, self.top_k)

    def open(self, path: Path) -> Trace:
        """Open a trace; raises ``HeatError``, and ``UserError`` where it has no tokens: nothing could be learned."""
        trace = open_trace(path, self.reading())
        with naming(path):
            for first in range(0, trace.steps, _STEPS_READ):
                if trace.heat(first, min(trace.steps, first + _STEPS_READ)).any():
                    return trace
        raise UserError(
            f"{path}: all of its {trace.steps} steps hold zero tokens; record while the model serves"
        )


@dataclass(frozen=True)
class RankOptions:
    """The expert-parallel group."""

    SECTION: ClassVar = "Ranks and slots"

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
        recorded = trace.facts.nodes_R if len(trace.facts.nodes_R) == self.ranks else (0,) * self.ranks
        nodes_R = recorded if self.nodes is None else self._nodes(self.nodes)
        groups_R = np.arange(self.ranks, dtype=np.int32) // self.token_group
        return Topology(np.asarray(nodes_R, dtype=np.int32), groups_R, trace.facts.bytes_per_expert)

    def _nodes(self, text: str) -> tuple[int, ...]:
        ranks = self.ranks
        if "," not in text:
            (count,) = whole_numbers("--nodes", text)
            if ranks % count:
                raise UserError(
                    f"--nodes {count}: {ranks} ranks do not spread evenly over them; name each rank's node"
                )
            return tuple(rank * count // ranks for rank in range(ranks))
        parts = [part.strip() for part in text.split(",")]
        if len(parts) != ranks or not all(part.isdecimal() and len(part) < 5 for part in parts):
            raise UserError(
                f"--nodes {text!r}: expected a count, or the number of each of {ranks} ranks' node"
            )
        return tuple(map(int, parts))


@dataclass(frozen=True)
class SlotOptions:
    """The number of slots."""

    SECTION: ClassVar = "Ranks and slots"

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
class StartOptions:
    """Placement at the start."""

    SECTION: ClassVar = "Ranks and slots"

    placement: Path | None = option(
        None, "Placement at the start (.npz, .json, .yaml, .pt); by default experts in order."
    )
    prior: Path | None = option(
        None, "Trace of similar heat, such as prefill's: the start is placed for it, instead of --placement."
    )

    def prior_heat(self, trace: Trace, reading: ReadingOptions) -> Counts | None:
        """Heat of --prior, ``[P, L, E]``; raises ``UserError`` or ``HeatError`` where it is of no use for ``trace``."""
        if self.prior is None:
            return None
        prior = reading.open(self.prior)
        if (prior.layers, prior.experts) != (trace.layers, trace.experts):
            raise UserError(
                f"{self.prior}: has {prior.layers} layers x {prior.experts} experts, the trace {trace.layers} x "
                f"{trace.experts}; a prior is heat of the same model"
            )
        return prior.heat(0, prior.steps)

    def placed(self, trace: Trace, ranks: int, slots: Collection[int]) -> Int32 | None:
        """The placement given ``[L, R, S]``, or ``None``; raises ``UserError`` or ``PlacementError``."""
        if self.placement is not None and self.prior is not None:
            raise UserError("give either --placement or --prior: both are what serves at the start")
        if self.placement is None:
            return None
        numbers = trace.facts.layer_numbers
        placed_LRS = read_placement(self.placement, trace.experts, ranks, numbers).phy2log_LRS
        if {placed_LRS.shape[2]} != set(slots):
            raise UserError(f"--placement has {placed_LRS.shape[2]} slots per rank, asked for {list(slots)}")
        if len(placed_LRS) != trace.layers:
            raise UserError(f"--placement has {len(placed_LRS)} layers, the trace {trace.layers}")
        return placed_LRS


@dataclass(frozen=True)
class CostOptions:
    """Costs of a step, of an expert's weights and of a switch."""

    SECTION: ClassVar = "Costs (stated, not measured)"

    step_ms: float = option(
        0.0, "Time of a model step; 0: decisions take effect at once, no times are given."
    )
    bytes_per_expert: int = option(
        0, "Bytes of the weights of one expert in one layer; as recorded where not given.", min=0
    )
    solve_ms: float | None = option(
        None, f"From the end of a window to the plan; {_COSTS.solve_ms:g} where not given."
    )
    commit_ms: float | None = option(
        None, "Standstill of all ranks per switched layer; 0.5 and a copy where not given."
    )

    def costs(self, settings: PlannerSettings, trace: Trace, ranks: int) -> Costs:
        """Costs of a replay of ``trace``, by which it decides and which it charges.

        Raises ``ReplayError`` on a value out of bounds.
        """
        split = SplitCost.of(settings, ranks, trace.experts, choices_per_step(trace))
        given = {"bytes_per_expert": trace.facts.bytes_per_expert, **self._given()}
        return Costs.of(settings, trace.layers, split=split, **given)

    def assumptions(self, settings: PlannerSettings, costs: Costs) -> tuple[Assumption, ...]:
        """The numbers that results with these costs rest on."""
        stated = {one.name for one in planner_options() if not settings.is_default(one.name)}
        return costs.assumptions(stated | set(self._given()))

    def _given(self) -> dict[str, float]:
        nothing = {"step_ms": 0.0, "bytes_per_expert": 0}
        return {name: value for name, value in vars(self).items() if value != nothing.get(name)}


def planner_flags(*without: str) -> list[inspect.Parameter]:
    """An option for each setting of the planner, but for those that a command has itself."""
    kinds = typing.get_type_hints(PlannerSettings)
    return [
        setting_option(one.name, kinds[one.name], one.default, one.metadata["help"], section=PLANNER)
        for one in planner_options()
        if one.name not in without
    ]


def check_placement_output(out: Path | None, format: str | None, first_layer: int | None) -> None:
    """Raise ``UserError``, ``OutputError`` or ``PlacementError`` where a placement could not be written so."""
    if out is None:
        if format is not None or first_layer is not None:
            raise UserError("--format and --first-layer say how a file is written; give it with --out")
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
