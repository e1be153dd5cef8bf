"""A rank's heat report, with every size and count checked."""

from __future__ import annotations

import numpy as np

from eplb_service.control.server.hello import Shape
from eplb_service.heat.batch import HeatBatch
from eplb_service.wire.codec import Integers, WireError, unpack_as_sent
from eplb_service.wire.generated import agent_pb2, tensor_pb2

_INT32_MAX = np.iinfo(np.int32).max
_LAST_STEP = 1 << 62
_LITTLE_BYTES = 1 << 20


def read_heat_report(message: agent_pb2.HeatReport, shape: Shape, most_steps: int) -> HeatBatch:
    """Counts of one rank of a deployment of ``shape``; raises ``WireError`` naming the field that is wrong.

    The arrays are read-only and as narrow as they were sent.
    """
    phases = np.frombuffer(message.step_phases, dtype=np.uint8)
    steps = len(phases)
    if not 1 <= steps <= most_steps:
        raise WireError(f"heat_report.step_phases: {steps} steps; a report has 1 to {most_steps}")
    if phases.min() < agent_pb2.STEP_PHASE_PREFILL or phases.max() > agent_pb2.STEP_PHASE_DUMMY:
        raise WireError("heat_report.step_phases: a step is neither PREFILL, DECODE nor DUMMY")
    if message.first_step >= _LAST_STEP:
        raise WireError(f"heat_report.first_step: {message.first_step} is past {_LAST_STEP}")
    if len(message.layer_epochs) != shape.layers:
        raise WireError(
            f"heat_report.layer_epochs: expected one for each of {shape.layers} layers, "
            f"got {len(message.layer_epochs)}"
        )
    if len(message.step_tokens) not in (0, steps):
        raise WireError(
            f"heat_report.step_tokens: expected one for each of {steps} steps, got {len(message.step_tokens)}"
        )
    sources = None
    if message.HasField("source_counts"):
        size = (steps, shape.layers, shape.experts)
        sources = _counts(message.source_counts, size, shape.ranks, "heat_report.source_counts")
    size = (steps, shape.layers, shape.slots)
    return HeatBatch(
        message.first_step,
        tuple(message.layer_epochs),
        _counts(message.slot_counts, size, shape.ranks * shape.slots, "heat_report.slot_counts"),
        phases,
        sources,
        np.array(message.step_tokens, dtype=np.int64) if message.step_tokens else None,
        message.dropped_steps,
    )


def costs_little(message: agent_pb2.HeatReport) -> bool:
    """Whether reading it takes less time than another thread would to begin: small, and nothing to inflate."""
    arrays = (message.slot_counts, message.source_counts)
    plain = all(array.compression == tensor_pb2.COMPRESSION_UNSPECIFIED for array in arrays)
    return plain and sum(len(array.data) for array in arrays) <= _LITTLE_BYTES


def _counts(
    packed: tensor_pb2.PackedArray, size: tuple[int, int, int], summands: int, field: str
) -> Integers:
    """Counts of which ``summands`` together still fit int32."""
    counts = unpack_as_sent(packed, size, field)
    most = _INT32_MAX // summands
    bounds = np.iinfo(counts.dtype)
    if bounds.min == 0 and bounds.max <= most:
        return counts
    if counts.min() < 0 or counts.max() > most:
        raise WireError(
            f"{field}: a count is {int(counts.min())} or {int(counts.max())}, not among 0 to {most}"
        )
    return counts
