"""Reads the native trace, a slice at a time, in memory bounded by the slice."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from eplb_service.heat.window import Counts, HeatError
from eplb_service.io.containers.numpy_file import Array
from eplb_service.io.containers.zarr_array import ZarrArray
from eplb_service.io.native import layout as native_layout
from eplb_service.io.trace import Int64, Trace, checked_slice
from eplb_service.placement import Float64, Int32, PlacementError, check_layer


class StoredTrace(Trace):
    """A trace that ``TraceWriter`` wrote, or is still writing: as long as it was when it was opened.

    Raises
    ------
    HeatError
        Without the path, which callers put in front: where the folder holds no whole trace.
    """

    def __init__(self, folder: Path) -> None:
        self.facts, experts = native_layout.read_head(folder)
        self._arrays = native_layout.open_arrays(folder)
        steps = min(array.rows for name, array in self._arrays.items() if name in native_layout.STEP_ARRAYS)
        if steps == 0:
            raise HeatError("the trace holds no steps; record at least one")
        layers = self._counted.tail[0]
        self._shape = (steps, layers, experts)
        self._check_shapes()
        self._placements = self._read_placements() if "slot_heat" in self._arrays else {}

    @property
    def shape(self) -> tuple[int, int, int]:
        """T, L and E."""
        return self._shape

    @property
    def by_slot(self) -> bool:
        """Whether tokens were counted by slot."""
        return "slot_heat" in self._arrays

    def heat(self, first: int, last: int) -> Counts:
        """Tokens by logical expert, ``[t, L, E]``, put together from the slots where those were counted."""
        if not self.by_slot:
            return checked_slice(self._arrays["heat"].read(first, last), first)
        return checked_slice(self._by_expert(first, last), first)

    def slot_heat(self, first: int, last: int) -> tuple[Array, Int64]:
        """Tokens by slot ``[t, L, R*S]`` and the epochs ``[t, L]``; only where ``by_slot``."""
        epochs = self._arrays["epoch"].read(first, last).astype(np.int64)
        return self._arrays["slot_heat"].read(first, last), epochs

    def source_rows(self, first: int, last: int) -> Array | None:
        """Tokens by source rank, step by step, ``[t, R, L, E]``."""
        array = self._arrays.get("source_heat")
        return None if array is None else array.read(first, last)

    def served_loads(self, first: int, last: int) -> Float64 | None:
        """Tokens that each rank received, float64 ``[t, L, R]``; ``None`` where only experts were counted."""
        if not self.by_slot:
            return None
        counts_TLP = self._arrays["slot_heat"].read(first, last)
        shape = (last - first, self.layers, self.facts.ranks, self.facts.slots)
        loads_TLR: Float64 = counts_TLP.reshape(shape).sum(axis=3, dtype=np.float64)
        return loads_TLR

    def placements(self) -> dict[tuple[int, int], Int32]:
        """Slots ``[R, S]`` by layer and epoch; empty where tokens were counted by logical expert."""
        return dict(self._placements)

    def step_numbers(self, first: int, last: int) -> Int64:
        """The model's own numbers of the steps, int64 ``[t]``."""
        return self._arrays["step"].read(first, last).astype(np.int64)

    def tokens(self, first: int, last: int) -> Int64 | None:
        """Tokens of each step, int64 ``[t]``; ``None`` where any of them is unknown."""
        tokens_T = self._arrays["tokens"].read(first, last).astype(np.int64)
        return None if (tokens_T < 0).any() else tokens_T

    def phase_numbers(self, first: int, last: int) -> Int64:
        """Index into ``facts.phases`` of each step, int64 ``[t]``."""
        return self._arrays["phase"].read(first, last).astype(np.int64)

    @property
    def _counted(self) -> ZarrArray:
        return self._arrays["slot_heat" if self.by_slot else "heat"]

    def _check_shapes(self) -> None:
        _, layers, experts = self.shape
        ranks, slots = self.facts.ranks, self.facts.slots
        wanted = {"heat": (layers, experts), "slot_heat": (layers, ranks * slots), "epoch": (layers,)}
        wanted |= {"placement_phy2log": (ranks, slots), "source_heat": (ranks, layers, experts)}
        for name, array in self._arrays.items():
            if array.tail != wanted.get(name, ()):
                raise HeatError(f"{name} has rows {list(array.tail)}, expected {list(wanted.get(name, ()))}")

    def _read_placements(self) -> dict[tuple[int, int], Int32]:
        columns = [self._arrays[name] for name in native_layout.PLACEMENT_ARRAYS]
        rows = min(array.rows for array in columns)
        layer_K, epoch_K, phy2log_KRS = (array.read(0, rows) for array in columns)
        placements = {}
        for layer, epoch, phy2log_RS in zip(layer_K.tolist(), epoch_K.tolist(), phy2log_KRS, strict=True):
            try:
                check_layer(phy2log_RS.astype(np.int32), self.experts, f"layer {layer} at epoch {epoch}")
            except PlacementError as error:
                raise HeatError(str(error)) from error
            placements[layer, epoch] = phy2log_RS.astype(np.int32)
        return placements

    def _by_expert(self, first: int, last: int) -> Array:
        slot_heat_TLP, epoch_TL = self.slot_heat(first, last)
        heat_TLE = np.zeros((last - first, self.layers, self.experts), dtype=np.int64)
        for layer in range(self.layers):
            for epoch in np.unique(epoch_TL[:, layer]).tolist():
                phy2log_RS = self._placements.get((layer, epoch))
                if phy2log_RS is None:
                    raise HeatError(
                        f"layer {layer} was counted at epoch {epoch}, whose placement was not recorded"
                    )
                at_T = epoch_TL[:, layer] == epoch
                heat_TLE[at_T, layer] = sum_by_expert(slot_heat_TLP[at_T, layer], phy2log_RS.ravel())
        return heat_TLE


def sum_by_expert(slot_heat_NP: Array, phy2log_P: Int32) -> Int64:
    """Tokens by expert ``[N, E]`` from tokens by slot ``[N, P]``; every expert must be in some slot."""
    by_expert_P = np.argsort(phy2log_P, kind="stable")
    first_E = np.flatnonzero(np.diff(phy2log_P[by_expert_P], prepend=-1))
    summed: Int64 = np.add.reduceat(slot_heat_NP[:, by_expert_P].astype(np.int64), first_E, axis=1)
    return summed
