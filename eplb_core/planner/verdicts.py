"""Decision results for operators: the verdict on each layer, the move price and the gain from balancing.

The planner computes these values, the service stores them, and ``wire.operator`` encodes them. Both the planner and the
wire format use this module, so it does not import any other core module.
"""

from __future__ import annotations

from dataclasses import dataclass

MOVE_PRICES = ("measured", "partly measured", "stated", "assumed")
"""Sources of a move price, best first."""
TIME_PRICES = ("measured", "fitted", "stated", "assumed")
"""Sources of the time price (time cost of tokens), best first."""

HELPS = "helps"
"""Balancing saves time, as measured across switches."""
COSTS = "costs"
"""Balancing costs time, as measured across switches."""
NO_GAIN = "no gain"
"""The interval of the measured gain includes zero."""
NOT_MEASURABLE = "not measurable"
"""Step times before and after switches show no dependence on balance."""
NOT_MEASURED = "not measured"
"""Step times are missing, or too few switches have happened."""
VERDICTS = (HELPS, COSTS, NO_GAIN, NOT_MEASURABLE, NOT_MEASURED)
"""Verdicts on the gain in time."""


@dataclass(frozen=True)
class MovePrice:
    """Move price of a decision.

    Parameters
    ----------
    price
        Gain required to move every slot of a layer, as a fraction of its PAR.
    kind
        One of ``MOVE_PRICES``.
    reason
        Description of the values from which the price was computed.
    ms_per_move
        Milliseconds of step time lost per expert that a rank receives; ``None`` if unknown.
    ms_per_megabyte
        Milliseconds of step time lost per megabyte of weights; ``None`` if unknown.
    ms_per_switch
        Milliseconds for which the model is blocked while a layer is switched; ``None`` if unknown.
    """

    price: float
    kind: str
    reason: str
    ms_per_move: float | None = None
    ms_per_megabyte: float | None = None
    ms_per_switch: float | None = None


@dataclass(frozen=True)
class Worth:
    """Gain from balancing over the newest steps, compared with the initial layout.

    Parameters
    ----------
    steps
        T, number of steps that all figures refer to.
    par_left_alone
        PAR of these steps under the initial layout.
    par
        PAR of these steps as they were served.
    verdict
        One of ``VERDICTS``.
    reason
        One sentence that explains the verdict.
    price_kind
        Source of the time price: ``measured`` across switches, or the source of an estimate.
    price
        Description of that source.
    switches
        Number of switches with measured step times before and after them.
    timed_steps
        Number of steps with a known wall time, excluding those that waited for requests.
    step_ms
        Mean wall time of the timed steps, in milliseconds; ``None`` if unknown.
    gain_ms
        Time per step that balancing saves, in milliseconds; ``None`` unless it was measured across switches.
    gain_low_ms
        Lower end of the 99 % interval of ``gain_ms``.
    gain_high_ms
        Upper end of that interval.
    gain_percent
        Measured gain as a percentage of the step time under the initial layout.
    ranks_worth
        Measured gain, expressed as an equivalent number of ranks.
    tokens_per_second
        Throughput as served; ``None`` if unknown.
    tokens_per_second_won
        Additional throughput due to the measured gain; ``None`` if unknown.
    estimate_low_ms
        Lower end of the estimated gain, based on the stated or fitted time price; ``None`` if the gain was measured or
        cannot be estimated.
    estimate_high_ms
        Upper end of the estimated gain.

    Examples
    --------
    >>> worth = Worth(
    ...     steps=64, par_left_alone=1.6, par=1.2, verdict=NOT_MEASURED, reason="", price_kind="assumed", price=""
    ... )
    >>> round(worth.par_gain_percent, 1)
    25.0
    """

    steps: int
    par_left_alone: float
    par: float
    verdict: str
    reason: str
    price_kind: str
    price: str
    switches: int = 0
    timed_steps: int = 0
    step_ms: float | None = None
    gain_ms: float | None = None
    gain_low_ms: float | None = None
    gain_high_ms: float | None = None
    gain_percent: float | None = None
    ranks_worth: float | None = None
    tokens_per_second: float | None = None
    tokens_per_second_won: float | None = None
    estimate_low_ms: float | None = None
    estimate_high_ms: float | None = None

    @property
    def par_gain_percent(self) -> float:
        """PAR reduction relative to the initial layout, in percent."""
        return 100.0 * (1.0 - self.par / self.par_left_alone)


@dataclass(frozen=True)
class LayerVerdict:
    """Decision on one layer, with the reason. PARs are means over steps and are NaN for a layer without tokens.

    Parameters
    ----------
    layer
        Index of the layer.
    par_seen
        PAR under the current layout.
    par_planned
        PAR promised for the next steps. For a layer that changes, this is the PAR of the new layout on the window plus
        ``optimism``, normally no lower than ``noise_floor``. ``reason`` quotes the window's PAR without ``optimism``.
    noise_floor
        PAR that token sampling alone causes in a perfectly balanced layer, which no placement can improve on. It
        assumes independent draws, but is reduced if the measured variation between ranks is smaller.
    moves
        Number of slots that receive weights from a different rank.
    changed
        True if the plan changes the layer.
    reason
        One-line explanation for operators. The search works on episodes instead of steps, so a PAR over episodes is
        labelled as such.
    bytes
        Number of bytes of weights that the moves transfer; 0 if the host does not report the size of an expert.
    us_seen
        Time per step of the slowest rank under the current layout, in microseconds; ``None`` if there is no cost curve.
        Not sent over the wire.
    us_planned
        Time per step of the slowest rank under the new layout, in microseconds; ``None`` if there is no cost curve. Not
        sent over the wire.
    optimism
        Expected increase in PAR between the window that the change was fitted to and later steps, as measured by a
        hold-out. 0 for a layer that is kept, ``None`` if there was no hold-out. Not sent over the wire.
    """

    layer: int
    par_seen: float
    par_planned: float
    noise_floor: float
    moves: int
    changed: bool
    reason: str
    bytes: int = 0
    us_seen: float | None = None
    us_planned: float | None = None
    optimism: float | None = 0.0
