"""Cost curves: time that a rank spends on its experts in one layer, as a function of the tokens in each slot.

``t = floor + batch * tokens of all ranks + sum over slots with n > 0 tokens of max(read, launch + slope * n)``

A slot with at least one token must read its expert's weights, which takes ``read`` even for a single token. Above the
*knee*, computing takes longer than reading. A slot without tokens costs nothing. ``batch`` accounts for fused kernels:
every rank sorts the tokens of the entire batch, including tokens that other ranks process. If ``read`` and ``launch``
are 0, time is proportional to tokens and the curve is *linear*.

Curves are stored in JSON files, one curve per phase.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_core.atomic_write import check_output, write_atomically
from eplb_core.figures import digits
from eplb_core.placement import Float64

PHASES = ("any", "decode", "prefill")
"""Curve phases. Decode and prefill can have separate curves because they often use different kernels."""
MAX_MEDIAN_ERROR = 0.10
"""Largest accepted median error on held-out measurements."""
MAX_P90_ERROR = 0.25
"""Largest accepted 90th percentile of the error. If it is exceeded, the curve has the wrong shape."""

_NAMES_IN_FILES = {"slope_us": "slope_us_per_token", "batch_us": "batch_us_per_token"}
_STRICT = {"extra": "forbid"}
_IN_FILES = {
    **_STRICT,
    "alias_generator": lambda name: _NAMES_IN_FILES.get(name, name),
    "str_max_length": 1000,
}
"""Pydantic settings for curves in files. Pydantic is imported only to read or write files (``curve_schema``)."""


class CurveError(ValueError):
    """A cost curve is invalid. The message names the curve, the problem and the remedy."""


@dataclass(frozen=True)
class FitQuality:
    """Accuracy of a curve on held-out measurements.

    Errors are relative: ``abs(fitted / measured - 1)``.

    Parameters
    ----------
    samples
        Number of measurements.
    held_out
        Number of measurements that were held out from the fit to compute the errors.
    median_error
        Median of the errors.
    p90_error
        90th percentile of the errors.
    worst_error
        Largest error.
    """

    __pydantic_config__ = _STRICT

    samples: int
    held_out: int
    median_error: float
    p90_error: float
    worst_error: float

    @classmethod
    def of(cls, samples: int, error_B: Float64) -> FitQuality:
        """Summarise the errors of the held-out measurements, float64 ``[B]``."""
        median, p90, worst = np.quantile(error_B, [0.5, 0.9, 1.0]).tolist()
        return cls(samples, error_B.size, median, p90, worst)

    @property
    def fits(self) -> bool:
        """True if the curve is accurate enough to use: median error at most 10 %, 90th percentile at most 25 %."""
        return self.median_error <= MAX_MEDIAN_ERROR and self.p90_error <= MAX_P90_ERROR

    def __str__(self) -> str:
        return (
            f"median error {self.median_error:.1%}, 90th percentile {self.p90_error:.1%}, worst {self.worst_error:.1%} "
            f"on {self.held_out} held-out measurements out of {self.samples}"
        )


@dataclass(frozen=True)
class CostCurve:
    """Time that a rank spends on its experts in one layer.

    Parameters
    ----------
    floor_us
        Fixed time per layer, in microseconds.
    read_us
        Time to read a slot's weights, in microseconds.
    launch_us
        Fixed part of a slot's compute time, in microseconds.
    slope_us
        Compute time per token in a slot, in microseconds.
    phase
        One of ``PHASES``.
    source
        Origin of the numbers, as shown to operators.
    fit
        Accuracy of the fit; ``None`` if unknown.
    batch_us
        Time per token of the entire batch, in microseconds.

    Raises
    ------
    CurveError
        If a time is negative or not finite, if tokens would cost nothing, or if the phase is unknown.

    Examples
    --------
    A slot with one token costs as much as a slot with 100 tokens, because reading the weights takes 10 us:

    >>> curve = CostCurve(floor_us=20, read_us=10, launch_us=5, slope_us=0.05)
    >>> curve.knee_tokens
    100.0
    >>> curve.slot_us([0, 1, 100, 300])
    array([ 0., 10., 10., 20.])
    >>> curve.rank_us([0, 1, 100, 300]).item()
    60.0
    """

    __pydantic_config__ = _IN_FILES

    floor_us: float
    read_us: float
    launch_us: float
    slope_us: float
    phase: str = "any"
    source: str = "stated"
    fit: FitQuality | None = None
    batch_us: float = 0.0

    def __post_init__(self) -> None:
        for name in ("floor_us", "read_us", "launch_us", "slope_us", "batch_us"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise CurveError(f"{name} of the cost curve is {value}; expected a finite number, 0 or more")
        if self.read_us == self.launch_us == self.slope_us == 0:
            raise CurveError(
                "read_us, launch_us and slope_us of the cost curve are all 0, so tokens cost nothing; at least one "
                "must be above 0"
            )
        if self.phase not in PHASES:
            raise CurveError(f"unknown cost curve phase {self.phase!r}; choose one of {', '.join(PHASES)}")

    @property
    def linear(self) -> bool:
        """True if time depends only on a rank's token count, so that balancing the tokens minimises it."""
        return self.read_us == self.launch_us == 0

    @property
    def knee_tokens(self) -> float:
        """Maximum number of tokens that a slot can process in the time it takes to read its weights."""
        return max(0.0, self.read_us - self.launch_us) / self.slope_us if self.slope_us else math.inf

    def slot_us(self, tokens: npt.ArrayLike) -> Float64:
        """Return the time of each slot in microseconds, float64 with the shape of ``tokens``."""
        n = np.asarray(tokens, dtype=np.float64)
        return np.where(n > 0, np.maximum(self.read_us, self.launch_us + self.slope_us * n), 0.0)

    def rank_us(self, tokens_S: npt.ArrayLike) -> Float64:
        """Return each rank's time, in microseconds, without the batch term.

        The slots are the last axis of ``tokens_S``.
        """
        us: Float64 = self.floor_us + self.slot_us(tokens_S).sum(axis=-1)
        return us

    def slowest_us(self, tokens_RS: Float64) -> Float64:
        """Return the slowest rank's time, in microseconds, with the batch term, for tokens ``[..., R, S]``."""
        us: Float64 = self.rank_us(tokens_RS).max(axis=-1) + self.batch_us * tokens_RS.sum(axis=(-2, -1))
        return us

    def __str__(self) -> str:
        batch = f"{digits(self.batch_us, 4)} us x tokens in the batch + " if self.batch_us else ""
        return (
            f"{digits(self.floor_us, 4)} us + {batch}for each busy slot, max({digits(self.read_us, 4)}, "
            f"{digits(self.launch_us, 4)} + {digits(self.slope_us, 4)} x tokens) us"
        )


