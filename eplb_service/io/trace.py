"""Heat traces, independent of the file format: facts about the recording, and heat read in slices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from eplb_core.heat.window import Counts, HeatError, checked_heat
from eplb_core.placement import Float64, Int32
from eplb_service.io.containers import Array

Int64 = npt.NDArray[np.int64]
"""An int64 array; its dimensions are in the variable's name."""

_SOURCE_STEPS = 8
"""Number of steps of source heat that are summed at a time, to limit memory use."""
_STEPS_SCANNED = 64
"""Number of steps read at a time when searching for dense layers."""
PHASES = ("unknown", "prefill", "decode", "mixed")
"""Phases of recorded steps. In a mixed step, some requests prefill while others decode."""


@dataclass(frozen=True)
class TraceFacts:
    """Facts about a trace other than its heat; 0 or empty if unknown.

    Parameters
    ----------
    origin
        Format that the trace was read from, with remarks for the user, such as the number of steps left out.
    model
        Name of the model.
    ranks
        Number of ranks R of the recorded deployment.
    slots
        Slots per rank S of the recorded deployment.
    top_k
        Number of experts that each token chooses.
    bytes_per_expert
        Size of one expert's weights, in bytes.
    nodes_R
        Node of each rank.
    phases
        Names of the phases that the steps' phase numbers refer to.
    batching
        Rule by which tokens were grouped into steps, if these are not the steps that the model served.
    layer_numbers
        The model's own number of each MoE layer. Empty if the numbers are 0, 1, 2 and so on.
    split
        The host's split of tokens over replicas during the recording, one of ``settings.SPLITS``. Empty if unknown.

    Raises
    ------
    HeatError
        If a number is negative.
    """

    origin: str = "memory"
    model: str = ""
    ranks: int = 0
    slots: int = 0
    top_k: int = 0
    bytes_per_expert: int = 0
    nodes_R: tuple[int, ...] = ()
    phases: tuple[str, ...] = ("unknown",)
    batching: str = ""
    layer_numbers: tuple[int, ...] = ()
    split: str = ""

    def __post_init__(self) -> None:
        for name in ("ranks", "slots", "top_k", "bytes_per_expert"):
            if getattr(self, name) < 0:
                raise HeatError(f"{name} is {getattr(self, name)}; it cannot be negative")


def numbered(layers: Iterable[int]) -> tuple[int, ...]:
    """Return the ``layer_numbers`` for layers with these numbers: an empty tuple if they are 0, 1, 2 and so on.

    Examples
    --------
    >>> numbered([3, 4, 5])
    (3, 4, 5)
    >>> numbered([0, 1, 2])
    ()
    """
    numbers = tuple(layers)
    return () if numbers == tuple(range(len(numbers))) else numbers


class Trace(ABC):
    """Heat of T steps, L layers and E logical experts, read one slice of steps at a time."""

    facts: TraceFacts

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """Number of steps T, layers L and experts E."""

    @abstractmethod
    def heat(self, first: int, last: int) -> Counts:
        """Return the validated heat of a range of steps.

        Parameters
        ----------
        first
            First step.
        last
            End of the range (exclusive).

        Returns
        -------
        Counts
            Tokens by logical expert, ``[t, L, E]``.

        Raises
        ------
        HeatError
            If a step is not valid heat. The message names the step.
        """

    def source_rows(self, first: int, last: int) -> Array | None:  # noqa: ARG002
        """Return the source heat of each step, ``[t, R, L, E]``, or ``None`` if it was not recorded."""
        return None

    def source(self, first: int, last: int) -> Float64 | None:
        """Return the source heat summed over the steps, float64 ``[R, L, E]``, or ``None`` if not recorded."""
        total_RLE: Float64 | None = None
        for begin in range(first, last, _SOURCE_STEPS):
            rows_TRLE = self.source_rows(begin, min(last, begin + _SOURCE_STEPS))
            if rows_TRLE is None:
                return None
            total_RLE = rows_TRLE.sum(axis=0, dtype=np.float64) + (0.0 if total_RLE is None else total_RLE)
        return total_RLE

    def served_loads(self, first: int, last: int) -> Float64 | None:  # noqa: ARG002
        """Return the load of each rank during the recording, float64 ``[t, L, R]``, or ``None`` if not recorded."""
        return None

    def served_placements(self, first: int, last: int) -> list[list[Int32]]:  # noqa: ARG002
        """Return each layer's placements ``[R, S]`` that served the steps, in order; empty if unknown."""
        return []

    def step_numbers(self, first: int, last: int) -> Int64:
        """Return the model's own step numbers, int64 ``[t]``."""
        return np.arange(first, last, dtype=np.int64)

    def tokens(self, first: int, last: int) -> Int64 | None:  # noqa: ARG002
        """Return the number of tokens in each step, int64 ``[t]``, or ``None`` if not recorded."""
        return None

    def phase_numbers(self, first: int, last: int) -> Int64:
        """Return the phase of each step as an index into ``facts.phases``, int64 ``[t]``."""
        return np.zeros(last - first, dtype=np.int64)

    @property
    def steps(self) -> int:
        """Number of steps T."""
        return self.shape[0]

    @property
    def layers(self) -> int:
        """Number of layers L."""
        return self.shape[1]

    @property
    def experts(self) -> int:
        """Number of logical experts E."""
        return self.shape[2]


