"""Options on the ranks, their slots and where decisions begin, and on what a step and a move cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from eplb_service.cli.errors import UserError, whole_numbers
from eplb_service.cli.options.planner import NodesOption, TokenGroupOption, topology_of
from eplb_service.cli.options.trace import check_tokens
from eplb_service.cli.repeated import SEVERAL
from eplb_service.heat.window import Counts
from eplb_service.io.named_arrays import ReadAs
from eplb_service.io.open_trace import naming, open_trace
from eplb_service.io.placement_file import FORMATS, read_placement
from eplb_service.io.trace import Trace
from eplb_service.placement import Int32
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.split_cost import SplitCost
from eplb_service.planner.topology import Topology
from eplb_service.replay.assumptions import Assumption, assumptions
from eplb_service.replay.costs import Costs

_COSTS = Costs()

FormatOption = Annotated[
    str | None,
    typer.Option(
        help=f"One of {', '.join(FORMATS)}; by default the format that the file's name ends in (.json: vllm-ascend)."
    ),
]
FirstLayerOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="The model's number of its first MoE layer, which sglang and tensorrt-llm count by; by default as "
        "recorded, otherwise 0.",
    ),
]


@dataclass(frozen=True)
class RankOptions:
    """The expert-parallel group."""

    SECTION: ClassVar = "Ranks and slots"

    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the expert-parallel group.")]
    nodes: NodesOption = None
    token_group: TokenGroupOption = 1

    def topology(self, trace: Trace) -> Topology:
        """Where the ranks are; raises ``UserError`` where that cannot be."""
        return topology_of(self.ranks, self.nodes, self.token_group, trace)


@dataclass(frozen=True)
class SlotOptions:
    """How many slots there are, and what is in them at the start."""

    SECTION: ClassVar = "Ranks and slots"

    slots: Annotated[
        str | None,
        typer.Option(
            metavar=SEVERAL,
            help="Expert slots per rank and layer, redundant ones included; replay takes several.",
        ),
    ] = None
    redundant: Annotated[
        str | None,
        typer.Option(
            metavar=SEVERAL,
            help="Slots per layer beyond one per expert, instead of --slots; replay takes several.",
        ),
    ] = None
    placement: Annotated[
        Path | None,
        typer.Option(help="Placement at the start (.npz, .json, .yaml, .pt); by default experts in order."),
    ] = None

    prior: Annotated[
        Path | None,
        typer.Option(
            help="Trace of heat that resembles this, such as prefill's before decoding: the start is placed for it, "
            "instead of --placement."
        ),
    ] = None

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

    def prior_heat(self, trace: Trace, reading: ReadAs) -> Counts | None:
        """Heat of --prior, ``[P, L, E]``; raises ``UserError`` or ``HeatError`` where it is of no use for ``trace``."""
        if self.prior is None:
            return None
        prior = open_trace(self.prior, reading)
        if (prior.layers, prior.experts) != (trace.layers, trace.experts):
            raise UserError(
                f"{self.prior}: has {prior.layers} layers x {prior.experts} experts, the trace {trace.layers} x "
                f"{trace.experts}; a prior is heat of the same model"
            )
        with naming(self.prior):
            check_tokens(self.prior, prior)
            return prior.heat(0, prior.steps)

    def start(self, trace: Trace, ranks: int) -> Int32 | None:
        """The placement given ``[L, R, S]``, or ``None``; raises ``UserError`` or ``PlacementError``."""
        if self.placement is not None and self.prior is not None:
            raise UserError("give either --placement or --prior: both are what serves at the start")
        if self.placement is None:
            return None
        numbers = trace.facts.layer_numbers
        return read_placement(self.placement, trace.experts, ranks, numbers).phy2log_LRS


@dataclass(frozen=True)
class CostOptions:
    """What a step, an expert's weights and a switch cost."""

    SECTION: ClassVar = "Costs (stated, not measured)"

    step_ms: Annotated[
        float,
        typer.Option(help="Time of a model step; 0: decisions take effect at once, no times are given."),
    ] = 0.0
    moe_share: Annotated[
        float | None,
        typer.Option(
            help=f"Part of a step that the hottest rank decides; {_COSTS.moe_share:g}, unless --cost-curve says."
        ),
    ] = None
    bytes_per_expert: Annotated[
        int, typer.Option(min=0, help="Bytes of the weights of one expert in one layer.")
    ] = 0
    bandwidth: Annotated[
        float | None,
        typer.Option(
            help=f"GB/s that a rank receives while it serves; {_COSTS.bandwidth / 1e9:g} where not given."
        ),
    ] = None
    solve_ms: Annotated[
        float | None,
        typer.Option(help=f"From the end of a window to the plan; {_COSTS.solve_ms:g} where not given."),
    ] = None
    commit_ms: Annotated[
        float | None,
        typer.Option(
            help=f"Standstill of all ranks per switched layer; {_COSTS.commit_ms:g} where not given."
        ),
    ] = None

    def given(self) -> dict[str, float]:
        """What was stated, by the names of ``Costs``."""
        stated = {
            "step_ms": self.step_ms or None,
            "moe_share": self.moe_share,
            "bytes_per_expert": self.bytes_per_expert or None,
            "bandwidth": None if self.bandwidth is None else self.bandwidth * 1e9,
            "solve_ms": self.solve_ms,
            "commit_ms": self.commit_ms,
        }
        return {name: value for name, value in stated.items() if value is not None}

    def costs(self, settings: PlannerSettings, ranks: int, experts: int, choices: float) -> Costs:
        """The same for a replay, with what tokens and a stepwise split cost in steps of so many choices.

        Raises ``ReplayError`` on a value out of bounds.
        """
        split = SplitCost.of(settings, ranks, experts, choices)
        return replace(Costs(curve=settings.cost_curve, split=split), **self.given())  # type: ignore[arg-type]

    def assumptions(self, costs: Costs) -> tuple[Assumption, ...]:
        """What results with these costs rest on."""
        return assumptions(costs, self.given())


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
