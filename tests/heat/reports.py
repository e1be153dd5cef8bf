"""Reports of a few ranks, and an assembler that takes them."""

from __future__ import annotations

import numpy as np

from eplb_service.heat.assembler import HeatAssembler
from eplb_service.placement import default_log2phy
from eplb_service.wire.heat import HeatReport, StepPhase

RANKS, LAYERS, EXPERTS, SLOTS = 2, 2, 3, 2
PLACEMENT_LRS = np.array([[[0, 1], [2, 0]], [[2, 1], [0, 1]]], dtype=np.int32)


def assembler(window_steps: int = 8, pending_steps: int = 4) -> HeatAssembler:
    made = HeatAssembler(RANKS, LAYERS, EXPERTS, SLOTS, window_steps, pending_steps)
    for layer in range(LAYERS):
        place(made, layer, 0, PLACEMENT_LRS[layer])
    return made


def place(heat: HeatAssembler, layer: int, epoch: int, phy2log_RS: np.ndarray) -> None:
    heat.placements.place(layer, epoch, phy2log_RS, default_log2phy(phy2log_RS, EXPERTS))


def loads_of(heat: HeatAssembler, layer_epochs: tuple[int, ...]) -> np.ndarray:
    """Of all steps of the window, int32 ``[T, L, R]``."""
    return np.array(list(heat.measured_loads(layer_epochs))).reshape(-1, LAYERS, RANKS)


def report(
    first_step: int, *counts: int, epochs: tuple[int, ...] = (0, 0), dummy: bool = False
) -> HeatReport:
    """``counts[t]`` tokens in each slot of each layer in step ``t``."""
    slot_counts = np.broadcast_to(
        np.array(counts, dtype=np.int32)[:, None, None], (len(counts), LAYERS, SLOTS)
    )
    sources = np.broadcast_to(np.array(counts, dtype=np.int32)[:, None, None], (len(counts), LAYERS, EXPERTS))
    phase_T = np.full(len(counts), StepPhase.DUMMY if dummy else StepPhase.DECODE, dtype=np.uint8)
    return HeatReport(first_step, epochs, slot_counts, phase_T, sources)


def sources_only(first_step: int, counts_TLE: np.ndarray, epochs: tuple[int, ...] = (0, 0)) -> HeatReport:
    phase_T = np.full(len(counts_TLE), StepPhase.DECODE, dtype=np.uint8)
    return HeatReport(first_step, epochs, None, phase_T, counts_TLE)
