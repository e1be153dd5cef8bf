"""Writes the native trace while serving: what has been flushed survives a crash."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from eplb_service.atomic_write import OutputError
from eplb_service.heat.window import HeatError, checked_heat
from eplb_service.io.containers.numpy_file import Array
from eplb_service.io.containers.zarr_array import ZarrArray
from eplb_service.io.native import layout as native_layout
from eplb_service.io.trace import TraceFacts
from eplb_service.placement import Int32

BATCH_STEPS = 64
"""Steps that are gathered before they are written; the most that a crash loses."""

_ROW = ("step",)
_SOURCES = "source_heat"


class TraceWriter:
    """A trace that grows; one writer at a time.

    Parameters
    ----------
    path
        Folder to make, or, where it holds a trace of the same deployment, to go on with.
    facts
        What is known of the deployment; ``ranks`` and ``slots`` must be set for ``append_slots``.
    layers, experts
        L and E.
    by_slot
        Record tokens by slot (``append_slots``) instead of by logical expert (``append``).
    sources
        Record tokens by source rank too; ``None`` to do so where the first steps bring them.

    ``sources`` is whether they are recorded, ``None`` while that is open. Raises ``OutputError`` where nothing can
    be written there, ``HeatError`` where a trace of something else is there.
    """

    def __init__(
        self,
        path: Path,
        facts: TraceFacts,
        layers: int,
        experts: int,
        *,
        by_slot: bool = False,
        sources: bool | None = False,
    ) -> None:
        self.path = path
        self._waiting: dict[str, list[Array]] = {}
        self._count = 0
        self.sources = sources
        self._shapes = _shapes(facts, layers, experts, by_slot, sources is not False)
        try:
            self._arrays = self._go_on(facts, experts) if path.exists() else self._begin(facts, experts)
        except OSError as error:
            raise OutputError(f"{path}: cannot be written ({error.strerror})") from error
        self._end = min(
            array.rows for name, array in self._arrays.items() if name in native_layout.STEP_ARRAYS
        )

    @property
    def steps(self) -> int:
        """Steps given so far, those that wait to be written included."""
        return self._end + self._count

    def append(
        self,
        heat_TLE: npt.ArrayLike,
        *,
        step_T: npt.ArrayLike | None = None,
        tokens_T: npt.ArrayLike | None = None,
        phase_T: npt.ArrayLike | None = None,
        source_TRLE: npt.ArrayLike | None = None,
    ) -> None:
        """Add steps by logical expert, ``[t, L, E]`` counts, with what is known of them (``[t]`` each).

        Parameters
        ----------
        heat_TLE
            ``[t, L, E]``, counts by logical expert.
        step_T
            The model's own number of each step; counted on where not given.
        tokens_T, phase_T
            Tokens of each step, and index of its phase; unknown where not given.
        source_TRLE
            Tokens by source rank, ``[t, R, L, E]``, before dispatch.
        """
        rows = self._step_rows(np.asarray(heat_TLE).shape[0], step_T, tokens_T, phase_T, source_TRLE)
        self._add({"heat": _counts(heat_TLE), **rows})

    def append_slots(
        self,
        slot_heat_TLP: npt.ArrayLike,
        epoch_TL: npt.ArrayLike,
        *,
        step_T: npt.ArrayLike | None = None,
        tokens_T: npt.ArrayLike | None = None,
        phase_T: npt.ArrayLike | None = None,
        source_TRLE: npt.ArrayLike | None = None,
    ) -> None:
        """Add steps by slot, ``[t, L, R*S]``, each layer under the epoch that ``place`` named, ``[t, L]``.

        Parameters
        ----------
        slot_heat_TLP
            ``[t, L, R*S]``, counts by physical slot.
        epoch_TL
            ``[t, L]``, the epoch of each layer, one that ``place`` named.
        step_T
            The model's own number of each step; counted on where not given.
        tokens_T, phase_T
            Tokens of each step, and index of its phase; unknown where not given.
        source_TRLE
            Tokens by source rank, ``[t, R, L, E]``, before dispatch.
        """
        rows = self._step_rows(np.asarray(slot_heat_TLP).shape[0], step_T, tokens_T, phase_T, source_TRLE)
        self._add(
            {"slot_heat": _counts(slot_heat_TLP), "epoch": np.asarray(epoch_TL, dtype=np.int64), **rows}
        )

    def place(self, layer: int, epoch: int, phy2log_RS: Int32) -> None:
        """Record which expert is in each slot of ``layer`` at ``epoch``; written at once."""
        rows: dict[str, Array] = {
            "placement_layer": np.array([layer], dtype=np.int32),
            "placement_epoch": np.array([epoch], dtype=np.int64),
            "placement_phy2log": np.asarray(phy2log_RS, dtype=np.int32)[None],
        }
        end = min(self._arrays[name].rows for name in rows)
        for name, row in rows.items():
            self._arrays[name].write(end, row)
        for name in rows:
            self._arrays[name].commit(end + 1)

    def flush(self) -> None:
        """Write what waits; raises ``OutputError`` where the disk refuses."""
        if not self._count:
            return
        for name, parts in self._waiting.items():
            self._arrays[name].write(self._end, np.concatenate(parts))
        self._end += self._count
        self._waiting, self._count = {}, 0
        for name in native_layout.STEP_ARRAYS:
            if name in self._arrays:
                self._arrays[name].commit(self._end)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()

    def placements(self) -> dict[tuple[int, int], Int32]:
        """Slots ``[R, S]`` by layer and epoch, as they are in the trace."""
        columns = [self._arrays[name] for name in native_layout.PLACEMENT_ARRAYS]
        rows = min(array.rows for array in columns)
        layer_K, epoch_K, phy2log_KRS = (array.read(0, rows) for array in columns)
        known = zip(layer_K.tolist(), epoch_K.tolist(), strict=True)
        return {key: row.astype(np.int32) for key, row in zip(known, phy2log_KRS, strict=True)}

    def _begin(self, facts: TraceFacts, experts: int) -> dict[str, ZarrArray]:
        self.path.mkdir()
        arrays = {
            name: self._create(name) for name in self._shapes if name != _SOURCES or self.sources is not None
        }
        native_layout.write_head(self.path, facts, experts)
        return arrays

    def _create(self, name: str) -> ZarrArray:
        tail, dtype, names = self._shapes[name]
        return ZarrArray.create(self.path / name, tail, dtype, names)

    def _go_on(self, facts: TraceFacts, experts: int) -> dict[str, ZarrArray]:
        try:
            found_facts, found_experts = native_layout.read_head(self.path)
            arrays = native_layout.open_arrays(self.path)
        except HeatError as error:
            raise HeatError(f"{self.path}: {error}") from error
        if self.sources is None:
            self.sources = _SOURCES in arrays
        found = {name: array.tail for name, array in arrays.items()}
        wanted = {
            name: tail for name, (tail, _, _) in self._shapes.items() if name != _SOURCES or self.sources
        }
        of_found = (found_experts, found_facts.ranks, found_facts.slots, found_facts.phases)
        if found != wanted or of_found != (experts, facts.ranks, facts.slots, facts.phases):
            raise HeatError(
                f"{self.path}: is a trace of {_described(found, found_experts)}; "
                f"to be recorded are {_described(wanted, experts)}"
            )
        return arrays

    def _step_rows(
        self,
        steps: int,
        step_T: npt.ArrayLike | None,
        tokens_T: npt.ArrayLike | None,
        phase_T: npt.ArrayLike | None,
        source_TRLE: npt.ArrayLike | None,
    ) -> dict[str, Array]:
        numbers = np.arange(self.steps, self.steps + steps) if step_T is None else step_T
        rows: dict[str, Array] = {
            "step": np.asarray(numbers, dtype=np.int64),
            "tokens": np.asarray(np.full(steps, -1) if tokens_T is None else tokens_T, dtype=np.int64),
            "phase": np.asarray(np.zeros(steps) if phase_T is None else phase_T, dtype=np.uint8),
        }
        if self.sources is None:
            self.sources = source_TRLE is not None
            if self.sources:
                self._arrays[_SOURCES] = self._create(_SOURCES)
        if self.sources:
            if source_TRLE is None:
                raise HeatError("source heat was announced, but these steps come without it")
            rows[_SOURCES] = _counts(source_TRLE)
        return rows

    def _add(self, rows: dict[str, Array]) -> None:
        steps = len(rows["step"])
        for name, part in rows.items():
            wanted = (steps, *self._arrays[name].tail)
            if part.shape != wanted:
                raise HeatError(f"{name} has the shape {list(wanted)}, got {list(part.shape)}")
        for name, part in rows.items():
            self._waiting.setdefault(name, []).append(np.array(part))
        self._count += steps
        if self._count >= BATCH_STEPS:
            self.flush()


def _counts(values: npt.ArrayLike) -> Array:
    """Counts as uint32; raises ``HeatError`` on fractions, on negative ones, and on those past 2**32."""
    array = np.asarray(values)
    if array.dtype.kind != "u":
        checked_heat(array.reshape(array.shape[0], -1, array.shape[-1]) if array.ndim == 4 else array)
    if array.dtype.kind == "f" and not np.array_equal(array, np.floor(array)):
        raise HeatError("a trace records whole tokens, got fractions; scale and round them first")
    if array.size and array.max() > np.iinfo(np.uint32).max:
        raise HeatError(f"a trace records counts below 2**32, got {array.max()}")
    return array.astype(np.uint32)


def _described(tails: dict[str, tuple[int, ...]], experts: int) -> str:
    arrays = ", ".join(f"{name} {list(tail)}" for name, tail in tails.items() if len(tail) > 1)
    return f"{experts} experts with {arrays}"


def _shapes(
    facts: TraceFacts, layers: int, experts: int, by_slot: bool, sources: bool
) -> dict[str, tuple[tuple[int, ...], str, tuple[str, ...]]]:
    """Rows, type and axis names of each array that the trace will have."""
    if (by_slot or sources) and not facts.ranks:
        raise HeatError("recording by slot or by source needs to know the ranks")
    shapes: dict[str, tuple[tuple[int, ...], str, tuple[str, ...]]] = {
        "step": ((), "int64", _ROW),
        "tokens": ((), "int64", _ROW),
        "phase": ((), "uint8", _ROW),
    }
    if by_slot:
        slots = (facts.ranks, facts.slots)
        shapes["slot_heat"] = ((layers, facts.ranks * facts.slots), "uint32", (*_ROW, "layer", "slot"))
        shapes["epoch"] = ((layers,), "int64", (*_ROW, "layer"))
        shapes["placement_layer"] = ((), "int32", ("placement",))
        shapes["placement_epoch"] = ((), "int64", ("placement",))
        shapes["placement_phy2log"] = (slots, "int32", ("placement", "rank", "slot"))
    else:
        shapes["heat"] = ((layers, experts), "uint32", (*_ROW, "layer", "expert"))
    if sources:
        shapes[_SOURCES] = ((facts.ranks, layers, experts), "uint32", (*_ROW, "rank", "layer", "expert"))
    return shapes
