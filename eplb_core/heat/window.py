"""The stretch of heat that one decision looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int32] | npt.NDArray[np.int64] | npt.NDArray[np.float64]
"""Tokens, whole or fractional: int32, int64 or float64; the variable's name carries their dimensions."""

_MAX_TOKENS = 2.0**53
"""Sums up to here are exact in float64."""


class HeatError(ValueError):
    """Heat that cannot be used; the message says what was found, where, and what was expected."""


@dataclass(frozen=True)
class Window:
    """Heat of consecutive steps, ready to be planned on.

    ``heat_TLE`` is of any integer or float type; kept as it is where it is int32, int64 or float64, so it must not
    change while the window is in use. ``source_RLE`` are tokens by source rank, before dispatch, summed over the
    window, or ``None``; only each expert's split over the ranks is used. Raises ``HeatError`` on a wrong shape, on
    negative or non-finite values, and on sums past 2**53.
    """

    heat_TLE: Counts
    source_RLE: npt.NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        heat_TLE = checked_heat(self.heat_TLE)
        object.__setattr__(self, "heat_TLE", heat_TLE)
        if self.source_RLE is None:
            return
        source_RLE = np.ascontiguousarray(self.source_RLE, dtype=np.float64)
        if source_RLE.ndim != 3 or source_RLE.shape[1:] != heat_TLE.shape[1:]:
            raise HeatError(
                f"source heat has the shape [ranks, {heat_TLE.shape[1]}, {heat_TLE.shape[2]}], "
                f"got {list(source_RLE.shape)}"
            )
        least, most = (source_RLE.min(), source_RLE.max()) if source_RLE.size else (0.0, 0.0)
        # Comparisons with NaN are false; to mark each of so many values would take as much memory again.
        if not (least >= 0 and most < np.inf):
            raise HeatError("source heat holds negative or non-finite values")
        object.__setattr__(self, "source_RLE", source_RLE)

    @property
    def steps(self) -> int:
        """T."""
        return int(self.heat_TLE.shape[0])

    @property
    def layers(self) -> int:
        """L."""
        return int(self.heat_TLE.shape[1])

    @property
    def experts(self) -> int:
        """E."""
        return int(self.heat_TLE.shape[2])


def checked_heat(heat_TLE: npt.ArrayLike) -> Counts:
    """Heat ``[T, L, E]`` as kernels read it: int32, int64 or float64, copied only where they could not read it so.

    Raises ``HeatError`` naming the first value that cannot be heat.
    """
    heat = np.asarray(heat_TLE)
    if heat.ndim != 3 or 0 in heat.shape[1:]:
        raise HeatError(f"heat has the shape [steps, layers, experts], got {list(heat.shape)}")
    if heat.dtype.kind not in "iuf":
        raise HeatError(f"heat holds numbers, got {heat.dtype}")
    least, most = (float(heat.min()), float(heat.max())) if heat.size else (0.0, 0.0)
    # Comparisons with NaN are false, so a NaN anywhere fails too.
    if not (least >= 0 and most < np.inf):
        step, layer, expert = np.argwhere(~np.isfinite(heat) | (heat < 0))[0]
        raise HeatError(
            f"heat is {heat[step, layer, expert]} at step {step}, layer {layer}, expert {expert}; "
            "it must be a finite number of tokens, zero or more"
        )
    could_overflow = most * heat.shape[0] * heat.shape[2] > _MAX_TOKENS
    if could_overflow and float(heat.sum(axis=(0, 2), dtype=np.float64).max()) > _MAX_TOKENS:
        raise HeatError("heat sums past 2**53 tokens in one layer; no real trace does")
    return _for_kernels(heat, np.int32) if heat.dtype == np.int32 else widened(heat)


def widened(heat: npt.NDArray[Any]) -> npt.NDArray[np.int64] | npt.NDArray[np.float64]:
    """Heat as float64 when it is of a float type and int64 otherwise."""
    return _for_kernels(heat, np.float64 if heat.dtype.kind == "f" else np.int64)


def _for_kernels(heat: npt.NDArray[Any], kind: type[np.generic]) -> npt.NDArray[Any]:
    """The array itself where it is of this type, in one piece, aligned and writable, else a copy that is.

    For one that is only readable, a mapped file say, each kernel would be compiled once more.
    """
    return np.require(heat, dtype=kind, requirements=["C", "A", "W"])
