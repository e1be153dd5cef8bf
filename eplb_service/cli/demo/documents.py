"""What ``eplb demo`` writes as ``.json``."""

from __future__ import annotations

from eplb_service.cli.output.document import Document, Ratio


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

    par_static: Ratio
    """Left alone."""
    par_balanced: Ratio
    par_hindsight: Ratio
    par_noise_floor: Ratio
    par_static_all_steps: Ratio
    par_balanced_all_steps: Ratio
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
