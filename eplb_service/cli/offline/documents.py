"""What the commands on recorded heat print with ``--json``."""

from __future__ import annotations

from typing import Literal

from eplb_service.cli.output.document import Document, Ratio
from eplb_service.cost.curve_file import CurveDocument


class AssumptionDocument(Document):
    """One number that milliseconds rest on."""

    name: str
    """Of the option."""
    value: str
    """With its unit, for people."""
    source: str
    """``given``, ``assumed``, or where it was measured."""


class SplitCostDocument(Document):
    """What a stepwise split itself takes in one layer of a step."""

    us: float
    bytes: int
    """Counts that each rank receives from all others."""
    stated: bool
    """Whether ``split_overhead_us`` was set; otherwise it is assumed."""
    rounds: int
    """Those that the layer takes in a step as large, of which the assumed microseconds grow."""


class SolveDocument(Document):
    """What a placement is worth; the placement itself is in the file."""

    policy: str
    steps: int
    layers: int
    experts: int
    ranks: int
    slots: int
    """Per rank and layer."""
    par_before: Ratio
    """Mean over layers and steps, under the placement at the start."""
    par_after: Ratio
    par_after_fixed_tables: Ratio
    """With the engines' own fixed tables in place of the solved ones."""
    par_after_split_even: Ratio
    """For a host that splits an expert's tokens evenly; ``null`` where the settings say that it does."""
    moe_ms_before: float | None
    """Slowest ranks of all layers in a step; ``null`` without a cost curve."""
    moe_ms_after: float | None
    moe_ms_by_tables: float | None
    """Of a placement made for tables, which needs no split; ``null`` but with a cost curve and ``split`` step."""
    split_ms: float | None
    """What the stepwise split itself takes of a step; not in the figures above."""
    split: SplitCostDocument | None
    replicas_woken_per_rank: float | None
    """Slots of a rank and layer that the stepwise split has read another replica of an expert, mean over steps."""
    moves: int
    """Slots that must receive other weights."""
    solve_ms: float
    par_before_per_layer: list[Ratio]
    par_after_per_layer: list[Ratio]
    hottest_before_per_layer: list[float]
    """Tokens of the hottest rank in a step, mean over steps."""
    hottest_after_per_layer: list[float]
    hottest_after_split_even_per_layer: list[float] | None
    moves_per_layer: list[int]
    verdicts: list[str]
    """Why each layer changed or stayed."""


class ReplayedDecisionDocument(Document):
    """One decision of a replay, and the steps served until the next."""

    step: int
    """First step after the window that it saw."""
    steps: int
    steps_before_it_took_effect: int
    layers_changed: int
    moves: int
    par_seen: Ratio
    par_planned: Ratio
    par_realised: Ratio
    solve_ms: float


class ReplayedFiguresDocument(Document):
    """One policy along a trace, without its decisions."""

    policy: str
    slots: int
    window_steps: int
    interval_steps: int
    par_realised: Ratio
    """Mean over all steps served and layers: the figure that counts."""
    par_left_alone: Ratio
    """Under the placement at the start, over the same steps."""
    noise_floor: Ratio
    """What token sampling alone leaves."""
    par_hindsight: Ratio
    regret: Ratio
    """``par_realised`` less ``par_hindsight``."""
    par_planned: Ratio
    moves: int
    bytes_moved: int
    moe_ms_per_step: float | None
    moe_ms_per_step_left_alone: float | None
    saved_ms_per_step: float
    stall_ms_per_step: float
    solve_ms_mean: float
    solve_ms_max: float


class ReplayedPolicyDocument(ReplayedFiguresDocument):
    """One policy along a trace."""

    par_realised_per_layer: list[Ratio]
    decisions: list[ReplayedDecisionDocument]


class CostsDocument(Document):
    """What a step, a move and a switch cost, as stated."""

    step_ms: float
    moe_share: float
    bytes_per_expert: int
    bandwidth: float
    """Bytes per second."""
    solve_ms: float
    commit_ms: float
    curve: CurveDocument | None
    split: SplitCostDocument | None


class ReplayDocument(Document):
    """Everything that a replay found."""

    layers: int
    experts: int
    ranks: int
    slots: int
    """Of the first setup, as are window and interval; those of each policy are its own."""
    window_steps: int
    interval_steps: int
    first_step_scored: int
    steps_scored: int
    interrupted: bool
    costs: CostsDocument
    assumptions: list[AssumptionDocument]
    policies: dict[str, ReplayedPolicyDocument]
    """By name; in a sweep the name says the setup."""


class SweepRowDocument(ReplayedFiguresDocument):
    """One policy along one trace, by one choice of settings."""

    trace: str
    """Path, as it was given."""
    settings: dict[str, str | float | bool]
    """Those of ``--set`` that it was run with."""
    layers: int
    experts: int
    ranks: int
    first_step_scored: int
    steps_scored: int
    decisions_made: int


class SweepDocument(Document):
    """Everything that a sweep found."""

    interrupted: bool
    """Whether it was stopped before all traces and settings were done."""
    assumptions: list[AssumptionDocument]
    rows: list[SweepRowDocument]
    """In the order of traces, settings, slots, windows, intervals and policies."""


class AdvisedOptionDocument(Document):
    """One setting that was tried."""

    redundant: int
    """Slots per layer beyond one per expert."""
    slots: int
    window_steps: int
    interval_steps: int
    move_price: float | Literal["auto"]
    par: Ratio
    moves_per_decision: float
    moved_share: float
    net_ms: float
    """Saved in a step, less what switching costs of it."""
    moe_ms: float | None
    bytes_per_rank: int
    """Weights of a rank's experts of all layers; 0 where an expert's are not known."""


class AdviceDocument(Document):
    """Whether balancing pays, and with which settings."""

    pays: bool
    reasons: list[str]
    par_left_alone: Ratio
    par: Ratio
    noise_floor: Ratio
    moe_ms_left_alone: float | None
    advised: AdvisedOptionDocument
    by_redundancy: list[AdvisedOptionDocument]
    by_schedule: list[AdvisedOptionDocument]
    by_move_price: list[AdvisedOptionDocument]
    gain_per_layer: list[Ratio]
    assumptions: list[AssumptionDocument]


class ComparedPolicyDocument(Document):
    """One balancer along the trace; lists have an entry for each decision."""

    source: str
    """Package and version."""
    par_realised: Ratio
    """Mean over the windows served, without the first where there are others."""
    par_realised_per_window: list[Ratio]
    moves_per_decision: float
    moves: list[int]
    layers_changed: list[int]
    solve_ms_mean: float
    cpu_ms_mean: float


class FailureDocument(Document):
    """A balancer that took no part."""

    policy: str
    why: str


class BenchDocument(Document):
    """Our policies beside the engines' own, on one trace."""

    layers: int
    experts: int
    ranks: int
    slots: int
    window_steps: int
    decisions: int
    noise_floor: Ratio
    policies: dict[str, ComparedPolicyDocument]
    failures: list[FailureDocument]