@dataclass(frozen=True)
class ArrayTrace(Trace):
    """A trace whose heat is one array, in memory or memory-mapped. Each slice is validated when it is read.

    Parameters
    ----------
    heat_TLE
        Tokens by logical expert, ``[T, L, E]``.
    facts
        Facts about the recording.
    tokens_T
        Tokens in each step, int64 ``[T]``; ``None`` if unknown.
    source_TRLE
        Tokens by source rank, integers ``[T, R, L, E]``; ``None`` if unknown.
    phase_T
        Index into ``facts.phases`` of each step, ``[T]``; ``None`` if unknown.
    states_layers
        True if the file names its MoE layers. In that case, layers without tokens also count as MoE layers.

    Raises
    ------
    HeatError
        If an array has the wrong shape or type, or if there are no steps.

    Examples
    --------
    >>> trace = ArrayTrace(np.array([[[3, 1]], [[2, 4]]]))
    >>> trace.shape
    (2, 1, 2)
    >>> trace.heat(1, 2)
    array([[[2, 4]]])
    """

    heat_TLE: Array
    facts: TraceFacts = field(default_factory=TraceFacts)
    tokens_T: Int64 | None = None
    source_TRLE: Array | None = None
    phase_T: Array | None = None
    states_layers: bool = False

    def __post_init__(self) -> None:
        # An empty slice is enough to validate the shape and type. The values are validated when a slice is read.
        rows = self.heat_TLE[:0] if self.heat_TLE.ndim == 3 and self.heat_TLE.size else self.heat_TLE
        checked_heat(rows)
        if self.heat_TLE.shape[0] == 0:
            raise HeatError("the trace has no steps; record at least one step")
        steps, layers, experts = self.shape
        if self.source_TRLE is not None:
            expected = (steps, self.facts.ranks, layers, experts)
            if self.source_TRLE.shape != expected or self.source_TRLE.dtype.kind not in "iu":
                raise HeatError(
                    f"source heat is {self.source_TRLE.dtype} of shape {list(self.source_TRLE.shape)}; "
                    f"expected integers of shape {list(expected)}"
                )
        if self.phase_T is not None:
            has_form = self.phase_T.shape == (steps,) and self.phase_T.dtype.kind in "iu"
            if not has_form or self.phase_T.max() >= len(self.facts.phases) or self.phase_T.min() < 0:
                raise HeatError(
                    f"the phases are not valid; expected one integer from 0 to {len(self.facts.phases) - 1} per step"
                )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of steps T, layers L and experts E."""
        return self.heat_TLE.shape

    def heat(self, first: int, last: int) -> Counts:
        """Return the validated heat of a range of steps.

        Parameters
        ----------
        first
            First step.
        last
            End of the range (exclusive).

        Returns
        -------
        Counts
            Tokens by logical expert, ``[t, L, E]``.

        Raises
        ------
        HeatError
            If a step is not valid heat. The message names the step.
        """
        return checked_slice(self.heat_TLE[first:last], first)

    def tokens(self, first: int, last: int) -> Int64 | None:
        """Return the number of tokens in each step, int64 ``[t]``, or ``None`` if unknown."""
        return None if self.tokens_T is None else self.tokens_T[first:last]

    def source_rows(self, first: int, last: int) -> Array | None:
        """Return the source heat of each step, ``[t, R, L, E]``. Raises ``HeatError`` if a count is negative."""
        if self.source_TRLE is None:
            return None
        rows_TRLE = self.source_TRLE[first:last]
        if rows_TRLE.size and rows_TRLE.min() < 0:
            raise HeatError("source heat has negative counts")
        return rows_TRLE

    def phase_numbers(self, first: int, last: int) -> Int64:
        """Return the phase of each step as an index into ``facts.phases``, int64 ``[t]``."""
        if self.phase_T is None:
            return super().phase_numbers(first, last)
        return self.phase_T[first:last].astype(np.int64)


def without_dense_layers(trace: ArrayTrace) -> ArrayTrace:
    """Return the trace without its dense layers, unless the file names its MoE layers.

    Every token passes through every MoE layer, so a layer that never gets a token is dense. The origin of the result
    states the number of dense layers, and ``layer_numbers`` the layers that remain. A trace without any tokens is
    returned unchanged.

    Examples
    --------
    >>> heat_TLE = np.array([[[0, 0], [3, 1]], [[0, 0], [2, 4]]])
    >>> trace = without_dense_layers(ArrayTrace(heat_TLE))
    >>> trace.shape, trace.facts.layer_numbers, trace.facts.origin
    ((2, 1, 2), (1,), 'memory, 1 dense layer left out')
    """
    if trace.states_layers:
        return trace
    busy_L = np.zeros(trace.layers, dtype=np.bool_)
    for first in range(0, trace.steps, _STEPS_SCANNED):
        busy_L |= (trace.heat_TLE[first : first + _STEPS_SCANNED] != 0).any(axis=(0, 2))
        if busy_L.all():
            return trace
    if not busy_L.any():
        return trace
    kept = np.flatnonzero(busy_L)
    dense = trace.layers - kept.size
    numbers = np.array(trace.facts.layer_numbers or range(trace.layers))[kept].tolist()
    origin = f"{trace.facts.origin}, {dense} dense layer{'s' if dense > 1 else ''} left out"
    source_TRLE = trace.source_TRLE
    return replace(
        trace,
        heat_TLE=trace.heat_TLE[:, kept],
        facts=replace(trace.facts, origin=origin, layer_numbers=numbered(numbers)),
        source_TRLE=None if source_TRLE is None else source_TRLE[:, :, kept],
    )


def checked_slice(heat_TLE: Array, first: int) -> Counts:
    """Return ``checked_heat`` of a slice that begins at step ``first`` of its trace.

    The error message states ``first``, because ``checked_heat`` counts steps from the start of the slice.
    """
    try:
        return checked_heat(heat_TLE)
    except HeatError as error:
        offset = f" (steps are counted from step {first})" if first else ""
        raise HeatError(f"{error}{offset}") from error
