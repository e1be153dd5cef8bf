"""The time that one rank's experts of one layer take, as a function of the tokens in each of its slots.

``t = floor + sum over slots with n > 0 tokens of max(read, launch + slope * n)``: a slot that gets any token reads its
expert's weights, which takes ``read`` however few tokens there are; from a knee on, computing takes longer than
reading. A slot without tokens costs nothing. Where read and launch are 0 time follows the tokens: the curve is linear.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_service.placement import Float64

PHASES = ("any", "decode", "prefill")
"""What a curve was measured for: kernels often differ between decode and prefill."""


class CurveError(ValueError):
    """A cost curve that cannot be used; the message says which, why and what to do."""


@dataclass(frozen=True)
class Residual:
    """One held-out measurement beside what the curve says.

    Parameters
    ----------
    busy, tokens
        Slots with tokens, and tokens in each of them.
    measured_us, fitted_us
        Microseconds.
    """

    busy: float
    tokens: float
    measured_us: float
    fitted_us: float

    @property
    def error(self) -> float:
        """As a part of what was measured."""
        return self.fitted_us / self.measured_us - 1

    def __str__(self) -> str:
        return (
            f"{self.busy:g} slots x {self.tokens:.4g} tokens: measured {self.measured_us:.1f} us, "
            f"fitted {self.fitted_us:.1f} ({self.error:+.0%})"
        )


@dataclass(frozen=True)
class FitQuality:
    """How well a curve fits what was measured; errors are parts of the measured time.

    Parameters
    ----------
    samples, held_out
        Measurements in all, and those of them that the fit did not see and the errors are of.
    median_error, p90_error, worst_error
        Of ``abs(fitted / measured - 1)``.
    residuals
        The measurements held out.
    """

    samples: int
    held_out: int
    median_error: float
    p90_error: float
    worst_error: float
    residuals: tuple[Residual, ...] = ()

    def __str__(self) -> str:
        return (
            f"median error {self.median_error:.1%}, 90th percentile {self.p90_error:.1%}, worst {self.worst_error:.1%} "
            f"of {self.held_out} held-out measurements of {self.samples}"
        )


@dataclass(frozen=True)
class CostCurve:
    """Time of one rank's experts of one layer.

    Parameters
    ----------
    floor_us
        Microseconds of every step, whatever the tokens.
    read_us
        Microseconds that a slot with any tokens takes at least: its expert's weights are read.
    launch_us, slope_us
        Microseconds of a busy slot: ``launch_us + slope_us`` for each token.
    phase
        One of ``PHASES``.
    source
        Where it comes from, for people: device, kernel, shape, file.
    fit
        How well it fits what it was made from; ``None`` for a curve that was stated, not measured.

    Raises
    ------
    CurveError
        On a value that is no time, or a curve on which tokens cost nothing.
    """

    floor_us: float
    read_us: float
    launch_us: float
    slope_us: float
    phase: str = "any"
    source: str = "stated"
    fit: FitQuality | None = None

    def __post_init__(self) -> None:
        for name in ("floor_us", "read_us", "launch_us", "slope_us"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise CurveError(f"{name} of a cost curve is {value}; it must be a finite time, zero or more")
        if self.read_us == self.launch_us == self.slope_us == 0:
            raise CurveError(
                "a cost curve whose read, launch and slope are all 0 says that tokens cost nothing"
            )
        if self.phase not in PHASES:
            raise CurveError(f"phase of a cost curve is {self.phase!r}; choose one of {', '.join(PHASES)}")

    @property
    def linear(self) -> bool:
        """Whether time follows a rank's tokens alone: to lower it is to balance tokens."""
        return self.read_us == self.launch_us == 0

    @property
    def knee(self) -> float:
        """Tokens in a slot up to which reading its weights takes longer than computing; infinite without slope."""
        if self.read_us <= self.launch_us:
            return 0.0
        return (self.read_us - self.launch_us) / self.slope_us if self.slope_us else math.inf

    def slot_us(self, tokens: npt.ArrayLike) -> Float64:
        """Microseconds of slots with so many tokens, float64 of the same shape."""
        n = np.asarray(tokens, dtype=np.float64)
        return np.where(n > 0, np.maximum(self.read_us, self.launch_us + self.slope_us * n), 0.0)

    def rank_us(self, tokens_S: npt.ArrayLike) -> Float64:
        """Microseconds of ranks whose slots, along the last axis, have so many tokens."""
        us: Float64 = self.floor_us + self.slot_us(tokens_S).sum(axis=-1)
        return us

    def plain(self) -> dict[str, Any]:
        """The four numbers with their units, for documents."""
        return {
            "floor_us": self.floor_us,
            "read_us": self.read_us,
            "launch_us": self.launch_us,
            "slope_us_per_token": self.slope_us,
        }

    def __str__(self) -> str:
        return (
            f"{self.floor_us:.4g} us + for each busy slot max({self.read_us:.4g}, "
            f"{self.launch_us:.4g} + {self.slope_us:.4g} x tokens) us"
        )
