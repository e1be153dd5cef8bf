"""Records expert heat per step without holding up the device: counted there, copied out in the background.

The layers write each step's counts into rings on the device. Here rows are gathered into segments and copied to the
host asynchronously; they are reported once the copy has arrived. A segment never spans a layer switch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from eplb_core.heat.phase import StepPhase
from eplb_core.wire.agent import EVERYTHING, Reporting
from eplb_core.wire.heat import HeatReport
from worker_agent.device import Mark, host_empty, host_view
from worker_agent.live_layer import LiveLayer

_MAX_TOKENS = _MAX_MICROS = 1 << 32
"""Exclusive upper bounds of the message's fields."""
_DEADLINE_CALLS = 4096
"""Step boundaries without a valid count after which a problem is reported: the host no longer counts."""


@dataclass(frozen=True)
class _Copy:
    """A report whose counts are on their way from the device."""

    report: HeatReport
    first_pass: int
    """Number, by the layers' counter, of the pass that the first step is."""

    passes: torch.Tensor
    """int64 ``[T + C]``: the pass that each of its T rows is of, then the C counters of layers after the last."""

    arrived: Mark

    def is_whole(self) -> bool:
        """Return whether each row is of the one pass that its step is."""
        steps = self.report.steps
        expected = [*range(self.first_pass, self.first_pass + steps)]
        return self.passes.tolist() == expected + expected[-1:] * (len(self.passes) - steps)


