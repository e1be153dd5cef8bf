"""Time that one rank's experts of one layer take by the tokens in each of its slots, and JSON files of such curves.

``t = floor + batch * tokens of all ranks + sum over slots with n > 0 tokens of max(read, launch + slope * n)``: a slot
that gets any token reads its expert's weights, which takes ``read`` however few tokens there are; from a knee on,
computing takes longer than reading. A slot without tokens costs nothing. Fused kernels also sort the tokens of the
whole batch, on every rank and wherever these are computed. Where read and launch are 0 time follows the tokens: the
curve is linear.
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
"""Phases that a curve was measured for: kernels often differ between decode and prefill."""
MAX_MEDIAN_ERROR = 0.10
"""Median error, on held-out measurements, above which a curve does not fit and is refused."""
MAX_P90_ERROR = 0.25
"""The same of the 90th percentile: a curve that misses every tenth time by more has the wrong form."""

_NAMES_IN_FILES = {"slope_us": "slope_us_per_token", "batch_us": "batch_us_per_token"}
_STRICT = {"extra": "forbid"}
_IN_FILES = {
    **_STRICT,
    "alias_generator": lambda name: _NAMES_IN_FILES.get(name, name),
    "str_max_length": 1000,
}
"""Pydantic's settings for a curve in a file. Pydantic is imported only to read or write files (``curve_schema``)."""


class CurveError(ValueError):
    """A cost curve that cannot be used; the message says which, why and what to do."""


@dataclass(frozen=True)
class FitQuality:
    """Quality of a curve's fit to what was measured; errors are parts of the measured time.

    Parameters
    ----------
    samples, held_out
        Measurements in all, and those of them that the fit did not see and the errors are of.
    median_error, p90_error, worst_error
        Of ``abs(fitted / measured - 1)``.
    """

    __pydantic_config__ = _STRICT

    samples: int
    held_out: int
    median_error: float
    p90_error: float
    worst_error: float

    @classmethod
    def of(cls, samples: int, error_B: Float64) -> FitQuality:
        """Quality by the errors of the measurements held out, float64 ``[B]``."""
        median, p90, worst = np.quantile(error_B, [0.5, 0.9, 1.0]).tolist()
        return cls(samples, error_B.size, median, p90, worst)

    @property
    def fits(self) -> bool:
        """Median error at most a tenth, and nine of ten at most a quarter: the curve may be used."""
        return self.median_error <= MAX_MEDIAN_ERROR and self.p90_error <= MAX_P90_ERROR

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
        Microseconds of a layer whatever its tokens.
    read_us
        Microseconds of a slot with few tokens, in which its weights are read.
    launch_us, slope_us
        Microseconds of a slot's computing: of any number of tokens, and more for each token.
    phase
        One of ``PHASES``.
    source
        Origin of the numbers, for people.
    fit
        Quality of the fit; ``None`` where that is not known.
    batch_us
        Microseconds more for each token that any rank receives in the layer's step.

    Raises
    ------
    CurveError
        On a number that is no time, or numbers by which tokens cost nothing.
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
                raise CurveError(f"{name} of a cost curve is {value}; it must be a finite time, zero or more")
        if self.read_us == self.launch_us == self.slope_us == 0:
            raise CurveError(
                "a cost curve whose read, launch and slope are all 0 says that tokens cost nothing"
            )
        if self.phase not in PHASES:
            raise CurveError(f"phase of a cost curve is {self.phase!r}; choose one of {', '.join(PHASES)}")

    @property
    def linear(self) -> bool:
        """True where time follows a rank's tokens alone: to lower it is to balance tokens."""
        return self.read_us == self.launch_us == 0

    @property
    def knee_tokens(self) -> float:
        """Tokens up to which a slot takes no longer than for one token, because reading its weights dominates."""
        return max(0.0, self.read_us - self.launch_us) / self.slope_us if self.slope_us else math.inf

    def slot_us(self, tokens: npt.ArrayLike) -> Float64:
        """Microseconds of slots with so many tokens, float64 of the same shape."""
        n = np.asarray(tokens, dtype=np.float64)
        return np.where(n > 0, np.maximum(self.read_us, self.launch_us + self.slope_us * n), 0.0)

    def rank_us(self, tokens_S: npt.ArrayLike) -> Float64:
        """Microseconds of ranks whose slots, along the last axis, have so many tokens; without those of the batch."""
        us: Float64 = self.floor_us + self.slot_us(tokens_S).sum(axis=-1)
        return us

    def slowest_us(self, tokens_RS: Float64) -> Float64:
        """Microseconds of the slowest rank of all those along the last axis but one, those of the batch included."""
        us: Float64 = self.rank_us(tokens_RS).max(axis=-1) + self.batch_us * tokens_RS.sum(axis=(-2, -1))
        return us

    def __str__(self) -> str:
        batch = f"{digits(self.batch_us, 4)} us x tokens of the batch + " if self.batch_us else ""
        return (
            f"{digits(self.floor_us, 4)} us + {batch}for each busy slot max({digits(self.read_us, 4)}, "
            f"{digits(self.launch_us, 4)} + {digits(self.slope_us, 4)} x tokens) us"
        )


def read_curve(reference: str) -> CostCurve:
    """The curve that ``FILE`` or ``FILE:PHASE`` names.

    A file with several curves needs the phase; a curve for any phase serves each.

    Raises
    ------
    CurveError
        Where the file cannot be read, holds no curves, none or several for the phase, or one that does not fit.
    """
    from pydantic import ValidationError

    from eplb_core.cost.curve_schema import FILE

    name, _, phase = reference.rpartition(":")
    path, phase = (Path(name), phase) if name and phase in PHASES else (Path(reference), "")
    try:
        curves = FILE.validate_json(path.read_bytes()).curves
    except OSError as error:
        raise CurveError(f"{path}: the cost curve cannot be read ({error.strerror or error})") from error
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise CurveError(f"{path}: no cost curves: {where}: {problem['msg']}") from error
    found = [curve for curve in curves if curve.phase == phase or not phase]
    found = found or [curve for curve in curves if curve.phase == "any"]
    phases = ", ".join(curve.phase for curve in curves)
    if not found:
        raise CurveError(f"{path} has no curve for {phase}; it has {phases}")
    curve = found[0]
    if len(found) > 1:
        raise CurveError(f"{path} has curves for {phases}; name one of them, as in {path}:{curve.phase}")
    if curve.fit is not None and not curve.fit.fits:
        raise CurveError(f"{path}: the {curve.phase} curve does not fit what was measured ({curve.fit})")
    return curve


def write_curves(path: Path, curves: Sequence[CostCurve]) -> None:
    """Write curves of different phases; raises ``OutputError``."""
    from eplb_core.cost.curve_schema import FILE, CurveFile

    check_output(path, (".json",))
    content = CurveFile("eplb-cost-curves/1", tuple(curves))
    write_atomically(path, FILE.dump_json(content, by_alias=True, indent=2) + b"\n")


def plain_curve(curve: CostCurve) -> dict[str, Any]:
    """A curve as files and JSON have it."""
    from eplb_core.cost.curve_schema import CURVE

    plain: dict[str, Any] = CURVE.dump_python(curve, by_alias=True)
    return plain
