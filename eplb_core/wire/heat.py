"""Heat reports, which carry one rank's counts for a few steps from the agent to the service's window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt

from eplb_core.heat.phase import StepPhase
from eplb_core.wire.agent import Shape
from eplb_core.wire.codec import Integers, decode, expected_shape, unpack_as_sent
from eplb_core.wire.fields import Check, LayerEpochs, Sizes, Step, WireError
from eplb_core.wire.generated import agent_pb2, tensor_pb2

_INT32_MAX = np.iinfo(np.int32).max
_SMALL_BYTES = 1 << 20
_PHASES = frozenset(map(int, StepPhase))


def _phases(phases: bytes, field: str, sizes: Sizes) -> npt.NDArray[np.uint8]:
    """Validate the phases and return one ``StepPhase`` per step, uint8 ``[T]``."""
    if not 1 <= len(phases) <= sizes["most_steps"]:
        raise WireError(f"{field} has {len(phases)} steps; expected 1 to {sizes['most_steps']}")
    if not _PHASES.issuperset(phases):
        raise WireError(f"{field}: a step's phase is not PREFILL, DECODE, MIXED or DUMMY")
    return np.frombuffer(phases, dtype=np.uint8)


def _each_step(values: Sequence[int], field: str, sizes: Sizes) -> npt.NDArray[np.int64] | None:
    """Return one number per step, int64 ``[T]``; ``None`` if the list is empty."""
    if len(values) not in (0, sizes["steps"]):
        raise WireError(f"{field}: expected one value for each of {sizes['steps']} steps, got {len(values)}")
    return np.array(values, dtype=np.int64) if values else None


def _counts(*axes: str, summands: Callable[[Sizes], int]) -> Check:
    """Return a check that unpacks counts into a read-only array of the message's integer type.

    Parameters
    ----------
    *axes
        Names of the sizes that give the shape.
    summands
        Function that returns how many counts will be summed. Each count is limited so that the sum fits in int32.
    """

    def check(packed: tensor_pb2.PackedArray, field: str, sizes: Sizes) -> Integers:
        counts = unpack_as_sent(packed, expected_shape(axes, sizes), field)
        limit = _INT32_MAX // summands(sizes)
        if counts.dtype.kind == "u" and (1 << 8 * counts.dtype.itemsize) - 1 <= limit:
            return counts
        if counts.min() < 0 or counts.max() > limit:
            raise WireError(
                f"{field}: counts range from {int(counts.min())} to {int(counts.max())}; expected 0 to {limit}"
            )
        return counts

    return check


@dataclass(frozen=True)
class HeatReport:
    """One rank's counts for consecutive steps under one placement. Fields that the host does not report are ``None``.

    Parameters
    ----------
    first_step
        Number of the first step.
    layer_epochs
        Epoch of each layer's placement during the steps, ``[L]``.
    slot_counts_TLS
        Tokens that the rank's slots received. If ``None``, they are derived from the source counts and tables of all
        ranks.
    phase_T
        ``StepPhase`` of each step.
    source_counts_TLE
        The rank's tokens by logical expert, before dispatch. If several ranks see the same tokens, one of them reports
        the counts and the others report zeros.
    tokens_T
        The rank's tokens in each step, without padding. If several ranks see the same tokens, all except one
        report 0.
    dropped_steps
        Steps that the rank's agent has dropped since its Hello.
    source_sums_LE
        Sum of the source counts over the steps, sent instead of ``source_counts_TLE``.
    micros_T
        Wall time of each step in microseconds; 0 if unknown.
    """

    MESSAGE: ClassVar[type[Any]] = agent_pb2.HeatReport

    first_step: Step
    layer_epochs: LayerEpochs
    slot_counts_TLS: Annotated[
        Integers | None,
        _counts("steps", "layers", "slots", summands=lambda sizes: sizes["ranks"] * sizes["slots"]),
    ]
    phase_T: Annotated[npt.NDArray[np.uint8], "step_phases", _phases]
    # If the host does not count the tokens of each slot, a rank's load is computed as a sum of these counts over all
    # ranks and experts, hence ``summands``.
    source_counts_TLE: Annotated[
        Integers | None,
        _counts(
            "steps", "layers", "experts", summands=lambda sizes: sizes["ranks"] * sizes["summed_experts"]
        ),
    ] = None
    tokens_T: Annotated[npt.NDArray[np.integer[Any]] | None, "step_tokens", _each_step] = None
    dropped_steps: Step = 0
    source_sums_LE: Annotated[
        Integers | None, _counts("layers", "experts", summands=lambda sizes: sizes["ranks"])
    ] = None
    micros_T: Annotated[npt.NDArray[np.integer[Any]] | None, "step_micros", _each_step] = None

    @property
    def steps(self) -> int:
        """T, number of steps."""
        return len(self.phase_T)

    def check(self, field: str) -> None:
        """Raise ``WireError`` if the report has an invalid combination of counts."""
        has_slots = self.slot_counts_TLS is not None
        has_sources = self.source_counts_TLE is not None
        if self.source_sums_LE is not None and (not has_slots or has_sources):
            raise WireError(
                f"{field}.source_sums requires slot_counts and cannot be combined with source_counts"
            )
        if not has_slots and not has_sources:
            raise WireError(f"{field} has neither slot_counts nor source_counts")


def decode_heat_report(message: agent_pb2.HeatReport, shape: Shape, most_steps: int) -> HeatReport:
    """Decode one rank's heat report. Its counts are read-only and keep the integer type of the message.

    Parameters
    ----------
    message
        The message.
    shape
        Shape of the rank's deployment.
    most_steps
        Maximum number of steps in a report.

    Raises
    ------
    WireError
        If a field is invalid or the report has too many steps; the error message names the field.
    """
    sizes = {
        **shape.sizes,
        "most_steps": most_steps,
        "steps": len(message.step_phases),
        "summed_experts": 1 if message.HasField("slot_counts") else shape.experts,
    }
    # Other fields depend on the number of steps, so it is checked first.
    _phases(message.step_phases, "heat_report.step_phases", sizes)
    return decode(HeatReport, message, sizes, "heat_report")


def is_quick_to_decode(message: agent_pb2.HeatReport) -> bool:
    """Return True if decoding the message is faster than handing it to another thread."""
    arrays = (message.slot_counts, message.source_counts, message.source_sums)
    return sum(len(array.data) for array in arrays) <= _SMALL_BYTES