class HeatRecorder:
    """Turns the layers' rings into reports, a segment of steps each.

    Parameters
    ----------
    layers
        The live layers.
    segment_steps
        Steps per segment, at most as many as the rings hold. A switch ends a segment early. Segments end before each
        multiple of this number, so that all ranks end theirs at the same steps.

    Attributes
    ----------
    lost_steps : int
        Steps whose rows are not of one forward pass each: a host that runs a layer twice a step, a pass without a
        ``step`` of the agent, or two of them. Such counts are dropped, never guessed.
    ring_bytes : int
        Size of the rings that the layers count in.
    reporting : Reporting
        Part of the heat that the service asks for.
    """

    def __init__(self, layers: Sequence[LiveLayer], segment_steps: int) -> None:
        self.lost_steps = 0
        self._slot_rings = _rings(layer.moe_load for layer in layers)
        self._source_rings = _rings(layer.source_load for layer in layers)
        # Adapters may count all layers' passes in one tensor.
        self._counters = list(
            {layer.load_counter.data_ptr(): layer.load_counter for layer in layers}.values()
        )
        rings = [ring for layer in layers for ring in (layer.moe_load, layer.source_load) if ring is not None]
        self._rows = min(ring.shape[0] for ring in rings)
        self.ring_bytes = sum(ring.nbytes for ring in rings)
        self._segment_steps = 0
        self.adopt(segment_steps)
        self._silent_calls = 0
        self._device = rings[0].device
        self._phases: list[StepPhase] = []
        self._tokens: list[int] = []
        self._micros: list[int] = []
        self._first_step = 0
        self._next_step: int | None = None
        # The counter before step 0.
        self._base = int(layers[-1].load_counter)
        self._passes = torch.zeros(
            self._rows + len(self._counters), dtype=torch.int64, device=layers[-1].load_counter.device
        )
        self._pass_of_row = self._passes.unbind()
        self._known_passes = host_view(self._passes)
        self._known_counters = [host_view(counter) for counter in self._counters]
        self._copies: deque[_Copy] = deque()

    @property
    def complaint(self) -> str | None:
        """Problem to report to the service if no counts arrive; may be read on any thread."""
        if self._silent_calls <= _DEADLINE_CALLS:
            return None
        silent = f"no valid count of heat for {self._silent_calls} steps"
        return f"{silent}: the layers count other steps than the agent sees"

    def adopt(self, segment_steps: int, reporting: Reporting = EVERYTHING) -> None:
        """Report the requested heat in segments of ``segment_steps``, or of as many steps as the rings hold.

        If the segments become shorter, the current one ends with the next step.
        """
        adopted = max(1, min(segment_steps, self._rows))
        # Shorter segments mean that heat has just changed, and the service waits for the steps gathered so far.
        self._hurries = adopted < self._segment_steps
        self._segment_steps = adopted
        self.reporting = reporting

    def wants(self, first_step: int) -> bool:
        """Return whether the segment that begins with this step is to be reported."""
        return self.reporting.wants(first_step // self._segment_steps)

    def step_done(
        self,
        step: int,
        phase: StepPhase,
        layer_epochs: tuple[int, ...],
        tokens: int | None = None,
        micros: int = 0,
        base: int | None = None,
    ) -> None:
        """Take a step that has run; it is reported if the layers' counter, as it is on the device now, is of it.

        Parameters
        ----------
        step, phase
            Number of the step in ``ForwardClock``, and its phase: prefill, decode, mixed or dummy.
        layer_epochs
            Epoch of each layer that served it.
        tokens
            Number of this rank's own tokens in it, if known.
        micros
            Its wall time in microseconds; 0 if unknown.
        base
            Value of the layers' counter before step 0, if the ranks have agreed on other step numbers since.
        """
        if self._next_step not in (None, step):
            self.cut(layer_epochs)
            # Passes without a call are lost. A repeated call belongs to no pass and loses none.
            self.lost_steps += max(0, step - self._next_step)
        self._next_step = step + 1
        if base is not None:
            self._base = base
        if not self._phases:
            self._first_step = step
        self._note_pass(len(self._phases), -1)
        self._phases.append(phase)
        if tokens is not None and 0 <= tokens < _MAX_TOKENS:
            self._tokens.append(tokens)
        self._micros.append(micros if 0 <= micros < _MAX_MICROS else 0)
        full = (step + 1) % self._segment_steps == 0 or len(self._phases) >= self._segment_steps
        if full or self._hurries:
            self._hurries = False
            self.cut(layer_epochs)

    def cut(self, layer_epochs: tuple[int, ...]) -> None:
        """End the segment here: called before a layer switches, while the counts are still of ``layer_epochs``."""
        phases, self._phases = self._phases, []
        tokens, self._tokens = self._tokens, []
        micros, self._micros = self._micros, []
        if not phases or not self.wants(self._first_step):
            return
        try:
            self._copies.append(self._copy_of(phases, tokens, micros, layer_epochs))
        except Exception:
            # Steps that cannot be reported are lost; they must never go with later ones, under another placement.
            self.lost_steps += len(phases)
            raise

    def take(self) -> list[HeatReport]:
        """Return the reports whose counts have arrived; called at each step boundary, never waits."""
        reports: list[HeatReport] = []
        while self._copies and self._copies[0].arrived.passed():
            copy = self._copies.popleft()
            if copy.is_whole():
                reports.append(copy.report)
            else:
                self.lost_steps += copy.report.steps
        self._silent_calls = 0 if reports else self._silent_calls + 1
        return reports

    def _copy_of(
        self, phases: list[StepPhase], tokens: list[int], micros: list[int], layer_epochs: tuple[int, ...]
    ) -> _Copy:
        """Begin to copy the counts of these steps; the report's arrays are filled once ``arrived`` has passed."""
        rows = [(self._base + self._first_step + i) % self._rows for i in range(len(phases))]
        summed = self.reporting.source_sums and self._slot_rings is not None
        report = HeatReport(
            self._first_step,
            layer_epochs,
            self._copy_out(self._slot_rings, rows),
            np.frombuffer(bytes(phases), np.uint8),
            None if summed else self._copy_out(self._source_rings, rows),
            np.array(tokens, dtype=np.int64) if len(tokens) == len(phases) else None,
            source_sums_LE=self._copy_out(self._source_rings, rows, summed=True) if summed else None,
            micros_T=np.array(micros, dtype=np.int64),
        )
        for counter in range(len(self._counters)):
            self._note_pass(len(phases) + counter, counter)
        passes = self._passes[: len(phases) + len(self._counters)].clone()
        return _Copy(report, self._base + self._first_step + 1, self._to_host(passes), Mark(self._device))

    def _note_pass(self, row: int, counter: int) -> None:
        """Keep a counter as it is after the pass that is queued."""
        known_P, known = self._known_passes, self._known_counters[counter]
        if known_P is None or known is None:
            self._pass_of_row[row].copy_(self._counters[counter], non_blocking=True)
        else:
            known_P[row] = known[0]

    def _copy_out(
        self, rings: _Rings | None, rows: list[int], *, summed: bool = False
    ) -> npt.NDArray[np.int32] | None:
        """Copy rows of all rings to the host, ``[T, L, width]``, or their sum, ``[L, width]``, made on the device."""
        if rings is None:
            return None
        counts_TLX = rings.segment(rows)
        counts = counts_TLX.sum(dim=0, dtype=torch.int32) if summed else counts_TLX
        out: npt.NDArray[np.int32] = self._to_host(counts).numpy()
        return out

    def _to_host(self, counts: torch.Tensor) -> torch.Tensor:
        """Copy to the host; the copy may still be under way."""
        if counts.device.type == "cpu":
            return counts
        out = host_empty(tuple(counts.shape), counts.dtype, self._device)
        return out.copy_(counts, non_blocking=True)


class _Rings:
    """The rings of all layers, each ``[W, width]``, read a few rows at a time.

    If an adapter keeps all rings in one tensor, a single operation reads them.
    """

    def __init__(self, rings: list[torch.Tensor]) -> None:
        self._rings = rings
        self._whole_LWX = _in_one_tensor(rings)

    def segment(self, rows: list[int]) -> torch.Tensor:
        """Return a copy of consecutive rows, ``[T, L, width]``, read in two parts if they wrap around."""
        wrap = next((i for i in range(1, len(rows)) if rows[i] < rows[i - 1]), len(rows))
        counts = self.copy_of(rows[0], rows[wrap - 1] + 1)
        if wrap < len(rows):
            counts = torch.cat([counts, self.copy_of(rows[wrap], rows[-1] + 1)])
        return counts

    def copy_of(self, start: int, end: int) -> torch.Tensor:
        """A copy of the rows ``start`` to ``end - 1``, contiguous ``[T, L, width]``."""
        if self._whole_LWX is not None:
            rows_TLX = self._whole_LWX[:, start:end].transpose(0, 1)
            return rows_TLX.clone(memory_format=torch.contiguous_format)
        return torch.stack([ring[start:end] for ring in self._rings], dim=1)


def _in_one_tensor(rings: list[torch.Tensor]) -> torch.Tensor | None:
    """Return a view ``[L, W, width]`` of all rings if they are evenly spaced in one tensor, else ``None``."""
    first = rings[0]
    step = rings[1].storage_offset() - first.storage_offset() if len(rings) > 1 else first.numel()
    for index, ring in enumerate(rings):
        alike = (
            ring.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and (ring.dtype, ring.shape, ring.stride()) == (first.dtype, first.shape, first.stride())
            and ring.storage_offset() == first.storage_offset() + index * step
        )
        if not alike:
            return None
    return first.as_strided((len(rings), *first.shape), (step, *first.stride())) if step > 0 else None


def _rings(rings: Iterable[torch.Tensor | None]) -> _Rings | None:
    """Gather the rings of all layers, or ``None`` if a layer has none."""
    found = list(rings)
    there = [ring for ring in found if ring is not None]
    return _Rings(there) if len(there) == len(found) else None