def read_curve(reference: str) -> CostCurve:
    """Read a curve from a file.

    Parameters
    ----------
    reference
        ``FILE`` or ``FILE:PHASE``. The phase is required if the file has several curves. A curve for the phase
        ``any`` matches every phase.

    Raises
    ------
    CurveError
        If the file cannot be read, is not a curve file, or does not have exactly one curve for the phase. Also raised
        if the curve's fit is not accurate enough.
    """
    name, _, suffix = reference.rpartition(":")
    path = Path(reference)
    phase = ""
    if name and suffix in PHASES:
        path = Path(name)
        phase = suffix
    curves = _read_file(path)
    matches = [curve for curve in curves if curve.phase == phase or not phase]
    matches = matches or [curve for curve in curves if curve.phase == "any"]
    phases = ", ".join(curve.phase for curve in curves)
    if not matches:
        raise CurveError(f"{path} has no {phase} curve, only {phases}")
    curve = matches[0]
    if len(matches) > 1:
        raise CurveError(f"{path} has curves for {phases}; select one, as in {path}:{curve.phase}")
    if curve.fit is not None and not curve.fit.fits:
        raise CurveError(
            f"{path}: the {curve.phase} curve does not fit its measurements ({curve.fit}); measure it again"
        )
    return curve


def _read_file(path: Path) -> tuple[CostCurve, ...]:
    """Read all curves in a file."""
    from pydantic import ValidationError

    from eplb_core.cost.curve_schema import FILE

    try:
        return FILE.validate_json(path.read_bytes()).curves
    except OSError as error:
        raise CurveError(f"{path}: the cost curve cannot be read ({error.strerror or error})") from error
    except ValidationError as error:
        problem = error.errors()[0]
        location = ".".join(map(str, problem["loc"]))
        raise CurveError(f"{path} is not a cost curve file: {location}: {problem['msg']}") from error


def write_curves(path: Path, curves: Sequence[CostCurve]) -> None:
    """Write curves for different phases to a file. Raises ``OutputError`` if ``path`` cannot be written."""
    from eplb_core.cost.curve_schema import FILE, CurveFile

    check_output(path, (".json",))
    content = CurveFile("eplb-cost-curves/1", tuple(curves))
    write_atomically(path, FILE.dump_json(content, by_alias=True, indent=2) + b"\n")


def curve_document(curve: CostCurve) -> dict[str, Any]:
    """Return a curve as a dictionary with the keys of the file format."""
    from eplb_core.cost.curve_schema import CURVE

    document: dict[str, Any] = CURVE.dump_python(curve, by_alias=True)
    return document
