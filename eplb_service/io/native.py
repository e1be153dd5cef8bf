"""The native trace: a Zarr v3 folder of per-step heat, with the placements that it was counted under.

| array | shape | is |
|---|---|---|
| ``heat`` | ``[T, L, E]`` | tokens by logical expert; or, where slots were counted: |
| ``slot_heat`` | ``[T, L, R*S]`` | tokens by slot, as the destination ranks counted them |
| ``epoch`` | ``[T, L]`` | epoch of each layer's placement while ``slot_heat`` was counted |
| ``placement_layer``, ``placement_epoch`` | ``[K]`` | of the placements below |
| ``placement_phy2log`` | ``[K, R, S]`` | the expert in each slot |
| ``source_heat`` | ``[T, R, L, E]`` | tokens by source rank before dispatch; may be absent |
| ``step``, ``tokens``, ``phase`` | ``[T]`` | the model's step number, its tokens (-1 unknown), index into ``phases`` |

The trace is written while serving. The group's attributes ``steps`` and ``placements`` state the number of valid rows
and are written last, so that flushed data survives a crash. Readers read it in slices.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_core.atomic_write import OutputError
from eplb_core.heat.window import Counts, HeatError
from eplb_core.placement import Float64, Int32, PlacementError, check_layer
from eplb_service.io.containers import Array
from eplb_service.io.routes import heat_of_slots
from eplb_service.io.trace import Int64, Trace, TraceFacts, checked_slice
from eplb_service.io.zarr_column import Column, read_metadata, reading_metadata, write_metadata

SUFFIX = ".zarr"
BATCH_STEPS = 64
"""Steps that are gathered before they are written; the most that a crash loses."""
_BATCH_BYTES = 64 << 20
"""Bytes of such steps; where they are large, fewer are gathered."""
_FORMAT, _VERSION = "eplb-trace", 1
_ARRAYS = {
    "step": ("int64", ("step",)),
    "tokens": ("int64", ("step",)),
    "phase": ("uint8", ("step",)),
    "heat": ("uint32", ("step", "layer", "expert")),
    "slot_heat": ("uint32", ("step", "layer", "physical")),
    "epoch": ("int64", ("step", "layer")),
    "source_heat": ("uint32", ("step", "rank", "layer", "expert")),
    "placement_layer": ("int32", ("placement",)),
    "placement_epoch": ("int64", ("placement",)),
    "placement_phy2log": ("int32", ("placement", "rank", "slot")),
}
"""Type and axes of each array, which grows along the first; ``physical`` are the slots of all ranks."""
_PLACEMENT_ARRAYS = ("placement_layer", "placement_epoch", "placement_phy2log")
_BY_EXPERT = frozenset(("step", "tokens", "phase", "heat"))
_BY_SLOT = frozenset(("step", "tokens", "phase", "slot_heat", "epoch", *_PLACEMENT_ARRAYS))
"""Arrays of a trace, of which each may have ``source_heat`` besides."""


def _sizes(facts: TraceFacts, layers: int, experts: int) -> dict[str, int]:
    """Size of each axis but the first."""
    shape = {"layer": layers, "expert": experts, "rank": facts.ranks, "slot": facts.slots}
    return {**shape, "physical": facts.ranks * facts.slots}


def _tail(name: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[axis] for axis in _ARRAYS[name][1][1:])


class StoredTrace(Trace):
    """A trace that ``TraceWriter`` wrote, or is still writing: as long as it was when it was opened.

    Raises
    ------
    HeatError
        Without the path, which callers put in front: where the folder holds no whole trace.
    """

    def __init__(self, folder: Path) -> None:
        from pydantic import TypeAdapter

        with reading_metadata(folder):
            self.metadata = read_metadata(folder, "group")
            found = dict(self.metadata["attributes"])
            if (found.get("format"), found.get("version")) != (_FORMAT, _VERSION):
                raise HeatError(
                    f"is no {_FORMAT} of version {_VERSION}: its attributes are {str(found)[:200]}"
                )
            known = {field.name: found[field.name] for field in fields(TraceFacts) if field.name in found}
            self.facts = TypeAdapter(TraceFacts).validate_python(known)
            self.counts = {axis: int(found[f"{axis}s"]) for axis in ("step", "placement")}
            """Rows that count of arrays with a row per step, and per placement."""
            experts = int(found["experts"])
        names = frozenset(name for name in _ARRAYS if (folder / name).is_dir())
        if names - {"source_heat"} not in (_BY_EXPERT, _BY_SLOT):
            raise HeatError(
                f"holds the arrays {', '.join(sorted(names))}: was it copied whole? a trace has "
                f"{', '.join(sorted(_BY_EXPERT))}, or {', '.join(sorted(_BY_SLOT))}"
            )
        self.columns = {name: Column.open(folder / name, *_ARRAYS[name]) for name in names}
        """All arrays, by name."""
        layers = self.columns["slot_heat" if self.by_slot else "heat"].tail[0]
        self._shape = self.counts["step"], layers, experts
        self._check_columns()
        self.placements: dict[tuple[int, int], Int32] = {}
        """Slots ``[R, S]`` by layer and epoch; empty where tokens were counted by logical expert."""
        if self.by_slot:
            self._read_placements()

    @property
    def shape(self) -> tuple[int, int, int]:
        """T, L and E."""
        return self._shape

    @property
    def by_slot(self) -> bool:
        """True where tokens were counted by slot."""
        return "slot_heat" in self.columns

    def heat(self, first: int, last: int) -> Counts:
        """Tokens by logical expert, ``[t, L, E]``, put together from the slots where those were counted."""
        heat_TLE = self._by_expert(first, last) if self.by_slot else self.columns["heat"].read(first, last)
        return checked_slice(heat_TLE, first)

    def slot_heat(self, first: int, last: int) -> tuple[Array, Int64]:
        """Tokens by slot ``[t, L, R*S]`` and the epochs ``[t, L]``; only where ``by_slot``."""
        return self.columns["slot_heat"].read(first, last), self.columns["epoch"].read(first, last)

    def source_rows(self, first: int, last: int) -> Array | None:
        """Tokens by source rank, step by step, ``[t, R, L, E]``."""
        return self.columns["source_heat"].read(first, last) if "source_heat" in self.columns else None

    def served_loads(self, first: int, last: int) -> Float64 | None:
        """Tokens that each rank received, float64 ``[t, L, R]``; ``None`` where only experts were counted."""
        if not self.by_slot:
            return None
        counts_TLP = self.columns["slot_heat"].read(first, last)
        shape = (last - first, self.layers, self.facts.ranks, self.facts.slots)
        loads_TLR: Float64 = counts_TLP.reshape(shape).sum(axis=3, dtype=np.float64)
        return loads_TLR

    def step_numbers(self, first: int, last: int) -> Int64:
        """The model's own numbers of the steps, int64 ``[t]``."""
        return self.columns["step"].read(first, last)

    def tokens(self, first: int, last: int) -> Int64 | None:
        """Tokens of each step, int64 ``[t]``; ``None`` where any of them is unknown."""
        tokens_T = self.columns["tokens"].read(first, last)
        return None if (tokens_T < 0).any() else tokens_T

    def phase_numbers(self, first: int, last: int) -> Int64:
        """Index into ``facts.phases`` of each step, int64 ``[t]``."""
        return self.columns["phase"].read(first, last).astype(np.int64)

    def _by_expert(self, first: int, last: int) -> Array:
        slot_heat_TLP, epoch_TL = self.slot_heat(first, last)
        heat_TLE = np.zeros((last - first, self.layers, self.experts), dtype=np.int64)
        for layer in range(self.layers):
            for epoch in np.unique(epoch_TL[:, layer]).tolist():
                phy2log_RS = self.placements.get((layer, epoch))
                if phy2log_RS is None:
                    raise HeatError(f"layer {layer} was counted at epoch {epoch}, whose placement is missing")
                at_T = epoch_TL[:, layer] == epoch
                counts_T1P = slot_heat_TLP[at_T, layer][:, None]
                heat_TLE[at_T, layer] = heat_of_slots(counts_T1P, phy2log_RS.ravel(), self.experts)[:, 0]
        return heat_TLE

    def _check_columns(self) -> None:
        sizes = _sizes(self.facts, self.layers, self.experts)
        for name, column in self.columns.items():
            count, tail = self.counts[_ARRAYS[name][1][0]], _tail(name, sizes)
            if not 0 < count <= column.rows or column.tail != tail:
                raise HeatError(
                    f"{name} has {column.rows} rows {list(column.tail)}, of which {count} count; expected {list(tail)}"
                )

    def _read_placements(self) -> None:
        count = self.counts["placement"]
        layer_K, epoch_K, phy2log_KRS = (self.columns[name].read(0, count) for name in _PLACEMENT_ARRAYS)
        for layer, epoch, phy2log_RS in zip(layer_K.tolist(), epoch_K.tolist(), phy2log_KRS, strict=True):
            try:
                check_layer(phy2log_RS, self.experts, f"layer {layer} at epoch {epoch}")
            except PlacementError as error:
                raise HeatError(str(error)) from error
            self.placements[layer, epoch] = phy2log_RS


