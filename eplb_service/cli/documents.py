"""What commands print with ``--json``, or write as ``.json``: the fields of each document, with their units.

The JSON schemas that ``eplb schema`` prints and the docs publish are made of these; tests hold what commands print to
them. Ratios that there are not, such as the PAR of a layer without tokens, are ``null``.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from eplb_service.cost.curve_file import CurveDocument

_Ratio = float | None


class Document(BaseModel):
    """A JSON object with these fields, to which later versions may add others."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class AssumptionDocument(Document):
    """One number that milliseconds rest on."""

    name: str
    """Of the option."""
    value: str
    """With its unit, for people."""
    source: str
    """``given``, ``assumed``, or where it was measured."""


class SolveDocument(Document):
    """What a placement is worth; the placement itself is in the file."""

    policy: str
    steps: int
    layers: int
    experts: int
    ranks: int
    slots: int
    """Per rank and layer."""
    par_before: _Ratio
    """Mean over layers and steps, under the placement at the start."""
    par_after: _Ratio
    par_after_fixed_tables: _Ratio
    """With the engines' own fixed tables in place of the solved ones."""
    par_after_split_even: _Ratio
    """For a host that splits an expert's tokens evenly; ``null`` where the settings say that it does."""
    moe_ms_before: float | None
    """Slowest ranks of all layers in a step; ``null`` without a cost curve."""
    moe_ms_after: float | None
    moves: int
    """Slots that must receive other weights."""
    solve_ms: float
    par_before_per_layer: list[_Ratio]
    par_after_per_layer: list[_Ratio]
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
    par_seen: _Ratio
    par_planned: _Ratio
    par_realised: _Ratio
    solve_ms: float


class ReplayedPolicyDocument(Document):
    """One policy along a trace."""

    policy: str
    slots: int
    window_steps: int
    interval_steps: int
    par_realised: _Ratio
    """Mean over all steps served and layers: the figure that counts."""
    par_realised_per_layer: list[_Ratio]
    par_left_alone: _Ratio
    """Under the placement at the start, over the same steps."""
    noise_floor: _Ratio
    """What token sampling alone leaves."""
    par_hindsight: _Ratio
    regret: _Ratio
    """``par_realised`` less ``par_hindsight``."""
    par_planned: _Ratio
    moves: int
    bytes_moved: int
    moe_ms_per_step: float | None
    moe_ms_per_step_left_alone: float | None
    saved_ms_per_step: float
    stall_ms_per_step: float
    solve_ms_mean: float
    solve_ms_max: float
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


class AdvisedOptionDocument(Document):
    """One setting that was tried."""

    redundant: int
    """Slots per layer beyond one per expert."""
    slots: int
    window_steps: int
    interval_steps: int
    move_price: float | None
    par: _Ratio
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
    par_left_alone: _Ratio
    par: _Ratio
    noise_floor: _Ratio
    moe_ms_left_alone: float | None
    advised: AdvisedOptionDocument
    by_redundancy: list[AdvisedOptionDocument]
    by_schedule: list[AdvisedOptionDocument]
    by_move_price: list[AdvisedOptionDocument]
    gain_per_layer: list[_Ratio]
    assumptions: list[AssumptionDocument]


class ComparedPolicyDocument(Document):
    """One balancer along the trace; lists have an entry for each decision."""

    source: str
    """Package and version."""
    par_realised: _Ratio
    """Mean over the windows served, without the first where there are others."""
    par_realised_per_window: list[_Ratio]
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
    noise_floor: _Ratio
    policies: dict[str, ComparedPolicyDocument]
    failures: list[FailureDocument]


class TraceInfoDocument(Document):
    """What a trace is."""

    origin: str
    """Format, and what is to be known of it, for people."""
    steps: int
    layers: int
    experts: int
    first_step: int
    """The model's own number."""
    last_step: int
    model: str
    ranks: int | None
    slots: int | None
    tokens_per_step: float | None
    top_k: int | None
    bytes_per_expert: int | None
    nodes: list[int]
    """Node of each rank."""
    layer_numbers: list[int]
    """The model's own number of each layer; empty where they count from 0."""
    phases: list[str]
    batching: str
    """The rule by which tokens became steps; empty where the steps are those that were served."""
    counted_by: list[str]


class TraceStatisticsDocument(TraceInfoDocument):
    """What a trace is, and how its heat is distributed and moves; lists have an entry for each layer."""

    window_steps: int
    choices_per_step: list[float]
    hottest_over_mean: list[_Ratio]
    share_of_hottest_tenth: list[_Ratio]
    drift: list[_Ratio] | None
    """Total variation between windows; ``null`` where there are no two."""
    drift_by_sampling: list[_Ratio] | None
    par_in_order: list[_Ratio] = Field(default=[])
    """With ``--ranks``: PAR of experts in order."""
    noise_floor: list[_Ratio] = Field(default=[])
    """With ``--ranks``."""
    par_served: list[_Ratio] = Field(default=[])
    """As the ranks measured it, where that was recorded."""


class CopyDocument(Document):
    """A trace that was written."""

    out: str
    steps: int
    layers: int
    experts: int


class QuantilesDocument(Document):
    """Milliseconds of a step."""

    p50: float
    p99: float


class StepTimesDocument(Document):
    """With the agent and without it, in the same steps."""

    with_agent: QuantilesDocument
    without_agent: QuantilesDocument


class DemoDocument(Document):
    """What a demo came to; PARs are of the steps after the first switch."""

    par_static: _Ratio
    """Left alone."""
    par_balanced: _Ratio
    par_hindsight: _Ratio
    par_noise_floor: _Ratio
    par_static_all_steps: _Ratio
    par_balanced_all_steps: _Ratio
    scored_from_step: int
    layers_switched: int
    experts_moved: int
    bytes_moved: int
    max_abs_output_diff: float
    float32_rounding_bound: float
    step_ms: StepTimesDocument
    steps: int
    ranks: int
    layers: int
    generated_bytes: int = 0
    """Of the small model; without it there is none."""
    generated_bytes_identical: bool = True


class PlacementDocument(Document):
    """The placement in force."""

    epoch: int
    phy2log: list[list[list[int]]]
    """Expert in each slot, ``[layers, ranks, slots]``."""
    log2phy: list[list[list[int | list[int]]]]
    """Physical id that a source rank's tokens of an expert go to, ``[ranks, layers, experts]``; several in turn."""


class PausedDocument(Document):
    """Whether planning is paused."""

    deployment: str
    paused: bool


class LeadDocument(Document):
    """Whom the ranks follow."""

    deployment: str
    leader_term: int
    raised: bool


class ForgottenDocument(Document):
    """A deployment that was removed."""

    deployment: str
    forgotten: bool
