"""A rank's heat report, with every size and count checked."""

from __future__ import annotations

import numpy as np

from eplb_service.control.hello import Shape
from eplb_service.heat.batch import HeatBatch
from eplb_service.placement import Int32
from eplb_service.wire.codec import WireError, unpack
from eplb_service.wire.generated import agent_pb2

_INT32_MAX = np.iinfo(np.int32).max
_LAST_STEP = 1 << 62


def read_heat_report(message: agent_pb2.HeatReport, shape: Shape, most_steps: int) -> HeatBatch:
    """Counts of one rank of a deployment of ``shape``; raises ``WireError`` naming the field that is wrong."""
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
    sources = None
    if message.HasField("source_counts"):
        field = "heat_report.source_counts"
        sources = unpack(message.source_counts, (steps, shape.layers, shape.experts), field)
        _check_counts(sources, shape.ranks, field)
    slots = unpack(message.slot_counts, (steps, shape.layers, shape.slots), "heat_report.slot_counts")
    _check_counts(slots, shape.ranks * shape.slots, "heat_report.slot_counts")
    return HeatBatch(
        message.first_step,
        tuple(message.layer_epochs),
        slots,
        phases == agent_pb2.STEP_PHASE_DUMMY,
        sources,
    )


def _check_counts(counts: Int32, summands: int, field: str) -> None:
    most = _INT32_MAX // summands
    if counts.min() < 0 or counts.max() > most:
        raise WireError(
            f"{field}: a count is {int(counts.min())} or {int(counts.max())}, not among 0 to {most}"
        )
