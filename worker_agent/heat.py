"""Records expert heat without delaying the device.

The layers write each step's counts into ring buffers on the device. The recorder copies blocks of consecutive steps to
the host asynchronously, and reports each block once its copy has arrived. A block never spans a layer switch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from eplb_core.heat.phase import StepPhase
from eplb_core.wire.agent import EVERYTHING, Reporting
from eplb_core.wire.heat import HeatReport
from worker_agent.device import Mark, empty_on_host, host_view
from worker_agent.live_layer import LiveLayer

_MAX_TOKENS = 1 << 32
"""Exclusive upper bound on a report's token counts."""
_MAX_MICROS = 1 << 32
"""Exclusive upper bound on a report's step times, in microseconds."""
_DEADLINE_CALLS = 4096
"""Number of step boundaries without a valid count after which the recorder complains."""


@dataclass
class _Block:
    """Block of steps that will form the next report.

    Parameters
    ----------
    first_step
        Number of the first step.
    phases
        Phase of each step.
    tokens
        Number of this rank's own tokens in each step. Steps with an unknown number have no entry.
    micros
        Wall time of each step in microseconds, 0 if unknown.
    """

    first_step: int = 0
    phases: list[StepPhase] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    micros: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Copy:
    """A report whose counts are being copied from the device.

    Parameters
    ----------
    report
        The report. Its arrays are valid once ``arrived`` has passed.
    first_pass
        Number of the first step's forward pass, according to the layers' counter.
    passes
        Value of the last layer's counter when each of the T rows was recorded, followed by the values of all C counters
        after the last row; int64 ``[T + C]``.
    arrived
        Mark that passes when the copy is complete.
    """

    report: HeatReport
    first_pass: int
    passes: torch.Tensor
    arrived: Mark

    def is_valid(self) -> bool:
        """Return True if each row was written by its own step's forward pass and by no other."""
        steps = self.report.steps
        expected = [*range(self.first_pass, self.first_pass + steps)]
        return self.passes.tolist() == expected + expected[-1:] * (len(self.passes) - steps)


