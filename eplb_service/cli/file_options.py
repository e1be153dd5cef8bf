"""Options for files and the shape of a deployment: reading traces and placements, ranks, and slots.

This module imports neither the planner nor the solver, so that commands that query a running service start quickly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from eplb_core.atomic_write import check_output
from eplb_core.heat.window import HeatError
from eplb_core.placement import Int32, PlacementError
from eplb_core.planner.topology import Topology
from eplb_service.cli.options import SEVERAL, UserError, argument, one_of, option, whole_numbers
from eplb_service.cli.output import hint
from eplb_service.io.named_arrays import MEANINGS, ReadAs
from eplb_service.io.open_trace import KNOWN, naming, open_trace
from eplb_service.io.placement_file import FORMATS, SUFFIXES, placement_format, read_foreign, read_map
from eplb_service.io.routes import DEFAULT_BATCH
from eplb_service.io.trace import Trace

_TRACE_HELP = f"Trace: {KNOWN}. The format is detected from the content."
_SLOTS = "Ranks and slots"
HEAT = option(help=_TRACE_HELP)
TRACE = argument(help=_TRACE_HELP)
FORMAT = option(
    None,
    f"Format: {', '.join(FORMATS)}; by default, the suffix determines it (.json: vllm-ascend).",
    section="Results",
)
FIRST_LAYER = option(
    None,
    "Number of the first MoE layer in the model, for sglang and tensorrt-llm; by default as recorded, otherwise 0.",
    min=0,
    section="Results",
)
DRAFT_LAYERS = option(
    None,
    "Number of draft (MTP) layers after the last layer; each gets a row with the experts in order.",
    min=0,
    section="Results",
)
PLACEMENT = option(
    None, "Initial placement (.npz, .json, .yaml, .pt); by default the experts in order.", section=_SLOTS
)

_STEPS_READ = 64


@dataclass(frozen=True)
class ReadingOptions:
    """Facts about a trace file that its content does not state."""

    SECTION: ClassVar[str] = "How the trace is read"

    read_as: str | None = option(
        None, f"Meaning of the file's array if it has no name: {', '.join(MEANINGS)}.", "--as"
    )
    map: Path | None = option(
        None,
        "Expert in each slot [layers, slots], for tokens by slot; matched by layer number if the file has numbers.",
    )
    experts: int | None = option(
        None, "Logical experts per layer, if the file does not state the number.", min=1
    )
    batch: int | None = option(
        None,
        f"Requests decoded concurrently, if routes are assembled into steps; {DEFAULT_BATCH} by default.",
        min=1,
    )
    top_k: int | None = option(
        None, "Experts that a token chooses, if the routes do not state the number.", min=1
    )

    def reading(self) -> ReadAs:
        """Return the facts for reading a file. Raises ``UserError`` if the meaning or the map is invalid."""
        meaning = None if self.read_as is None else one_of("--as is", self.read_as, MEANINGS)
        read_as = ReadAs()
        if self.map is not None:
            try:
                read_as = read_map(self.map)
            except (HeatError, PlacementError) as error:
                raise UserError(f"{self.map}: {error}") from error
        return replace(read_as, meaning=meaning, experts=self.experts, batch=self.batch, top_k=self.top_k)

    def open(self, path: Path) -> Trace:
        """Open a trace, and print a hint if most of a layer's experts never get a token.

        Raises ``HeatError`` if the trace cannot be read, or ``UserError`` if it has no tokens at all.
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
                f"{path}: all of its {trace.steps} steps have zero tokens; record while the model is serving requests"
            )
        idle_L = (~busy_LE).sum(axis=1)
        layer = int(idle_L.argmax())
        if 2 * idle_L[layer] > trace.experts:
            number = (trace.facts.layer_numbers or range(trace.layers))[layer]
            hint(
                f"in layer {number}, {idle_L[layer]} of {trace.experts} experts never get a token; check that the "
                "recording is long enough and that it counts experts, not slots"
            )
        return trace


