"""Time that one rank's experts of one layer take by the tokens in each of its slots, and JSON files of such curves.

``t = floor + sum over slots with n > 0 tokens of max(read, launch + slope * n)``: a slot that gets any token reads its
expert's weights, which takes ``read`` however few tokens there are; from a knee on, computing takes longer than
reading. A slot without tokens costs nothing. Where read and launch are 0 time follows the tokens: the curve is linear.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from eplb_service.atomic_write import check_output, write_atomically
from eplb_service.placement import Float64

PHASES = ("any", "decode", "prefill")
"""Phases that a curve was measured for: kernels often differ between decode and prefill."""
MOST_MEDIAN_ERROR = 0.10
"""Median error, on held-out measurements, above which a curve does not fit and is refused."""
MOST_P90_ERROR = 0.25
"""The same of the 90th percentile: a curve that misses every tenth time by more has the wrong form."""
_FORMAT = "eplb-cost-curves/1"
_LARGEST_BYTES = 1 << 20
_MOST_RESIDUALS = 4096

_Part = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Us = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]


class CurveError(ValueError):
    """A cost curve that cannot be used; the message says which, why and what to do."""


@dataclass(frozen=True)
class Residual:
    """One held-out measurement beside what the curve says: busy slots, tokens in each of them, and microseconds."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    busy: _Part
    tokens: _Part
    measured_us: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    fitted_us: _Us

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
    """Quality of a curve's fit to what was measured; errors are parts of the measured time.

    Parameters
    ----------
    samples, held_out
        Measurements in all, and those of them that the fit did not see and the errors are of.
    median_error, p90_error, worst_error
        Of ``abs(fitted / measured - 1)``.
    residuals
        The measurements held out.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    samples: _Count
    held_out: _Count
    median_error: _Part
    p90_error: _Part
    worst_error: _Part
    residuals: Annotated[tuple[Residual, ...], Field(max_length=_MOST_RESIDUALS)] = ()

    @classmethod
    def of(cls, samples: int, error_B: Float64, residuals: tuple[Residual, ...] = ()) -> FitQuality:
        """Quality by the errors of the measurements held out, float64 ``[B]``."""
        median, p90 = float(np.median(error_B)), float(np.quantile(error_B, 0.9))
        return cls(samples, int(error_B.size), median, p90, float(error_B.max()), residuals)

    @property
    def fits(self) -> bool:
        """Median error at most a tenth, and nine of ten at most a quarter: the curve may be used."""
        return self.median_error <= MOST_MEDIAN_ERROR and self.p90_error <= MOST_P90_ERROR

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

    Raises
    ------
    CurveError
        On a number that is no time, or numbers by which tokens cost nothing.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    floor_us: _Us
    read_us: _Us
    launch_us: _Us
    slope_us: Annotated[_Us, Field(alias="slope_us_per_token")]
    phase: str = "any"
    source: Annotated[str, Field(max_length=1000)] = "stated"
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
        """True where time follows a rank's tokens alone: to lower it is to balance tokens."""
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

    def __str__(self) -> str:
        return (
            f"{self.floor_us:.4g} us + for each busy slot max({self.read_us:.4g}, "
            f"{self.launch_us:.4g} + {self.slope_us:.4g} x tokens) us"
        )


_CURVES = TypeAdapter(Annotated[list[CostCurve], Field(min_length=1, max_length=3)])


def read_curve(reference: str) -> CostCurve:
    """The curve that ``FILE`` or ``FILE:PHASE`` names.

    A file with several curves needs the phase; a curve for any phase serves each.

    Raises
    ------
    CurveError
        Where the file cannot be read, holds no curves, none or several for the phase, or one that does not fit.
    """
    name, _, phase = reference.rpartition(":")
    path, phase = (Path(name), phase) if name and phase in PHASES else (Path(reference), "")
    curves = _read_curves(path)
    found = [curve for curve in curves if curve.phase == phase or not phase]
    found = found or [curve for curve in curves if curve.phase == "any"]
    if len(found) == 1:
        return found[0]
    phases = ", ".join(curve.phase for curve in curves)
    if not found:
        raise CurveError(f"{path} has no curve for {phase}; it has {phases}")
    raise CurveError(f"{path} has curves for {phases}; name one of them, as in {path}:{found[0].phase}")


def _read_curves(path: Path) -> tuple[CostCurve, ...]:
    """All curves of a file; raises ``CurveError``."""
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_BYTES + 1)
    except OSError as error:
        raise CurveError(f"{path}: the cost curve cannot be read ({error.strerror or error})") from error
    if len(content) > _LARGEST_BYTES:
        raise CurveError(f"{path}: is larger than {_LARGEST_BYTES} bytes, and so no file of cost curves")
    try:
        document = json.loads(content)
        if not isinstance(document, dict) or document.keys() != {"format", "curves"}:
            raise ValueError("it has other fields than format and curves")
        if document["format"] != _FORMAT:
            raise ValueError(f"its format is {document['format']!r}, not {_FORMAT}")
        curves = tuple(_CURVES.validate_python(document["curves"]))
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise CurveError(f"{path}: no cost curves: {where}: {problem['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise CurveError(f"{path}: no cost curves: {error}") from error
    phases = [curve.phase for curve in curves]
    if len(set(phases)) < len(phases):
        raise CurveError(f"{path}: has two curves for the same phase ({', '.join(phases)})")
    for curve in curves:
        if curve.fit is not None and not curve.fit.fits:
            raise CurveError(
                f"{path}: the {curve.phase} curve does not fit what was measured ({curve.fit}); it is not used"
            )
    return curves


def write_curves(path: Path, curves: Sequence[CostCurve]) -> None:
    """Write curves of different phases; raises ``OutputError``."""
    check_output(path, (".json",))
    document = {"format": _FORMAT, "curves": [plain_curve(curve) for curve in curves]}
    write_atomically(path, (json.dumps(document, indent=2) + "\n").encode())


def plain_curve(curve: CostCurve) -> dict[str, Any]:
    """A curve as files and JSON have it."""
    plain = asdict(curve)
    slope = plain.pop("slope_us")
    names = ("phase", "floor_us", "read_us", "launch_us")
    return {**{name: plain.pop(name) for name in names}, "slope_us_per_token": slope, **plain}
