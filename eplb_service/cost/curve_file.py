"""Cost curves as a JSON file: the numbers with their units, where they come from, and how well they fit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eplb_service.atomic_write import check_output, write_atomically
from eplb_service.cost.curve import CostCurve, CurveError, FitQuality, Residual
from eplb_service.cost.fit import fits

FORMAT = "eplb-cost-curves/1"
_LARGEST_BYTES = 1 << 20

_Us = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Part = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Residual(BaseModel):
    model_config = ConfigDict(extra="forbid")

    busy: _Us
    tokens: _Us
    measured_us: float = Field(gt=0, allow_inf_nan=False)
    fitted_us: _Us


class _Fit(BaseModel):
    model_config = ConfigDict(extra="forbid")

    samples: int = Field(ge=1)
    held_out: int = Field(ge=1)
    median_error: _Part
    p90_error: _Part
    worst_error: _Part
    residuals: list[_Residual] = Field([], max_length=4096)


class CurveDocument(BaseModel):
    """One curve as files and ``--json`` have it; times in microseconds."""

    model_config = ConfigDict(extra="forbid")

    phase: Literal["any", "decode", "prefill"] = "any"
    floor_us: _Us
    read_us: _Us
    launch_us: _Us
    slope_us_per_token: _Us
    source: str = Field("stated", max_length=1000)
    fit: _Fit | None = None


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: Literal["eplb-cost-curves/1"]
    curves: list[CurveDocument] = Field(min_length=1, max_length=3)


def read_curve(reference: str) -> CostCurve:
    """The curve that ``FILE`` or ``FILE:PHASE`` names.

    A file with several curves needs the phase; a curve for any phase serves each.

    Raises
    ------
    CurveError
        Where the file cannot be read, holds no curves, none or several for the phase, or one that does not fit.
    """
    path, phase = _parted(reference)
    curves = read_curves(path)
    if phase is not None:
        found = [curve for curve in curves if curve.phase == phase] or [
            curve for curve in curves if curve.phase == "any"
        ]
    else:
        found = list(curves)
    if len(found) == 1:
        return found[0]
    phases = ", ".join(curve.phase for curve in curves)
    if not found:
        raise CurveError(f"{path} has no curve for {phase}; it has {phases}")
    raise CurveError(f"{path} has curves for {phases}; name one of them, as in {path}:{found[0].phase}")


def read_curves(path: Path) -> tuple[CostCurve, ...]:
    """All curves of a file; raises ``CurveError``."""
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_BYTES + 1)
    except OSError as error:
        raise CurveError(f"{path}: the cost curve cannot be read ({error.strerror or error})") from error
    if len(content) > _LARGEST_BYTES:
        raise CurveError(f"{path}: is larger than {_LARGEST_BYTES} bytes, and so no file of cost curves")
    try:
        parsed = _File.model_validate_json(content)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "the file"
        raise CurveError(f"{path}: no cost curves: {where}: {problem['msg']}") from error
    phases = [curve.phase for curve in parsed.curves]
    if len(set(phases)) < len(phases):
        raise CurveError(f"{path}: has two curves for the same phase ({', '.join(phases)})")
    return tuple(_curve_of(path, curve) for curve in parsed.curves)


def write_curves(path: Path, curves: Sequence[CostCurve]) -> None:
    """Write curves of different phases; raises ``OutputError``."""
    check_output(path, (".json",))
    document = {"format": FORMAT, "curves": [plain_curve(curve) for curve in curves]}
    write_atomically(path, (json.dumps(document, indent=2) + "\n").encode())


def plain_curve(curve: CostCurve) -> dict[str, Any]:
    """A curve as the file has it."""
    fit = None if curve.fit is None else asdict(curve.fit)
    return {"phase": curve.phase, **curve.plain(), "source": curve.source, "fit": fit}


def _curve_of(path: Path, read: CurveDocument) -> CostCurve:
    fit = None if read.fit is None else _quality_of(read.fit)
    if fit is not None and not fits(fit):
        raise CurveError(
            f"{path}: the {read.phase} curve does not fit what was measured ({fit}); it is not used"
        )
    try:
        return CostCurve(
            read.floor_us, read.read_us, read.launch_us, read.slope_us_per_token, read.phase, read.source, fit
        )
    except CurveError as error:
        raise CurveError(f"{path}: {error}") from error


def _quality_of(read: _Fit) -> FitQuality:
    residuals = tuple(Residual(**row.model_dump()) for row in read.residuals)
    return FitQuality(**{**read.model_dump(), "residuals": residuals})


def _parted(reference: str) -> tuple[Path, str | None]:
    path, colon, phase = reference.rpartition(":")
    if colon and phase in ("decode", "prefill", "any"):
        return Path(path), phase
    return Path(reference), None
