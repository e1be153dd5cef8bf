"""Schema of cost curve files (JSON). It is separate from ``curve`` because only file access needs pydantic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from eplb_core.cost.curve import CostCurve


@dataclass(frozen=True)
class CurveFile:
    """Content of a cost curve file: curves for different phases."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    format: Literal["eplb-cost-curves/1"]
    curves: Annotated[tuple[CostCurve, ...], Field(min_length=1, max_length=3)]


CURVE = TypeAdapter(CostCurve)
FILE = TypeAdapter(CurveFile)
