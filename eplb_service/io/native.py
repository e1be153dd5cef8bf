"""The native trace: a Zarr v3 folder with the heat of each step and the placements in use when it was counted.

| array | shape | content |
|---|---|---|
| ``heat`` | ``[T, L, E]`` | tokens by logical expert; absent from a trace by slot |
| ``slot_heat`` | ``[T, L, R*S]`` | tokens by slot, counted by the destination ranks; only in a trace by slot |
| ``epoch`` | ``[T, L]`` | epoch of each layer's placement in that step; only in a trace by slot |
| ``placement_layer``, ``placement_epoch`` | ``[K]`` | layer and epoch of each recorded placement |
| ``placement_phy2log`` | ``[K, R, S]`` | expert in each slot of each recorded placement |
| ``source_heat`` | ``[T, R, L, E]`` | tokens by source rank before dispatch; optional |
| ``step``, ``tokens``, ``phase`` | ``[T]`` | the model's step number, tokens (-1 if unknown), index into ``phases`` |

The trace is written while the model serves. The group's attributes ``steps`` and ``placements`` state the number of
valid rows. They are written last, so that flushed data survives a crash. Readers read the trace in slices.
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
"""Number of steps buffered before a write, and the maximum number that a crash can lose."""
_BATCH_BYTES = 64 << 20
"""Buffer size, in bytes, that triggers an earlier write if steps are large."""
_FORMAT = "eplb-trace"
_VERSION = 1
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
"""Type and axes of each array. Arrays grow along the first axis; the ``physical`` axis covers the slots of all
ranks."""
_PLACEMENT_ARRAYS = ("placement_layer", "placement_epoch", "placement_phy2log")
_BY_EXPERT = frozenset(("step", "tokens", "phase", "heat"))
_BY_SLOT = frozenset(("step", "tokens", "phase", "slot_heat", "epoch", *_PLACEMENT_ARRAYS))
"""Arrays of a trace by expert and of a trace by slot. Either kind may also have ``source_heat``."""


def _sizes(facts: TraceFacts, layers: int, experts: int) -> dict[str, int]:
    """Return the size of each axis other than the first."""
    shape = {"layer": layers, "expert": experts, "rank": facts.ranks, "slot": facts.slots}
    return {**shape, "physical": facts.ranks * facts.slots}


def _tail(name: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of one row of an array."""
    return tuple(sizes[axis] for axis in _ARRAYS[name][1][1:])


