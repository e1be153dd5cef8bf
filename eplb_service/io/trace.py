"""A heat trace, whatever file it came from: what it says of itself, and its heat in slices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from eplb_core.heat.window import Counts, HeatError, checked_heat
from eplb_core.placement import Float64
from eplb_service.io.containers import Array

Int64 = npt.NDArray[np.int64]
"""An int64 array; its dimensions are in the variable's name."""

_SOURCE_STEPS = 8
_STEPS_SCANNED = 64
PHASES = ("unknown", "prefill", "decode", "mixed")
"""Names of the phases that recorded steps have; in mixed steps, some requests prefilled and others decoded."""


@dataclass(frozen=True)
class TraceFacts:
    """Facts that a trace states beside its heat; 0 or empty where unknown.

    ``origin`` is the format that it was read from, and what is to be known of it, for people; ``ranks`` and ``slots``
    are of the deployment that was recorded, ``top_k`` the experts that a token chooses, ``nodes_R`` the node of each
    rank. ``phases`` are names that the phase numbers of steps stand for; ``batching`` is the rule by which tokens
    became steps, where these are not those that were served; ``layer_numbers`` are the model's own of each MoE layer,
    where it also has layers without experts. Raises ``HeatError`` on a negative number.
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

    def __post_init__(self) -> None:
        for name in ("ranks", "slots", "top_k", "bytes_per_expert"):
            if getattr(self, name) < 0:
                raise HeatError(f"{name} is {getattr(self, name)}; it cannot be negative")


def numbered(layers: Iterable[int]) -> tuple[int, ...]:
    """Return ``layer_numbers`` of such layers; none where they are 0, 1, 2 and so on."""
    numbers = tuple(layers)
    return () if numbers == tuple(range(len(numbers))) else numbers


class Trace(ABC):
    """Heat of T steps, L layers and E logical experts, read a slice at a time."""

    facts: TraceFacts

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """T, L and E."""

    @abstractmethod
    def heat(self, first: int, last: int) -> Counts:
        """Return the validated heat of some steps.

        Parameters
        ----------
        first, last
            First step, and the first step after the last.

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
        """Tokens by source rank, step by step, ``[t, R, L, E]``; ``None`` where not recorded."""
        return None

    def source(self, first: int, last: int) -> Float64 | None:
        """Tokens by source rank, summed over the steps, float64 ``[R, L, E]``; ``None`` where not recorded."""
        total_RLE: Float64 | None = None
        for begin in range(first, last, _SOURCE_STEPS):
            rows_TRLE = self.source_rows(begin, min(last, begin + _SOURCE_STEPS))
            if rows_TRLE is None:
                return None
            total_RLE = rows_TRLE.sum(axis=0, dtype=np.float64) + (0.0 if total_RLE is None else total_RLE)
        return total_RLE

    def served_loads(self, first: int, last: int) -> Float64 | None:  # noqa: ARG002
        """Tokens that each rank received when it was recorded, float64 ``[t, L, R]``; ``None`` where not recorded."""
        return None

    def step_numbers(self, first: int, last: int) -> Int64:
        """The model's own numbers of the steps, int64 ``[t]``."""
        return np.arange(first, last, dtype=np.int64)

    def tokens(self, first: int, last: int) -> Int64 | None:  # noqa: ARG002
        """Tokens of each step, int64 ``[t]``; ``None`` where not recorded."""
        return None

    def phase_numbers(self, first: int, last: int) -> Int64:
        """Index into ``facts.phases`` of each step, int64 ``[t]``."""
        return np.zeros(last - first, dtype=np.int64)

    @property
    def steps(self) -> int:
        """T."""
        return self.shape[0]

    @property
    def layers(self) -> int:
        """L."""
        return self.shape[1]

    @property
    def experts(self) -> int:
        """E."""
        return self.shape[2]


@dataclass(frozen=True)
class ArrayTrace(Trace):
    """A trace whose heat is one array, in memory or mapped from a file; each slice is checked when it is read.

    ``heat_TLE`` are tokens by logical expert, ``tokens_T`` those of each step, ``source_TRLE`` by source rank,
    ``phase_T`` the index into ``facts.phases`` of each step; ``None`` where unknown. ``states_layers`` says that the
    file names its MoE layers, so that one without tokens is one of them. Raises ``HeatError`` on a wrong shape or no
    steps.
    """

    heat_TLE: Array
    facts: TraceFacts = field(default_factory=TraceFacts)
    tokens_T: Int64 | None = None
    source_TRLE: Array | None = None
    phase_T: Array | None = None
    states_layers: bool = False

    def __post_init__(self) -> None:
        # No rows are as good as all of them to refuse a shape or type by.
        rows = self.heat_TLE[:0] if self.heat_TLE.ndim == 3 and self.heat_TLE.size else self.heat_TLE
        checked_heat(rows)
        if self.heat_TLE.shape[0] == 0:
            raise HeatError("the trace holds no steps; record at least one")
        steps, layers, experts = self.shape
        if self.source_TRLE is not None:
            wanted = (steps, self.facts.ranks, layers, experts)
            if self.source_TRLE.shape != wanted or self.source_TRLE.dtype.kind not in "iu":
                raise HeatError(f"source heat is {list(self.source_TRLE.shape)}, not counts {list(wanted)}")
        if self.phase_T is not None:
            known = self.phase_T.shape == (steps,) and self.phase_T.dtype.kind in "iu"
            if not known or self.phase_T.max() >= len(self.facts.phases) or self.phase_T.min() < 0:
                raise HeatError(f"phases are numbers below {len(self.facts.phases)}, one a step")

    @property
    def shape(self) -> tuple[int, int, int]:
        """T, L and E."""
        return self.heat_TLE.shape

    def heat(self, first: int, last: int) -> Counts:
        """Return the validated heat of some steps.

        Parameters
        ----------
        first, last
            First step, and the first step after the last.

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
        """Tokens of each step, int64 ``[t]``."""
        return None if self.tokens_T is None else self.tokens_T[first:last]

    def source_rows(self, first: int, last: int) -> Array | None:
        """Tokens by source rank, ``[t, R, L, E]``; raises ``HeatError`` on a negative count."""
        if self.source_TRLE is None:
            return None
        rows_TRLE = self.source_TRLE[first:last]
        if rows_TRLE.size and rows_TRLE.min() < 0:
            raise HeatError("source heat holds negative counts")
        return rows_TRLE

    def phase_numbers(self, first: int, last: int) -> Int64:
        """Index into ``facts.phases`` of each step, int64 ``[t]``."""
        if self.phase_T is None:
            return super().phase_numbers(first, last)
        return self.phase_T[first:last].astype(np.int64)


def without_dense_layers(trace: ArrayTrace) -> ArrayTrace:
    """Return the trace without layers that never get a token, unless the file states that they are MoE layers.

    Every MoE layer gets every token, so that a layer without any is a dense one. The trace's origin says how many were
    left out, and ``layer_numbers`` which remain. A trace without any tokens is returned as it is.
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
    """``checked_heat`` of a slice that begins at step ``first`` of its trace, which a refusal then names."""
    try:
        return checked_heat(heat_TLE)
    except HeatError as error:
        where = f" (steps count from {first} on)" if first else ""
        raise HeatError(f"{error}{where}") from error
