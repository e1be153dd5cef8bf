"""What ``eplb trace`` prints with ``--json``."""

from __future__ import annotations

from pydantic import Field

from eplb_service.cli.output.document import Document, Ratio


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
    hottest_over_mean: list[Ratio]
    share_of_hottest_tenth: list[Ratio]
    drift: list[Ratio] | None
    """Total variation between windows; ``null`` where there are no two."""
    drift_by_sampling: list[Ratio] | None
    par_in_order: list[Ratio] = Field(default=[])
    """With ``--ranks``: PAR of experts in order."""
    noise_floor: list[Ratio] = Field(default=[])
    """With ``--ranks``."""
    par_served: list[Ratio] = Field(default=[])
    """As the ranks measured it, where that was recorded."""


class CopyDocument(Document):
    """A trace that was written."""

    out: str
    steps: int
    layers: int
    experts: int


class RecordedDocument(Document):
    """A trace that was recorded of a running service."""

    out: str
    steps: int
    """Recorded this time; those that were there before are not counted."""
    lost_steps: int
    """Of which some rank's heat never came, or not in time."""
    dropped_reports: int
    """That the service dropped, as the link was too slow."""