class HeatRecorder:
    """Recorder that reads the layers' heat rings and produces one report per block of steps.

    Parameters
    ----------
    layers
        The live layers.
    segment_steps
        Number of steps per block, at most the number of rows in the rings. Blocks end before each multiple of this
        number, so that all ranks' blocks end at the same steps. A switch ends a block early.

    Attributes
    ----------
    lost_steps : int
        Number of steps whose row was not written by exactly one forward pass. The host may have run a layer twice in a
        step, or failed to call the agent's ``step`` exactly once for a pass. Such a row's counts are dropped rather
        than corrected.
    ring_bytes : int
        Size of the heat rings in bytes.
    reporting : Reporting
        Heat that the service requests.
    """

    def __init__(self, layers: Sequence[LiveLayer], segment_steps: int) -> None:
        self.lost_steps = 0
        self._slot_rings = _rings_of(layer.moe_load for layer in layers)
        self._source_rings = _rings_of(layer.source_load for layer in layers)
        # Several layers may share one counter.
        self._counters = list(
            {layer.load_counter.data_ptr(): layer.load_counter for layer in layers}.values()
        )
        rings = [ring for layer in layers for ring in (layer.moe_load, layer.source_load) if ring is not None]
        self._rows = min(ring.shape[0] for ring in rings)
        self.ring_bytes = sum(ring.nbytes for ring in rings)
        self._block_steps = 0
        self.adopt(segment_steps)
        self._silent_calls = 0
        self._device = rings[0].device
        self._block = _Block()
        self._next_step: int | None = None
        # Value of the counter before step 0.
        self._base = int(layers[-1].load_counter)
        self._passes = torch.zeros(
            self._rows + len(self._counters), dtype=torch.int64, device=layers[-1].load_counter.device
        )
        self._pass_per_row = self._passes.unbind()
        self._host_passes = host_view(self._passes)
        self._host_counters = [host_view(counter) for counter in self._counters]
        self._copies: deque[_Copy] = deque()

    @property
    def complaint(self) -> str | None:
        """Problem to report to the service if no valid counts arrive, or ``None``. Any thread may read it."""
        if self._silent_calls <= _DEADLINE_CALLS:
            return None
        return (
            f"no valid heat counts for {self._silent_calls} steps: the layers' counters do not match the agent's step "
            "numbers; the host must call step once per forward pass"
        )

    def adopt(self, segment_steps: int, reporting: Reporting = EVERYTHING) -> None:
        """Report the requested heat in blocks of ``segment_steps``, or in shorter blocks if the rings have fewer rows.

        If blocks become shorter, the current block ends at the next step.
        """
        block_steps = max(1, min(segment_steps, self._rows))
        # The service requests shorter blocks when the heat has just changed. It then needs the pending steps soon.
        self._ends_early = block_steps < self._block_steps
        self._block_steps = block_steps
        self.reporting = reporting

    def wants(self, first_step: int) -> bool:
        """Return True if the service requests the block that begins at this step."""
        return self.reporting.wants(first_step // self._block_steps)

    def step_done(
        self,
        step: int,
        phase: StepPhase,
        layer_epochs: tuple[int, ...],
        tokens: int | None = None,
        micros: int = 0,
        base: int | None = None,
    ) -> None:
        """Record that a step has been queued. Its heat is lost if its forward pass does not match the layers' counter.

        Parameters
        ----------
        step
            Number of the step, as in ``ForwardClock``.
        phase
            Phase of the step: prefill, decode, mixed or dummy.
        layer_epochs
            Epoch of each layer during the step.
        tokens
            Number of this rank's own tokens in the step, or ``None`` if unknown.
        micros
            Wall time of the step in microseconds; 0 if unknown.
        base
            Value of the layers' counter before step 0, which changes if the ranks renumber their steps. ``None`` keeps
            the previous value.
        """
        if self._next_step not in (None, step):
            self.cut(layer_epochs)
            # Steps without a call are lost. A repeated call does not belong to any pass, so no step is lost.
            self.lost_steps += max(0, step - self._next_step)
        self._next_step = step + 1
        if base is not None:
            self._base = base
        block = self._block
        if not block.phases:
            block.first_step = step
        self._note_pass(len(block.phases), -1)
        block.phases.append(phase)
        if tokens is not None and 0 <= tokens < _MAX_TOKENS:
            block.tokens.append(tokens)
        block.micros.append(micros if 0 <= micros < _MAX_MICROS else 0)
        full = (step + 1) % self._block_steps == 0 or len(block.phases) >= self._block_steps
        if full or self._ends_early:
            self._ends_early = False
            self.cut(layer_epochs)

    def cut(self, layer_epochs: tuple[int, ...]) -> None:
        """End the current block. The switch calls this before it changes a layer.

        Parameters
        ----------
        layer_epochs
            Epoch of each layer during the block.
        """
        block = self._block
        self._block = _Block()
        if not block.phases or not self.wants(block.first_step):
            return
        try:
            self._copies.append(self._begin_copy(block, layer_epochs))
        except Exception:
            # Steps that cannot be reported are lost. They must never be merged with later steps under a different
            # placement.
            self.lost_steps += len(block.phases)
            raise

    def take(self) -> list[HeatReport]:
        """Return the reports whose counts have arrived. Call it at each step boundary; it never waits."""
        reports: list[HeatReport] = []
        while self._copies and self._copies[0].arrived.passed():
            copy = self._copies.popleft()
            if copy.is_valid():
                reports.append(copy.report)
            else:
                self.lost_steps += copy.report.steps
        self._silent_calls = 0 if reports else self._silent_calls + 1
        return reports

    def _begin_copy(self, block: _Block, layer_epochs: tuple[int, ...]) -> _Copy:
        """Start copying a block's counts to the host."""
        steps = len(block.phases)
        rows = [(self._base + block.first_step + i) % self._rows for i in range(steps)]
        summed = self.reporting.source_sums and self._slot_rings is not None
        report = HeatReport(
            block.first_step,
            layer_epochs,
            self._copy_out(self._slot_rings, rows),
            np.frombuffer(bytes(block.phases), np.uint8),
            None if summed else self._copy_out(self._source_rings, rows),
            np.array(block.tokens, dtype=np.int64) if len(block.tokens) == steps else None,
            source_sums_LE=self._copy_out(self._source_rings, rows, summed=True) if summed else None,
            micros_T=np.array(block.micros, dtype=np.int64),
        )
        for counter in range(len(self._counters)):
            self._note_pass(steps + counter, counter)
        passes = self._passes[: steps + len(self._counters)].clone()
        first_pass = self._base + block.first_step + 1
        return _Copy(report, first_pass, self._to_host(passes), Mark(self._device))

    def _note_pass(self, row: int, counter: int) -> None:
        """Store a counter's value after the last queued pass, at index ``row``."""
        passes_P = self._host_passes
        value = self._host_counters[counter]
        if passes_P is None or value is None:
            self._pass_per_row[row].copy_(self._counters[counter], non_blocking=True)
        else:
            passes_P[row] = value[0]

    def _copy_out(
        self, rings: _Rings | None, rows: list[int], *, summed: bool = False
    ) -> npt.NDArray[np.int32] | None:
        """Copy the given rows of all rings to the host.

        Returns
        -------
        array or None
            The rows, int32 ``[T, L, width]``, or their sum, int32 ``[L, width]``, which is computed on the device.
            ``None`` if there are no rings.
        """
        if rings is None:
            return None
        counts_TLX = rings.read_rows(rows)
        counts = counts_TLX.sum(dim=0, dtype=torch.int32) if summed else counts_TLX
        host_counts: npt.NDArray[np.int32] = self._to_host(counts).numpy()
        return host_counts

    def _to_host(self, counts: torch.Tensor) -> torch.Tensor:
        """Return a host copy of ``counts``. On a device, the copy may still be pending."""
        if counts.device.type == "cpu":
            return counts
        host_counts = empty_on_host(tuple(counts.shape), counts.dtype, self._device)
        return host_counts.copy_(counts, non_blocking=True)


class _Rings:
    """Heat rings of all layers.

    If an adapter keeps all rings in one tensor, a single operation reads consecutive rows of all rings.

    Parameters
    ----------
    rings
        The ring of each layer, ``[W, width]``.
    """

    def __init__(self, rings: list[torch.Tensor]) -> None:
        self._rings = rings
        self._whole_LWX = _in_one_tensor(rings)

    def read_rows(self, rows: list[int]) -> torch.Tensor:
        """Return a copy of consecutive rows, ``[T, L, width]``. If the rows wrap around, two reads are needed."""
        wrap = next((i for i in range(1, len(rows)) if rows[i] < rows[i - 1]), len(rows))
        counts = self.read_range(rows[0], rows[wrap - 1] + 1)
        if wrap < len(rows):
            counts = torch.cat([counts, self.read_range(rows[wrap], rows[-1] + 1)])
        return counts

    def read_range(self, start: int, end: int) -> torch.Tensor:
        """Return a contiguous copy of the rows from ``start`` to ``end - 1``, ``[T, L, width]``."""
        if self._whole_LWX is not None:
            rows_TLX = self._whole_LWX[:, start:end].transpose(0, 1)
            return rows_TLX.clone(memory_format=torch.contiguous_format)
        return torch.stack([ring[start:end] for ring in self._rings], dim=1)


def _in_one_tensor(rings: list[torch.Tensor]) -> torch.Tensor | None:
    """Return a view ``[L, W, width]`` of all rings if they are evenly spaced in one tensor, otherwise ``None``."""
    first = rings[0]
    step = rings[1].storage_offset() - first.storage_offset() if len(rings) > 1 else first.numel()
    for index, ring in enumerate(rings):
        fits = (
            ring.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and (ring.dtype, ring.shape, ring.stride()) == (first.dtype, first.shape, first.stride())
            and ring.storage_offset() == first.storage_offset() + index * step
        )
        if not fits:
            return None
    return first.as_strided((len(rings), *first.shape), (step, *first.stride())) if step > 0 else None


def _rings_of(rings: Iterable[torch.Tensor | None]) -> _Rings | None:
    """Return the rings of all layers, or ``None`` if a layer has no ring."""
    layer_rings = list(rings)
    present = [ring for ring in layer_rings if ring is not None]
    return _Rings(present) if len(present) == len(layer_rings) else None
