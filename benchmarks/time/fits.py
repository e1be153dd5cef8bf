"""Curves fitted to measured tables, with their errors on held-out rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from eplb_service.cost.curve import CurveError
from eplb_service.cost.measured_table import Kernel, curve_from_table


@dataclass(frozen=True)
class Fitted:
    """One table's curve, or why it has none."""

    table: str
    curve: str
    median_error: float | None
    p90_error: float | None


def fits(tables: Sequence[Path]) -> Iterator[Fitted]:
    """The curve of each table's only kernel."""
    for path in tables:
        name = "/".join(path.parts[-5:-1])
        try:
            curve = curve_from_table(path, Kernel())
        except CurveError as error:
            yield Fitted(name, f"refused: {error}", None, None)
            continue
        assert curve.fit is not None
        yield Fitted(name, str(curve), curve.fit.median_error, curve.fit.p90_error)
