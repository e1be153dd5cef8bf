"""What one rank counted over a few steps: the one carrier of heat from the agent's recorder to the window."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_service.wire.codec import Integers, pack, unpack_as_sent
from eplb_service.wire.fields import LAST_STEP, WireError, check_count, check_epochs
from eplb_service.wire.generated import agent_pb2, tensor_pb2
from eplb_service.wire.hello import Shape

_INT32_MAX = np.iinfo(np.int32).max
_SMALL_BYTES = 1 << 20


class StepPhase(enum.IntEnum):
    """What kind of step it was for one rank; the numbers are the wire's."""

    PREFILL = 1
    DECODE = 2
    DUMMY = 3
    """The rank had no tokens of its own."""


_PHASES, _DUMMY = frozenset(map(int, StepPhase)), int(StepPhase.DUMMY)


@dataclass(frozen=True)
class HeatReport:
    """One rank's counts of consecutive steps, all under one placement.

    Parameters
    ----------
    first_step
        Number of the first step.
    layer_epochs
        Epoch of each layer's placement while they were counted.
    slot_counts_TLS
        Tokens that the rank's slots received, integers ``[T, L, S]``; ``None`` where the host does not count them, and
        they follow from the source counts and tables of all ranks.
    phase_T
        ``StepPhase`` of each step, integers ``[T]``.
    source_counts_TLE
        The rank's own tokens by logical expert, before dispatch, integers ``[T, L, E]``; ``None`` where the host does
        not count them. Of ranks that see the same tokens one counts them, the others report zeros.
    tokens_T
        The rank's own tokens, integers ``[T]``; ``None`` where the host does not count them.
    dropped_steps
        Steps that the rank's agent has had to drop since its Hello.
    source_sums_LE
        ``source_counts_TLE`` summed over the steps, integers ``[L, E]``, in their place; ``None`` where they are there,
        or the host does not count them.
    micros_T
        Wall time of each step by the rank's own clock in microseconds, integers ``[T]``, 0 where it is not known;
        ``None`` from agents that do not measure it.
    """

    first_step: int
    layer_epochs: tuple[int, ...]
    slot_counts_TLS: npt.NDArray[np.integer[Any]] | None
    phase_T: npt.NDArray[np.uint8]
    source_counts_TLE: npt.NDArray[np.integer[Any]] | None = None
    tokens_T: npt.NDArray[np.integer[Any]] | None = None
    dropped_steps: int = 0
    source_sums_LE: npt.NDArray[np.integer[Any]] | None = None
    micros_T: npt.NDArray[np.integer[Any]] | None = None

    @property
    def steps(self) -> int:
        """T."""
        return len(self.phase_T)

    @property
    def dummy_T(self) -> npt.NDArray[np.bool_]:
        """Steps in which this rank had no tokens of its own, bool ``[T]``."""
        dummy: npt.NDArray[np.bool_] = self.phase_T == _DUMMY
        return dummy


def encode_heat_report(report: HeatReport) -> agent_pb2.HeatReport:
    """The message; counts are packed in the narrowest type that holds them."""
    slots, sources, sums = report.slot_counts_TLS, report.source_counts_TLE, report.source_sums_LE
    return agent_pb2.HeatReport(
        first_step=report.first_step,
        layer_epochs=report.layer_epochs,
        slot_counts=None if slots is None else pack(slots),
        source_counts=None if sources is None else pack(sources),
        source_sums=None if sums is None else pack(sums),
        step_phases=report.phase_T.astype(np.uint8).tobytes(),
        dropped_steps=report.dropped_steps,
        step_tokens=None if report.tokens_T is None else report.tokens_T.tolist(),
        step_micros=None if report.micros_T is None else report.micros_T.tolist(),
    )


def decode_heat_report(message: agent_pb2.HeatReport, shape: Shape, most_steps: int) -> HeatReport:
    """Counts of one rank of a deployment of ``shape``; the arrays are read-only and as narrow as they were sent.

    Raises
    ------
    WireError
        A field cannot be what it is, or there are more than ``most_steps`` steps; the text names the field.
    """
    steps = len(message.step_phases)
    if not 1 <= steps <= most_steps:
        raise WireError(f"heat_report.step_phases: {steps} steps; a report has 1 to {most_steps}")
    if not _PHASES.issuperset(message.step_phases):
        raise WireError("heat_report.step_phases: a step is neither PREFILL, DECODE nor DUMMY")
    phase_T = np.frombuffer(message.step_phases, dtype=np.uint8)
    first_step = check_count(message.first_step, "heat_report.first_step", LAST_STEP)
    layer_epochs = check_epochs(message.layer_epochs, shape.layers, "heat_report.layer_epochs")
    tokens_T = _of_steps(message.step_tokens, steps, "heat_report.step_tokens")
    micros_T = _of_steps(message.step_micros, steps, "heat_report.step_micros")
    slots_TLS = sources_TLE = sums_LE = None
    if message.HasField("slot_counts"):
        size = (steps, shape.layers, shape.slots)
        slots_TLS = _counts(message.slot_counts, size, shape.ranks * shape.slots, "heat_report.slot_counts")
    if message.HasField("source_counts"):
        size = (steps, shape.layers, shape.experts)
        # Without slot counts the load of a rank is a sum over all ranks and experts.
        summands = shape.ranks * (shape.experts if slots_TLS is None else 1)
        sources_TLE = _counts(message.source_counts, size, summands, "heat_report.source_counts")
    if message.HasField("source_sums"):
        if slots_TLS is None or sources_TLE is not None:
            raise WireError(
                "heat_report.source_sums: they go with slot_counts, and in place of source_counts"
            )
        sums_LE = _counts(
            message.source_sums, (shape.layers, shape.experts), shape.ranks, "heat_report.source_sums"
        )
    if slots_TLS is None and sources_TLE is None:
        raise WireError("heat_report: it has neither slot_counts nor source_counts")
    return HeatReport(
        first_step,
        layer_epochs,
        slots_TLS,
        phase_T,
        sources_TLE,
        tokens_T,
        check_count(message.dropped_steps, "heat_report.dropped_steps", LAST_STEP),
        sums_LE,
        micros_T,
    )


def is_quick_to_decode(message: agent_pb2.HeatReport) -> bool:
    """Whether decoding it takes less time than another thread would to begin: small, and nothing to inflate."""
    arrays = (message.slot_counts, message.source_counts, message.source_sums)
    plain = all(array.compression == tensor_pb2.COMPRESSION_UNSPECIFIED for array in arrays)
    return plain and sum(len(array.data) for array in arrays) <= _SMALL_BYTES


def _of_steps(values: Sequence[int], steps: int, field: str) -> npt.NDArray[np.int64] | None:
    """One number for each step, int64 ``[T]``; ``None`` where none was sent."""
    if len(values) not in (0, steps):
        raise WireError(f"{field}: expected one for each of {steps} steps, got {len(values)}")
    return np.array(values, dtype=np.int64) if values else None


def _counts(packed: tensor_pb2.PackedArray, size: tuple[int, ...], summands: int, field: str) -> Integers:
    """Counts of which ``summands`` together still fit int32."""
    counts = unpack_as_sent(packed, size, field)
    most = _INT32_MAX // summands
    if counts.dtype.kind == "u" and (1 << 8 * counts.dtype.itemsize) - 1 <= most:
        return counts
    if counts.min() < 0 or counts.max() > most:
        raise WireError(
            f"{field}: a count is {int(counts.min())} or {int(counts.max())}, not among 0 to {most}"
        )
    return counts
