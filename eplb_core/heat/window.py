"""Window of heat for one decision, and the validation of heat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int32] | npt.NDArray[np.int64] | npt.NDArray[np.float64]
"""Whole or fractional tokens: int32, int64 or float64. The suffix of a variable's name gives the dimensions."""

_MAX_TOKENS = 2.0**53
"""Largest total number of tokens that float64 represents exactly."""


class HeatError(ValueError):
    """Heat is invalid. The message gives the value, its position and the requirement."""


@dataclass(frozen=True)
class Window:
    """Heat of consecutive steps, validated for planning.

    Parameters
    ----------
    heat_TLE
        ``[T, L, E]``, tokens per step, layer and expert, of any integer or float type. An array of int32, int64 or
        float64 is not copied, so it must not change while the window is in use.
    source_RLE
        float64 ``[R, L, E]``, source heat summed over the window; ``None`` if unknown. For each expert, only the
        ratios between the ranks matter.

    Raises
    ------
    HeatError
        If a shape is wrong, if a value is negative or not finite, or if a layer has more than 2**53 tokens.

    Examples
    --------
    >>> window = Window(np.array([[[3, 1]], [[0, 4]]], dtype=np.int32))
    >>> (window.steps, window.layers, window.experts)
    (2, 1, 2)
    >>> Window(np.array([[[3.0, -1.0]]]))
    Traceback (most recent call last):
    ...
    eplb_core.heat.window.HeatError: heat is -1.0 at step 0, layer 0, expert 1; it must be finite and non-negative
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
                f"expected source heat of shape [ranks, {heat_TLE.shape[1]}, {heat_TLE.shape[2]}], "
                f"got {list(source_RLE.shape)}"
            )
        if not _is_valid(source_RLE):
            raise HeatError(
                "source heat has negative or non-finite values; each must be finite and non-negative"
            )
        object.__setattr__(self, "source_RLE", source_RLE)

    @property
    def steps(self) -> int:
        """Number of steps, T."""
        return int(self.heat_TLE.shape[0])

    @property
    def layers(self) -> int:
        """Number of layers, L."""
        return int(self.heat_TLE.shape[1])

    @property
    def experts(self) -> int:
        """Number of logical experts, E."""
        return int(self.heat_TLE.shape[2])


def checked_heat(heat_TLE: npt.ArrayLike) -> Counts:
    """Validate heat, ``[T, L, E]``, and return it in a type and layout that kernels can read.

    The array is copied only if its type or layout requires it. Raises ``HeatError`` if the heat is invalid; the error
    message gives the first invalid value.
    """
    heat = np.asarray(heat_TLE)
    if heat.ndim != 3 or 0 in heat.shape[1:]:
        raise HeatError(f"expected heat of shape [steps, layers, experts], got {list(heat.shape)}")
    if heat.dtype.kind not in "iuf":
        raise HeatError(f"heat must be numeric, got {heat.dtype}")
    if not _is_valid(heat):
        step, layer, expert = np.argwhere(~np.isfinite(heat) | (heat < 0))[0]
        raise HeatError(
            f"heat is {heat[step, layer, expert]} at step {step}, layer {layer}, expert {expert}; "
            "it must be finite and non-negative"
        )
    # Sums are computed only if the largest value, times the number of values per layer, exceeds the limit.
    largest = float(heat.max()) if heat.size else 0.0
    could_overflow = largest * heat.shape[0] * heat.shape[2] > _MAX_TOKENS
    if could_overflow and float(heat.sum(axis=(0, 2), dtype=np.float64).max()) > _MAX_TOKENS:
        raise HeatError("heat sums to more than 2**53 tokens in one layer; check the unit of the counts")
    return _for_kernels(heat, np.int32) if heat.dtype == np.int32 else widened(heat)


def widened(heat: npt.NDArray[Any]) -> npt.NDArray[np.int64] | npt.NDArray[np.float64]:
    """Return floating-point heat as float64 and integer heat as int64."""
    return _for_kernels(heat, np.float64 if heat.dtype.kind == "f" else np.int64)


def _is_valid(heat: npt.NDArray[Any]) -> bool:
    """Return True if all values are finite and non-negative."""
    if not heat.size:
        return True
    # Minimum and maximum need no extra memory, unlike a mask of all values. Both are NaN if any value is NaN, and
    # comparisons with NaN are False.
    return bool(heat.min() >= 0 and heat.max() < np.inf)


def _for_kernels(heat: npt.NDArray[Any], kind: type[np.generic]) -> npt.NDArray[Any]:
    """Return the array itself if it has this type and is contiguous, aligned and writable, or else a copy that is.

    Read-only arrays, such as memory-mapped files, would cause kernels to be compiled a second time.
    """
    return np.require(heat, dtype=kind, requirements=["C", "A", "W"])