@dataclass(frozen=True)
class RankOptions:
    """Shape of the expert-parallel group."""

    SECTION: ClassVar[str] = _SLOTS

    ranks: int = option(help="Ranks of the expert-parallel group.", min=1)
    nodes: str | None = option(
        None,
        "Number of nodes, filled in order, or the node of each rank, separated by commas; by default as recorded, "
        "otherwise one.",
    )
    token_group: int = option(
        1, "Number of neighbouring ranks that see the same tokens and share their tables.", min=1
    )

    def topology(self, trace: Trace) -> Topology:
        """Return the nodes and token groups of the ranks.

        Raises ``UserError`` if the nodes or token groups do not match the number of ranks.
        """
        if self.ranks % self.token_group:
            raise UserError(f"--token-group {self.token_group} does not divide the {self.ranks} ranks evenly")
        nodes_R = trace.facts.nodes_R if len(trace.facts.nodes_R) == self.ranks else (0,) * self.ranks
        if self.nodes is not None:
            nodes_R = self._nodes([entry.strip() for entry in self.nodes.split(",")])
        groups_R = np.arange(self.ranks, dtype=np.int32) // self.token_group
        return Topology(np.asarray(nodes_R, dtype=np.int32), groups_R, trace.facts.bytes_per_expert)

    def _nodes(self, entries: list[str]) -> tuple[int, ...]:
        numbers = [int(entry) for entry in entries if entry.isdecimal() and len(entry) < 5]
        if len(numbers) == len(entries) == self.ranks:
            return tuple(numbers)
        if len(numbers) == len(entries) == 1 and numbers[0] and self.ranks % numbers[0] == 0:
            return tuple(rank * numbers[0] // self.ranks for rank in range(self.ranks))
        raise UserError(
            f"--nodes is {self.nodes!r}; expected a number of nodes that divides {self.ranks} ranks, or the node of "
            "each rank"
        )


@dataclass(frozen=True)
class SlotOptions:
    """Number of slots."""

    SECTION: ClassVar[str] = _SLOTS

    slots: str | None = option(
        None, "Expert slots per rank and layer; replay and sweep accept several.", metavar=SEVERAL
    )
    redundant: str | None = option(
        None, "Redundant experts per layer, as an alternative to --slots.", metavar=SEVERAL
    )

    def counts(self, experts: int, ranks: int) -> list[int]:
        """Return the slot counts per rank to try.

        Raises ``UserError`` if a number of redundant experts cannot be spread evenly over the ranks.
        """
        if self.slots is not None and self.redundant is not None:
            raise UserError("--slots and --redundant are mutually exclusive; give only one")
        if self.slots is not None:
            return whole_numbers("--slots", self.slots)
        return slots_of_redundant(experts, ranks, self.redundant or str(-experts % ranks))

    def count(self, experts: int, ranks: int) -> int:
        """Return the number of slots per rank. Raises ``UserError`` if the options specify none or several."""
        if self.slots is None and self.redundant is None:
            raise UserError(
                "give --slots (expert slots per rank) or --redundant (redundant experts per layer)"
            )
        counts = self.counts(experts, ranks)
        if len(counts) > 1:
            raise UserError("a placement has a single number of slots; use `eplb replay` to compare several")
        return counts[0]


def slots_of_redundant(experts: int, ranks: int, text: str) -> list[int]:
    """Return the number of slots per rank for each number of redundant experts per layer.

    Raises ``UserError`` if a number cannot be spread evenly over the ranks.

    Examples
    --------
    >>> slots_of_redundant(experts=16, ranks=4, text="0,8")
    [4, 6]
    """
    counts = []
    for redundant in whole_numbers("--redundant", text, minimum=0):
        if (experts + redundant) % ranks:
            raise UserError(
                f"{experts} experts and {redundant} redundant ones cannot be split evenly over {ranks} ranks; "
                f"use --redundant {-experts % ranks}, or that number plus a multiple of {ranks}"
            )
        counts.append((experts + redundant) // ranks)
    return counts


def read_start_placement(path: Path | None, trace: Trace, ranks: int) -> Int32 | None:
    """Read the ``--placement`` file and return it, int32 ``[L, R, S]``, or ``None`` if there is none.

    Raises ``UserError`` or ``PlacementError`` if it does not fit the trace.
    """
    if path is None:
        return None
    placement_LRS = read_foreign(path, trace.experts, ranks, trace.facts.layer_numbers)
    if len(placement_LRS) != trace.layers:
        raise UserError(f"--placement has {len(placement_LRS)} layers, but the trace has {trace.layers}")
    return placement_LRS


def check_placement_output(
    out: Path | None, format: str | None, first_layer: int | None, draft_layers: int | None = None
) -> None:
    """Check that a placement can be written with these options.

    Raises ``UserError``, ``OutputError`` or ``PlacementError`` if it cannot.
    """
    if out is None:
        if any(value is not None for value in (format, first_layer, draft_layers)):
            raise UserError("--format, --first-layer and --draft-layers apply to a written file; add --out")
        return
    check_output(out, SUFFIXES)
    placement_format(out, format)


def choices_per_step(trace: Trace) -> float:
    """Return the total tokens of a layer's experts per step, averaged over the first steps.

    A token that chooses k experts counts k times.
    """
    heat_TLE = trace.heat(0, min(trace.steps, _STEPS_READ))
    return float(heat_TLE.sum(axis=2).mean())
