"""Heat that one rank counted over a few steps, as it leaves the agent's recorder and enters the service's window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt

from eplb_core.heat.phase import StepPhase
from eplb_core.wire.agent import Shape
from eplb_core.wire.codec import Integers, axes_of, decode, unpack_as_sent
from eplb_core.wire.fields import Check, LayerEpochs, Sizes, Step, WireError
from eplb_core.wire.generated import agent_pb2, tensor_pb2

_INT32_MAX = np.iinfo(np.int32).max
_SMALL_BYTES = 1 << 20


_PHASES = frozenset(map(int, StepPhase))


def _phases(sent: bytes, field: str, sizes: Sizes) -> npt.NDArray[np.uint8]:
    if not 1 <= len(sent) <= sizes["most_steps"]:
        raise WireError(f"{field}: {len(sent)} steps; a report has 1 to {sizes['most_steps']}")
    if not _PHASES.issuperset(sent):
        raise WireError(f"{field}: a step's phase is not PREFILL, DECODE, MIXED or DUMMY")
    return np.frombuffer(sent, dtype=np.uint8)


def _each_step(values: Sequence[int], field: str, sizes: Sizes) -> npt.NDArray[np.int64] | None:
    """One number for each step, int64 ``[T]``; ``None`` where none was sent."""
    if len(values) not in (0, sizes["steps"]):
        raise WireError(f"{field}: expected one for each of {sizes['steps']} steps, got {len(values)}")
    return np.array(values, dtype=np.int64) if values else None


def _counts(*axes: str, summands: Callable[[Sizes], int]) -> Check:
    """Read-only counts, as narrow as they were sent, of which ``summands`` together still fit int32."""

    def check(packed: tensor_pb2.PackedArray, field: str, sizes: Sizes) -> Integers:
        counts, most = unpack_as_sent(packed, axes_of(axes, sizes), field), _INT32_MAX // summands(sizes)
        if counts.dtype.kind == "u" and (1 << 8 * counts.dtype.itemsize) - 1 <= most:
            return counts
        if counts.min() < 0 or counts.max() > most:
            raise WireError(
                f"{field}: a count is {int(counts.min())} or {int(counts.max())}, not among 0 to {most}"
            )
        return counts

    return check


@dataclass(frozen=True)
class HeatReport:
    """One rank's counts of consecutive steps, all under one placement; what is ``None`` the host does not count.

    Parameters
    ----------
    layer_epochs
        Epoch of each layer's placement while they were counted.
    slot_counts_TLS
        Tokens that the rank's slots received; where ``None`` they follow from all ranks' source counts and tables.
    phase_T
        ``StepPhase`` of each step.
    source_counts_TLE
        The rank's own tokens by logical expert, before dispatch. Of ranks that see the same tokens one counts them, the
        others report zeros.
    tokens_T, micros_T
        The rank's own tokens in each step, without padding, and the step's wall time in microseconds, 0 if unknown. If
        ranks share tokens, all but one of them report 0 tokens.
    dropped_steps
        Steps that the rank's agent has had to drop since its Hello.
    source_sums_LE
        ``source_counts_TLE`` summed over the steps, in their place.
    """

    MESSAGE: ClassVar[type[Any]] = agent_pb2.HeatReport

    first_step: Step
    layer_epochs: LayerEpochs
    slot_counts_TLS: Annotated[
        Integers | None,
        _counts("steps", "layers", "slots", summands=lambda sizes: sizes["ranks"] * sizes["slots"]),
    ]
    phase_T: Annotated[npt.NDArray[np.uint8], "step_phases", _phases]
    # Without slot counts the load of a rank is a sum over all ranks and experts.
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
        """T."""
        return len(self.phase_T)

    def check(self, field: str) -> None:
        """Raise ``WireError`` where the counts do not go together."""
        if self.source_sums_LE is not None and (
            self.slot_counts_TLS is None or self.source_counts_TLE is not None
        ):
            raise WireError(f"{field}.source_sums: they go with slot_counts, and in place of source_counts")
        if self.slot_counts_TLS is None and self.source_counts_TLE is None:
            raise WireError(f"{field}: it has neither slot_counts nor source_counts")


def decode_heat_report(message: agent_pb2.HeatReport, shape: Shape, most_steps: int) -> HeatReport:
    """Counts of one rank of a deployment of ``shape``; the arrays are read-only and as narrow as they were sent.

    Raises
    ------
    WireError
        A field cannot be what it is, or there are more than ``most_steps`` steps; the text names the field.
    """
    sizes = {
        **shape.sizes,
        "most_steps": most_steps,
        "steps": len(message.step_phases),
        "summed_experts": 1 if message.HasField("slot_counts") else shape.experts,
    }
    _phases(message.step_phases, "heat_report.step_phases", sizes)
    return decode(HeatReport, message, sizes, "heat_report")


def is_quick_to_decode(message: agent_pb2.HeatReport) -> bool:
    """Return whether decoding takes less time than another thread would to begin."""
    arrays = (message.slot_counts, message.source_counts, message.source_sums)
    return sum(len(array.data) for array in arrays) <= _SMALL_BYTES