class TraceWriter:
    """A trace that grows; one writer at a time.

    Makes the folder ``path`` with the first steps that are written, or goes on with it where it holds a trace of the
    same deployment, with ``layers`` and ``experts``. Of ``facts``, ``ranks`` and ``slots`` must be set to record tokens
    by slot or by source rank. The first steps decide which of these the trace has. Raises ``OutputError`` where nothing
    can be written there, ``HeatError`` where a trace of something else is there.
    """

    def __init__(self, path: Path, facts: TraceFacts, layers: int, experts: int) -> None:
        self.path = path
        self.placements: dict[tuple[int, int], Int32] = {}
        """Slots ``[R, S]`` by layer and epoch, given so far."""
        self._facts, self._layers, self._experts = facts, layers, experts
        self._sizes = _sizes(facts, layers, experts)
        self._names: Set[str] = frozenset()
        self._waiting: defaultdict[str, list[Array]] = defaultdict(list)
        self._metadata: dict[str, Any] = {}
        self._columns: dict[str, Column] = {}
        self._counts = {"step": 0, "placement": 0}
        if path.exists():
            self._go_on()
        self.steps = self._counts["step"]
        """Steps given so far, those that wait to be written included."""

    @property
    def by_source(self) -> bool:
        """True where the trace has tokens by source rank; so far none where it has no steps."""
        return "source_heat" in self._names

    def append(
        self,
        counts: npt.ArrayLike,
        epoch_TL: npt.ArrayLike | None = None,
        *,
        step_T: npt.ArrayLike | None = None,
        tokens_T: npt.ArrayLike | None = None,
        phase_T: npt.ArrayLike | None = None,
        source_TRLE: npt.ArrayLike | None = None,
    ) -> None:
        """Add steps, with what is known of them.

        ``counts`` are ``[t, L, E]``, by logical expert, or ``[t, L, R*S]``, by slot, with ``epoch_TL``, the epoch of
        each layer, that ``place`` named. ``step_T`` are the model's own numbers, counted on where not given;
        ``tokens_T`` and ``phase_T`` tokens and index of the phase of each step; ``source_TRLE`` tokens by source rank,
        ``[t, R, L, E]``, before dispatch.
        """
        steps = np.shape(counts)[0]
        given = {
            "heat" if epoch_TL is None else "slot_heat": _counts(counts),
            "step": np.arange(self.steps, self.steps + steps) if step_T is None else step_T,
            "tokens": np.full(steps, -1) if tokens_T is None else tokens_T,
            "phase": np.zeros(steps) if phase_T is None else phase_T,
            "epoch": epoch_TL,
            "source_heat": None if source_TRLE is None else _counts(source_TRLE),
        }
        rows = {name: np.array(part, _ARRAYS[name][0]) for name, part in given.items() if part is not None}
        if self._names and rows.keys() != self._names:
            raise HeatError(f"steps with {sorted(rows)} cannot go on with those of {sorted(self._names)}")
        for name, part in rows.items():
            wanted = (steps, *_tail(name, self._sizes))
            if part.shape != wanted:
                raise HeatError(f"{name} has the shape {list(wanted)}, got {list(part.shape)}")
        self._names = rows.keys()
        self.steps += steps
        for name, part in rows.items():
            self._waiting[name].append(part)
        waiting = [part for name in rows for part in self._waiting[name]]
        if (
            sum(map(len, self._waiting["step"])) >= BATCH_STEPS
            or sum(part.nbytes for part in waiting) > _BATCH_BYTES
        ):
            self.flush()

    def place(self, layer: int, epoch: int, phy2log_RS: Int32) -> None:
        """Record which expert is in each slot of ``layer`` at ``epoch``.

        A placement that is known already is not written again. Raises ``HeatError`` where another one is known.
        """
        known = self.placements.get((layer, epoch))
        if known is None:
            self.placements[layer, epoch] = row_RS = np.array(phy2log_RS, np.int32)
            for name, value in zip(_PLACEMENT_ARRAYS, (layer, epoch, row_RS), strict=True):
                self._waiting[name].append(np.array([value], _ARRAYS[name][0]))
        elif not np.array_equal(known, phy2log_RS):
            raise HeatError(
                f"{self.path}: has another placement under the same epochs, of layer {layer} under {epoch}: the "
                f"deployment was restarted; its {self.steps} steps are kept, record on into another file"
            )

    def flush(self) -> None:
        """Write what waits, once there are steps; raises ``OutputError`` where the disk refuses."""
        if not self._waiting["step"]:
            return
        rows = {name: np.concatenate(parts) for name, parts in self._waiting.items() if parts}
        with self._writing():
            if not self._metadata:
                self._begin(rows)
            for name, part in rows.items():
                self._columns[name].write(self._counts[_ARRAYS[name][1][0]], part)
            self._counts["step"] += len(rows["step"])
            self._counts["placement"] = len(self.placements)
            self._metadata["attributes"] |= {f"{axis}s": count for axis, count in self._counts.items()}
            write_metadata(self.path, self._metadata)
        self._waiting.clear()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be written ({error.strerror or error})") from error

    def _begin(self, rows: Mapping[str, Array]) -> None:
        self.path.mkdir()
        head = {"format": _FORMAT, "version": _VERSION, "experts": self._experts}
        attributes = {**head, **asdict(self._facts), "steps": 0, "placements": 0}
        self._metadata = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
        write_metadata(self.path, self._metadata)
        self._columns = {
            name: Column.create(self.path / name, *_ARRAYS[name], part.shape[1:])
            for name, part in rows.items()
        }

    def _go_on(self) -> None:
        try:
            stored = StoredTrace(self.path)
        except HeatError as error:
            raise HeatError(f"{self.path}: {error}") from error
        found = _described(stored.facts, stored.layers, stored.experts)
        wanted = _described(self._facts, self._layers, self._experts)
        if found != wanted:
            raise HeatError(f"{self.path}: is a trace of {found}; to be recorded are {wanted}")
        self._metadata, self._columns, self._counts = stored.metadata, stored.columns, stored.counts
        self._names, self.placements = stored.columns.keys() - set(_PLACEMENT_ARRAYS), stored.placements


def _described(facts: TraceFacts, layers: int, experts: int) -> str:
    on = f" on {facts.ranks} ranks of {facts.slots} slots" if facts.ranks else ""
    return f"{experts} experts in {layers} layers{on}, in the phases {', '.join(facts.phases)}"


def _counts(values: npt.ArrayLike) -> Array:
    """Counts as uint32; raises ``HeatError`` on fractions, on negative ones, and on those past 2**32."""
    array = np.asarray(values)
    with np.errstate(invalid="ignore"):
        counts = array.astype(np.uint32)
    wrong = array[counts != array]
    if wrong.size:
        raise HeatError(
            f"a trace records whole tokens below 2**32, got {wrong[0]}; scale and round them first"
        )
    return counts
