"""Cost curves from measured tables of MoE kernels, as the package ``aiconfigurator-core`` ships them (parquet).

A row is one call on one rank: tokens of the whole expert-parallel group, the group's size, and milliseconds. Only rows
whose tokens are spread evenly over the experts (``uniform`` or ``balanced``) are read: of the others nobody knows how
many tokens each slot had.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from eplb_service.cost.curve import CostCurve, CurveError
from eplb_service.cost.fit import Measurements, fit_curve

_EVEN = ("uniform", "balanced")
_MEASURED = ("num_tokens", "moe_ep_size", "latency")
_SHOWN = 8


@dataclass(frozen=True)
class Kernel:
    """Which of a table's kernels is meant; what is ``None`` must follow from the rest.

    Parameters
    ----------
    hidden_size, inter_size
        Of an expert.
    num_experts, topk
        Of the model's layer.
    moe_dtype, kernel_source
        As the table names them, such as ``fp8_block`` and ``deepepmoe``.
    """

    hidden_size: int | None = None
    inter_size: int | None = None
    num_experts: int | None = None
    topk: int | None = None
    moe_dtype: str | None = None
    kernel_source: str | None = None

    def __str__(self) -> str:
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        return ", ".join(f"{name} {value}" for name, value in named if value is not None)


_KERNEL_COLUMNS = tuple(field.name for field in fields(Kernel))


def curve_from_table(path: Path, kernel: Kernel, phase: str = "any") -> CostCurve:
    """Fit the curve of one kernel of a measured table.

    Raises
    ------
    CurveError
        Where the table cannot be read, has no such kernel or several, or no curve fits it (``CurveFitError``).
    """
    columns = read_table(path)
    chosen_B = np.isin(columns["distribution"], _EVEN)
    if "moe_tp_size" in columns:
        chosen_B &= columns["moe_tp_size"] == 1
    for name in _KERNEL_COLUMNS:
        wanted = getattr(kernel, name)
        if wanted is not None:
            chosen_B &= columns[name] == wanted
    if not chosen_B.any():
        raise CurveError(f"{path}: has no rows of evenly spread tokens for {kernel or 'any kernel'}")
    found = sorted(
        {tuple(row) for row in zip(*(columns[name][chosen_B] for name in _KERNEL_COLUMNS), strict=True)}
    )
    if len(found) > 1:
        listed = "; ".join(str(Kernel(*row)) for row in found[:_SHOWN])
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise CurveError(f"{path}: has {len(found)} such kernels, name one: {listed}{more}")
    one = Kernel(*found[0])
    device = ", ".join(sorted({str(name) for name in columns.get("device", np.array([""]))[:1]}))
    source = f"{path.name}: {device}, {one}".replace(": ,", ":")
    return fit_curve(
        _measurements({name: columns[name][chosen_B] for name in columns}), phase=phase, source=source
    )


def read_table(path: Path) -> dict[str, Any]:
    """Columns of a measured table by name; raises ``CurveError``."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise CurveError(
            f"measured tables need pyarrow: pip install 'eplb-service[tables]' ({error})"
        ) from error
    try:
        table = parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise CurveError(
            f"{path}: is no table in parquet that can be read ({' '.join(str(error).split())[:200]})"
        ) from error
    needed = (*_MEASURED, *_KERNEL_COLUMNS, "distribution")
    lacking = [name for name in needed if name not in table.schema.names]
    if lacking:
        raise CurveError(f"{path}: is no table of MoE kernels; it lacks the columns {', '.join(lacking)}")
    if any(table[name].null_count for name in needed):
        raise CurveError(f"{path}: has rows with values missing")
    return {name: np.asarray(table[name].to_pylist()) for name in table.schema.names}


def _measurements(columns: Mapping[str, Any]) -> Measurements:
    """Evenly spread choices: each slot of a rank gets as many, or, where there are fewer than slots, some get one."""
    slots_B = columns["num_experts"] / columns["moe_ep_size"]
    choices_B = columns["num_tokens"] * columns["topk"] / columns["moe_ep_size"]
    busy_B = np.minimum(slots_B, np.maximum(choices_B, 1.0))
    return Measurements(busy_B, np.maximum(choices_B / busy_B, 1.0), columns["latency"] * 1e3)