class StoredTrace(Trace):
    """A trace that ``TraceWriter`` has written or is still writing. Its length is fixed when it is opened.

    Parameters
    ----------
    folder
        Folder of the trace.

    Raises
    ------
    HeatError
        If the folder is not a complete trace. The message does not name the path; callers add it.
    """

    def __init__(self, folder: Path) -> None:
        from pydantic import TypeAdapter

        with reading_metadata(folder):
            self.metadata = read_metadata(folder, "group")
            attributes = dict(self.metadata["attributes"])
            if (attributes.get("format"), attributes.get("version")) != (_FORMAT, _VERSION):
                raise HeatError(
                    f"is not an {_FORMAT} file of version {_VERSION}: its attributes are {str(attributes)[:200]}"
                )
            names_of_facts = [field.name for field in fields(TraceFacts) if field.name in attributes]
            self.facts = TypeAdapter(TraceFacts).validate_python(
                {name: attributes[name] for name in names_of_facts}
            )
            self.counts = {axis: int(attributes[f"{axis}s"]) for axis in ("step", "placement")}
            """Number of valid rows in the per-step arrays and in the per-placement arrays."""
            experts = int(attributes["experts"])
        names = frozenset(name for name in _ARRAYS if (folder / name).is_dir())
        if names - {"source_heat"} not in (_BY_EXPERT, _BY_SLOT):
            raise HeatError(
                f"holds the arrays {', '.join(sorted(names))}, so it may be an incomplete copy; a trace has "
                f"{', '.join(sorted(_BY_EXPERT))}, or {', '.join(sorted(_BY_SLOT))}"
            )
        self.columns = {name: Column.open(folder / name, *_ARRAYS[name]) for name in names}
        """All arrays, keyed by name."""
        layers = self.columns["slot_heat" if self.by_slot else "heat"].tail[0]
        self._shape = self.counts["step"], layers, experts
        self._check_columns()
        self.placements: dict[tuple[int, int], Int32] = {}
        """Expert in each slot, ``[R, S]``, keyed by layer and epoch. Empty for a trace by expert."""
        if self.by_slot:
            self._read_placements()

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of steps T, layers L and experts E."""
        return self._shape

    @property
    def by_slot(self) -> bool:
        """True if the tokens were counted by slot."""
        return "slot_heat" in self.columns

    def heat(self, first: int, last: int) -> Counts:
        """Return the tokens by logical expert, ``[t, L, E]``. In a trace by slot, they are summed over the replicas."""
        heat_TLE = self._by_expert(first, last) if self.by_slot else self.columns["heat"].read(first, last)
        return checked_slice(heat_TLE, first)

    def slot_heat(self, first: int, last: int) -> tuple[Array, Int64]:
        """Return the tokens by slot ``[t, L, R*S]`` and the epochs ``[t, L]`` of a trace by slot."""
        return self.columns["slot_heat"].read(first, last), self.columns["epoch"].read(first, last)

    def source_rows(self, first: int, last: int) -> Array | None:
        """Return the source heat of each step, ``[t, R, L, E]``, or ``None`` if it was not recorded."""
        return self.columns["source_heat"].read(first, last) if "source_heat" in self.columns else None

    def served_loads(self, first: int, last: int) -> Float64 | None:
        """Return the load of each rank, float64 ``[t, L, R]``, or ``None`` for a trace by expert."""
        if not self.by_slot:
            return None
        counts_TLP = self.columns["slot_heat"].read(first, last)
        shape = (last - first, self.layers, self.facts.ranks, self.facts.slots)
        loads_TLR: Float64 = counts_TLP.reshape(shape).sum(axis=3, dtype=np.float64)
        return loads_TLR

    def served_placements(self, first: int, last: int) -> list[list[Int32]]:
        """Return each layer's placements ``[R, S]`` that served the steps, in order; empty if unknown."""
        if not self.by_slot:
            return []
        epoch_TL = self.columns["epoch"].read(first, last)
        return [
            [self.placements[layer, epoch] for epoch in dict.fromkeys(epoch_TL[:, layer].tolist())]
            for layer in range(self.layers)
        ]

    def step_numbers(self, first: int, last: int) -> Int64:
        """Return the model's own step numbers, int64 ``[t]``."""
        return self.columns["step"].read(first, last)

    def tokens(self, first: int, last: int) -> Int64 | None:
        """Return the number of tokens in each step, int64 ``[t]``, or ``None`` if it is unknown for any of them."""
        tokens_T = self.columns["tokens"].read(first, last)
        return None if (tokens_T < 0).any() else tokens_T

    def phase_numbers(self, first: int, last: int) -> Int64:
        """Return the phase of each step as an index into ``facts.phases``, int64 ``[t]``."""
        return self.columns["phase"].read(first, last).astype(np.int64)

    def _by_expert(self, first: int, last: int) -> Array:
        """Return the tokens by logical expert, ``[t, L, E]``, using the placement at each layer's epoch."""
        slot_heat_TLP, epoch_TL = self.slot_heat(first, last)
        heat_TLE = np.zeros((last - first, self.layers, self.experts), dtype=np.int64)
        for layer in range(self.layers):
            for epoch in np.unique(epoch_TL[:, layer]).tolist():
                phy2log_RS = self.placements.get((layer, epoch))
                if phy2log_RS is None:
                    raise HeatError(
                        f"layer {layer} was counted at epoch {epoch}, but the trace has no placement for this epoch"
                    )
                in_epoch_T = epoch_TL[:, layer] == epoch
                counts_T1P = slot_heat_TLP[in_epoch_T, layer][:, None]
                heat_TLE[in_epoch_T, layer] = heat_of_slots(counts_T1P, phy2log_RS.ravel(), self.experts)[
                    :, 0
                ]
        return heat_TLE

    def _check_columns(self) -> None:
        sizes = _sizes(self.facts, self.layers, self.experts)
        for name, column in self.columns.items():
            count = self.counts[_ARRAYS[name][1][0]]
            tail = _tail(name, sizes)
            if not 0 < count <= column.rows or column.tail != tail:
                raise HeatError(
                    f"{name} has {column.rows} rows of shape {list(column.tail)}, but the attributes claim {count} "
                    f"rows of shape {list(tail)}"
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
    """Writer for a native trace. A trace may have only one writer at a time.

    If the folder exists, it must contain a trace of the same deployment, and new steps are appended to it. Otherwise,
    the folder is created when the first steps are written. The first steps determine whether the trace is by expert or
    by slot, and whether it has source heat.

    Parameters
    ----------
    path
        Folder of the trace.
    facts
        Facts about the recording. ``ranks`` and ``slots`` are required to record tokens by slot or source heat.
    layers
        Number of layers L.
    experts
        Number of experts E.

    Raises
    ------
    OutputError
        If the folder cannot be written.
    HeatError
        If the folder contains anything other than a trace of the same deployment.

    Examples
    --------
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp()) / "example.zarr"
    >>> with TraceWriter(folder, TraceFacts(model="toy"), layers=1, experts=2) as writer:
    ...     writer.append([[[3, 1]], [[2, 4]]], tokens_T=[4, 6])
    >>> StoredTrace(folder).heat(0, 2)[:, 0]
    array([[3, 1],
           [2, 4]])
    """

    def __init__(self, path: Path, facts: TraceFacts, layers: int, experts: int) -> None:
        self.path = path
        self.placements: dict[tuple[int, int], Int32] = {}
        """Expert in each slot, ``[R, S]``, keyed by layer and epoch, for the placements recorded so far."""
        self._facts = facts
        self._layers = layers
        self._experts = experts
        self._sizes = _sizes(facts, layers, experts)
        self._names: Set[str] = frozenset()
        self._pending: defaultdict[str, list[Array]] = defaultdict(list)
        self._metadata: dict[str, Any] = {}
        self._columns: dict[str, Column] = {}
        self._counts = {"step": 0, "placement": 0}
        if path.exists():
            self._resume()
        self.steps = self._counts["step"]
        """Number of steps appended so far, including those not yet written."""

    @property
    def by_source(self) -> bool:
        """True if the trace has source heat. False until the first steps are appended."""
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
        """Append steps, which are written in batches.

        Parameters
        ----------
        counts
            Tokens by logical expert ``[t, L, E]``, or by slot ``[t, L, R*S]``.
        epoch_TL
            Epoch of each layer's placement, ``[t, L]``, for tokens by slot. Record the placements themselves with
            ``place``.
        step_T
            The model's own step numbers; by default, they continue from the number of steps in the trace.
        tokens_T
            Number of tokens in each step.
        phase_T
            Phase of each step, as an index into ``facts.phases``.
        source_TRLE
            Tokens by source rank before dispatch, ``[t, R, L, E]``.

        Raises
        ------
        HeatError
            If a count is not an unsigned 32-bit integer, or if the arrays do not match those already in the trace.
        """
        steps = np.shape(counts)[0]
        optional_arrays = {
            "heat" if epoch_TL is None else "slot_heat": _counts(counts),
            "step": np.arange(self.steps, self.steps + steps) if step_T is None else step_T,
            "tokens": np.full(steps, -1) if tokens_T is None else tokens_T,
            "phase": np.zeros(steps) if phase_T is None else phase_T,
            "epoch": epoch_TL,
            "source_heat": None if source_TRLE is None else _counts(source_TRLE),
        }
        rows = {
            name: np.array(array, _ARRAYS[name][0])
            for name, array in optional_arrays.items()
            if array is not None
        }
        if self._names and rows.keys() != self._names:
            raise HeatError(f"cannot append steps with {sorted(rows)} to steps with {sorted(self._names)}")
        for name, array in rows.items():
            shape = (steps, *_tail(name, self._sizes))
            if array.shape != shape:
                raise HeatError(f"{name} has shape {list(array.shape)}; expected {list(shape)}")
        self._names = rows.keys()
        self.steps += steps
        for name, array in rows.items():
            self._pending[name].append(array)
        pending_bytes = sum(array.nbytes for name in rows for array in self._pending[name])
        if sum(map(len, self._pending["step"])) >= BATCH_STEPS or pending_bytes > _BATCH_BYTES:
            self.flush()

    def place(self, layer: int, epoch: int, phy2log_RS: Int32) -> None:
        """Record the expert in each slot of ``layer`` at ``epoch``.

        A placement that is already recorded is not written again. Raises ``HeatError`` if a different placement is
        already recorded for this layer and epoch.
        """
        recorded_RS = self.placements.get((layer, epoch))
        if recorded_RS is None:
            row_RS = np.array(phy2log_RS, np.int32)
            self.placements[layer, epoch] = row_RS
            for name, value in zip(_PLACEMENT_ARRAYS, (layer, epoch, row_RS), strict=True):
                self._pending[name].append(np.array([value], _ARRAYS[name][0]))
        elif not np.array_equal(recorded_RS, phy2log_RS):
            raise HeatError(
                f"{self.path}: has a different placement of layer {layer} at epoch {epoch}, because the deployment was "
                f"restarted; its {self.steps} steps are kept, so continue the recording in another file"
            )

    def flush(self) -> None:
        """Write the pending steps and placements, if any steps are pending. Raises ``OutputError`` if writing fails."""
        if not self._pending["step"]:
            return
        rows = {name: np.concatenate(arrays) for name, arrays in self._pending.items() if arrays}
        with self._writing():
            if not self._metadata:
                self._begin(rows)
            for name, array in rows.items():
                self._columns[name].write(self._counts[_ARRAYS[name][1][0]], array)
            self._counts["step"] += len(rows["step"])
            self._counts["placement"] = len(self.placements)
            self._metadata["attributes"] |= {f"{axis}s": count for axis, count in self._counts.items()}
            write_metadata(self.path, self._metadata)
        self._pending.clear()

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
        """Create the folder and an empty array for each name in ``rows``."""
        self.path.mkdir()
        head = {"format": _FORMAT, "version": _VERSION, "experts": self._experts}
        attributes = {**head, **asdict(self._facts), "steps": 0, "placements": 0}
        self._metadata = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
        write_metadata(self.path, self._metadata)
        self._columns = {
            name: Column.create(self.path / name, *_ARRAYS[name], array.shape[1:])
            for name, array in rows.items()
        }

    def _resume(self) -> None:
        """Continue the trace in the folder. Raises ``HeatError`` if it belongs to a different deployment."""
        try:
            stored = StoredTrace(self.path)
        except HeatError as error:
            raise HeatError(f"{self.path}: {error}") from error
        stored_deployment = _described(stored.facts, stored.layers, stored.experts)
        new_deployment = _described(self._facts, self._layers, self._experts)
        if stored_deployment != new_deployment:
            raise HeatError(
                f"{self.path}: is a trace of {stored_deployment}, but the recording has {new_deployment}; "
                "choose another file"
            )
        self._metadata = stored.metadata
        self._columns = stored.columns
        self._counts = stored.counts
        self._names = stored.columns.keys() - set(_PLACEMENT_ARRAYS)
        self.placements = stored.placements


def _described(facts: TraceFacts, layers: int, experts: int) -> str:
    """Describe a deployment for a message. Recordings with equal descriptions can share a trace."""
    ranks = f" on {facts.ranks} ranks with {facts.slots} slots each" if facts.ranks else ""
    return f"{experts} experts in {layers} layers{ranks}, with phases {', '.join(facts.phases)}"


def _counts(values: npt.ArrayLike) -> Array:
    """Return counts as uint32. Raises ``HeatError`` if a count is fractional, negative, or at least 2**32."""
    array = np.asarray(values)
    with np.errstate(invalid="ignore"):
        counts = array.astype(np.uint32)
    invalid = array[counts != array]
    if invalid.size:
        raise HeatError(
            f"has a count of {invalid[0]}; a native trace records whole token counts below 2**32; "
            "scale and round the counts"
        )
    return counts
