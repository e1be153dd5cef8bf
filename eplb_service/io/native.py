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

It is written while serving: the group's attributes ``steps`` and ``placements`` name the rows that count and are
written last, so that what has been flushed survives a crash. It is read in slices. Zarr is read and written by the
package of that name, which is imported only here; chunks are inflated in bounds before it sees them.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_service.atomic_write import OutputError
from eplb_service.heat.window import Counts, HeatError, checked_heat
from eplb_service.io.containers import Array, check_fits_memory, one_line
from eplb_service.io.routes import heat_of_slots
from eplb_service.io.trace import Int64, Trace, TraceFacts, checked_slice
from eplb_service.placement import Float64, Int32, PlacementError, check_layer

SUFFIX = ".zarr"
METADATA = "zarr.json"
BATCH_STEPS = 64
"""Steps that are gathered before they are written; the most that a crash loses."""
_FORMAT, _VERSION = "eplb-trace", 1
_STEP_ARRAYS = ("step", "tokens", "phase", "heat", "slot_heat", "epoch", "source_heat")
"""Arrays with a row per step."""
_PLACEMENT_ARRAYS = ("placement_layer", "placement_epoch", "placement_phy2log")
"""Arrays with a row per placement."""
_SOURCES = "source_heat"
_CHUNK_BYTES = 4 << 20
_MOST_CHUNK_STEPS = 1024
_MOST_METADATA_BYTES = 1 << 20
_MOST_CHUNK_BYTES = 1 << 30
_GZIP = 31
"""zlib's word for a gzip header and trailer, with the checksum that shows damage."""
_EVERY_CHUNK = {"write_empty_chunks": True}
"""A chunk that is not there is no chunk of zeros: the trace was not copied whole."""
_TYPES = ("uint8", "int32", "uint32", "int64", "float64")


def check_zarr() -> None:
    """Raise ``HeatError`` (without a path) where the package is missing."""
    try:
        import zarr  # noqa: F401
    except ImportError as error:
        raise HeatError(
            f"is Zarr, for which zarr is needed: pip install 'eplb-service[zarr]', on Python 3.11 or later ({error})"
        ) from error


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    """Within it, whatever Zarr says of damaged metadata ends in a ``HeatError`` of one line."""
    try:
        yield
    except (HeatError, MemoryError):
        raise
    except Exception as error:
        raise HeatError(
            f"{name}/{METADATA} cannot be read, or is none of Zarr 3 ({one_line(error)})"
        ) from error


class _Column:
    """One array of a trace, which grows along its first axis; ``rows`` are those that count."""

    def __init__(self, array: Any, folder: Path) -> None:
        self._array = array
        self._folder = folder
        self._kept: tuple[int, Array] | None = None
        self.rows: int = array.shape[0]
        self.tail: tuple[int, ...] = tuple(array.shape[1:])

    @classmethod
    def create(cls, folder: Path, tail: tuple[int, ...], dtype: str, names: tuple[str, ...]) -> _Column:
        """Make an empty array; ``names`` are those of all axes."""
        import zarr

        chunk = 1 << (_CHUNK_BYTES // (np.dtype(dtype).itemsize * math.prod(tail))).bit_length() >> 1
        array = zarr.create_array(
            folder,
            shape=(0, *tail),
            chunks=(min(max(1, chunk), _MOST_CHUNK_STEPS), *tail),
            dtype=dtype,
            compressors=zarr.codecs.GzipCodec(level=1),
            fill_value=0,
            dimension_names=names,
            config=_EVERY_CHUNK,
        )
        return cls(array, folder)

    @classmethod
    def open(cls, folder: Path, mode: str = "r") -> _Column:
        """Open an array; raises ``HeatError`` where it is none of ours."""
        import zarr

        name = folder.name
        with _reading(name):
            _check_metadata(folder)
            array = zarr.open_array(folder, mode=mode, zarr_format=3, config=_EVERY_CHUNK)
            codecs = [codec.to_dict()["name"] for codec in array.metadata.codecs]
            shape, chunks, dtype = array.shape, array.chunks, array.dtype
        if codecs != ["bytes", "gzip"] or dtype.name not in _TYPES:
            raise HeatError(f"{name} is stored as {dtype} by {codecs}; expected numbers by bytes, gzip")
        if not shape or chunks[1:] != shape[1:]:
            raise HeatError(f"{name} has the shape {list(shape)} in chunks {list(chunks)}, not whole rows")
        if dtype.itemsize * math.prod(chunks) > _MOST_CHUNK_BYTES:
            raise HeatError(f"{name} claims chunks {list(chunks)} of more than 1 GiB; it is damaged")
        return cls(array, folder)

    def write(self, first: int, rows: Array) -> None:
        """Write rows from row ``first`` on."""
        self._array.resize((first + len(rows), *self.tail))
        self._array[first:] = rows
        self._kept = None

    def read(self, first: int, last: int) -> Array:
        """Rows ``first`` to ``last`` (not included); raises ``HeatError`` where a chunk is missing or damaged."""
        check_fits_memory((last - first) * math.prod(self.tail) * self._array.dtype.itemsize)
        out = np.empty((last - first, *self.tail), dtype=self._array.dtype)
        chunk = self._array.chunks[0]
        for number in range(first // chunk, -(-last // chunk)):
            begin = number * chunk
            low, high = max(first, begin), min(last, begin + chunk)
            out[low - first : high - first] = self._chunk(number)[low - begin : high - begin]
        return out

    def _chunk(self, number: int) -> Array:
        if self._kept is None or self._kept[0] != number:
            chunk = self._array.chunks[0]
            key = self._array.metadata.encode_chunk_key((number, *[0] * len(self.tail)))
            _check_chunk(self._folder / key, chunk * math.prod(self.tail) * self._array.dtype.itemsize)
            self._kept = number, self._array[number * chunk : (number + 1) * chunk]
        return self._kept[1]


def _check_metadata(folder: Path) -> None:
    if (folder / METADATA).stat().st_size > _MOST_METADATA_BYTES:
        raise HeatError(f"{folder.name}/{METADATA} is larger than any trace's")


def _check_chunk(path: Path, size: int) -> None:
    """Raise ``HeatError`` unless a chunk unpacks to ``size`` bytes; it is unpacked no further."""
    where = "/".join(path.parts[path.parts.index("c") - 1 :]) if "c" in path.parts else path.name
    try:
        unpacker = zlib.decompressobj(_GZIP)
        found = len(unpacker.decompress(path.read_bytes(), size + 1))
    except FileNotFoundError as error:
        raise HeatError(f"{where} is missing; the trace was not copied whole") from error
    except zlib.error as error:
        raise HeatError(f"{where} is damaged ({error})") from error
    if found != size or not unpacker.eof or unpacker.unused_data:
        raise HeatError(f"{where} is truncated or of another size than the metadata says")


def _read_head(folder: Path, mode: str = "r") -> tuple[Any, TraceFacts, int]:
    """Attributes of the group, facts, and number of experts; raises ``HeatError`` where it is no trace of ours."""
    import zarr

    with _reading(folder.name):
        _check_metadata(folder)
        attributes = zarr.open_group(folder, mode=mode, zarr_format=3, use_consolidated=False).attrs
        found = dict(attributes)
    if found.get("format") != _FORMAT:
        raise HeatError(f"is a Zarr group, but no heat trace: its attributes name no format {_FORMAT!r}")
    if found.get("version") != _VERSION:
        raise HeatError(f"is a trace of version {found.get('version')}; this eplb reads version {_VERSION}")
    try:
        return attributes, _facts(found), int(found["experts"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise HeatError(f"has attributes that cannot be read ({error!r})") from error


def _facts(attributes: Mapping[str, Any]) -> TraceFacts:
    known: dict[str, Any] = {}
    for field in fields(TraceFacts):
        default: Any = field.default
        value = attributes.get(field.name, default)
        if isinstance(default, tuple):
            known[field.name] = tuple(map(str if field.name == "phases" else int, value))
        else:
            known[field.name] = type(default)(value)
    return TraceFacts(**known)


def _open_columns(folder: Path, attributes: Mapping[str, Any], mode: str = "r") -> dict[str, _Column]:
    """All arrays of a trace that are there, by name; raises ``HeatError`` where they do not go together."""
    names = [name for name in (*_STEP_ARRAYS, *_PLACEMENT_ARRAYS) if (folder / name).is_dir()]
    columns = {name: _Column.open(folder / name, mode) for name in names}
    if ("heat" in columns) == ("slot_heat" in columns):
        raise HeatError("holds neither heat nor slot_heat, or both; a trace has one of them")
    needed = {"step", "tokens", "phase"}
    if "slot_heat" in columns:
        needed |= {"epoch", *_PLACEMENT_ARRAYS}
    if missing := sorted(needed - set(columns)):
        raise HeatError(f"lacks the array {missing[0]}; the trace was not copied whole")
    for count, group in (("steps", _STEP_ARRAYS), ("placements", _PLACEMENT_ARRAYS)):
        there = [columns[name] for name in group if name in columns]
        # Traces of releases before name no counts: all rows count that all arrays have.
        stated = attributes.get(count)
        rows = min((column.rows for column in there), default=0)
        rows = min(rows, stated) if isinstance(stated, int) and stated >= 0 else rows
        for column in there:
            column.rows = rows
    return columns


def _read_placements(columns: Mapping[str, _Column]) -> dict[tuple[int, int], Int32]:
    """Slots ``[R, S]`` by layer and epoch; empty where tokens were counted by logical expert."""
    if "slot_heat" not in columns:
        return {}
    layer_K, epoch_K, phy2log_KRS = (columns[name].read(0, columns[name].rows) for name in _PLACEMENT_ARRAYS)
    known = zip(layer_K.tolist(), epoch_K.tolist(), strict=True)
    return {key: row.astype(np.int32) for key, row in zip(known, phy2log_KRS, strict=True)}


class StoredTrace(Trace):
    """A trace that ``TraceWriter`` wrote, or is still writing: as long as it was when it was opened.

    Raises
    ------
    HeatError
        Without the path, which callers put in front: where the folder holds no whole trace.
    """

    def __init__(self, folder: Path) -> None:
        check_zarr()
        attributes, self.facts, experts = _read_head(folder)
        self._columns = _open_columns(folder, attributes)
        if not self._columns["step"].rows:
            raise HeatError("the trace holds no steps; record at least one")
        counted = self._columns["slot_heat" if self.by_slot else "heat"]
        self._shape = (counted.rows, counted.tail[0] if counted.tail else 0, experts)
        self._check_shapes()
        self.placements = _read_placements(self._columns)
        """Slots ``[R, S]`` by layer and epoch; empty where tokens were counted by logical expert."""
        for (layer, epoch), phy2log_RS in self.placements.items():
            try:
                check_layer(phy2log_RS, experts, f"layer {layer} at epoch {epoch}")
            except PlacementError as error:
                raise HeatError(str(error)) from error

    @property
    def shape(self) -> tuple[int, int, int]:
        """T, L and E."""
        return self._shape

    @property
    def by_slot(self) -> bool:
        """True where tokens were counted by slot."""
        return "slot_heat" in self._columns

    def heat(self, first: int, last: int) -> Counts:
        """Tokens by logical expert, ``[t, L, E]``, put together from the slots where those were counted."""
        if not self.by_slot:
            return checked_slice(self._columns["heat"].read(first, last), first)
        return checked_slice(self._by_expert(first, last), first)

    def slot_heat(self, first: int, last: int) -> tuple[Array, Int64]:
        """Tokens by slot ``[t, L, R*S]`` and the epochs ``[t, L]``; only where ``by_slot``."""
        return self._columns["slot_heat"].read(first, last), self._int64("epoch", first, last)

    def source_rows(self, first: int, last: int) -> Array | None:
        """Tokens by source rank, step by step, ``[t, R, L, E]``."""
        column = self._columns.get(_SOURCES)
        return None if column is None else column.read(first, last)

    def served_loads(self, first: int, last: int) -> Float64 | None:
        """Tokens that each rank received, float64 ``[t, L, R]``; ``None`` where only experts were counted."""
        if not self.by_slot:
            return None
        counts_TLP = self._columns["slot_heat"].read(first, last)
        shape = (last - first, self.layers, self.facts.ranks, self.facts.slots)
        loads_TLR: Float64 = counts_TLP.reshape(shape).sum(axis=3, dtype=np.float64)
        return loads_TLR

    def step_numbers(self, first: int, last: int) -> Int64:
        """The model's own numbers of the steps, int64 ``[t]``."""
        return self._int64("step", first, last)

    def tokens(self, first: int, last: int) -> Int64 | None:
        """Tokens of each step, int64 ``[t]``; ``None`` where any of them is unknown."""
        tokens_T = self._int64("tokens", first, last)
        return None if (tokens_T < 0).any() else tokens_T

    def phase_numbers(self, first: int, last: int) -> Int64:
        """Index into ``facts.phases`` of each step, int64 ``[t]``."""
        return self._int64("phase", first, last)

    def _int64(self, name: str, first: int, last: int) -> Int64:
        return self._columns[name].read(first, last).astype(np.int64)

    def _check_shapes(self) -> None:
        _, layers, experts = self.shape
        ranks, slots = self.facts.ranks, self.facts.slots
        wanted = {"heat": (layers, experts), "slot_heat": (layers, ranks * slots), "epoch": (layers,)}
        wanted |= {"placement_phy2log": (ranks, slots), _SOURCES: (ranks, layers, experts)}
        for name, column in self._columns.items():
            if column.tail != wanted.get(name, ()):
                raise HeatError(f"{name} has rows {list(column.tail)}, expected {list(wanted.get(name, ()))}")

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


class TraceWriter:
    """A trace that grows; one writer at a time.

    Makes the folder ``path``, or goes on with it where it holds a trace of the same deployment, with ``layers`` and
    ``experts``. Of ``facts``, ``ranks`` and ``slots`` must be set to record tokens ``by_slot`` instead of by logical
    expert. Tokens by source rank are recorded with ``sources``; with ``None`` where the first steps bring them: then
    ``sources`` says whether they do. Raises ``OutputError`` where nothing can be written there, ``HeatError`` where a
    trace of something else is there.
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
        check_zarr()
        self.path = path
        self.sources = sources
        self._counted = "slot_heat" if by_slot else "heat"
        self._waiting: dict[str, list[Array]] = {}
        self._count = 0
        self._shapes = _shapes(facts, layers, experts, by_slot, sources is not False)
        with self._writing():
            if path.exists():
                self._attributes, self._columns = self._go_on(facts, experts)
            else:
                self._attributes, self._columns = self._begin(facts, experts)
        self._end = self._columns["step"].rows

    @property
    def steps(self) -> int:
        """Steps given so far, those that wait to be written included."""
        return self._end + self._count

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

        ``counts`` are ``[t, L, E]``, by logical expert, or ``[t, L, R*S]`` where the trace is by slot, with
        ``epoch_TL``, the epoch of each layer, that ``place`` named. ``step_T`` are the model's own numbers, counted on
        where not given; ``tokens_T`` and ``phase_T`` tokens and index of the phase of each step; ``source_TRLE`` tokens
        by source rank, ``[t, R, L, E]``, before dispatch.
        """
        steps = np.asarray(counts).shape[0]
        numbers = np.arange(self.steps, self.steps + steps) if step_T is None else step_T
        rows: dict[str, Array] = {
            self._counted: _counts(counts),
            "step": np.asarray(numbers, dtype=np.int64),
            "tokens": np.asarray(np.full(steps, -1) if tokens_T is None else tokens_T, dtype=np.int64),
            "phase": np.asarray(np.zeros(steps) if phase_T is None else phase_T, dtype=np.uint8),
        }
        if epoch_TL is not None:
            rows["epoch"] = np.asarray(epoch_TL, dtype=np.int64)
        if self.sources is None:
            self.sources = source_TRLE is not None
            if self.sources:
                self._columns[_SOURCES] = self._create(_SOURCES)
        if self.sources:
            if source_TRLE is None:
                raise HeatError("source heat was announced, but these steps come without it")
            rows[_SOURCES] = _counts(source_TRLE)
        for name, part in rows.items():
            wanted = (steps, *self._columns[name].tail)
            if part.shape != wanted:
                raise HeatError(f"{name} has the shape {list(wanted)}, got {list(part.shape)}")
        for name, part in rows.items():
            self._waiting.setdefault(name, []).append(np.array(part))
        self._count += steps
        if self._count >= BATCH_STEPS:
            self.flush()

    def place(self, layer: int, epoch: int, phy2log_RS: Int32) -> None:
        """Record which expert is in each slot of ``layer`` at ``epoch``; written at once."""
        rows: tuple[Any, ...] = ([layer], [epoch], np.asarray(phy2log_RS, dtype=np.int32)[None])
        end = self._columns[_PLACEMENT_ARRAYS[0]].rows
        with self._writing():
            for name, row in zip(_PLACEMENT_ARRAYS, rows, strict=True):
                self._columns[name].write(end, np.asarray(row))
                self._columns[name].rows = end + 1
            self._attributes["placements"] = end + 1

    def flush(self) -> None:
        """Write what waits; raises ``OutputError`` where the disk refuses."""
        if not self._count:
            return
        with self._writing():
            for name, parts in self._waiting.items():
                self._columns[name].write(self._end, np.concatenate(parts))
            self._attributes["steps"] = self._end + self._count
        self._end += self._count
        self._waiting, self._count = {}, 0

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()

    def placements(self) -> dict[tuple[int, int], Int32]:
        """Slots ``[R, S]`` by layer and epoch, as they are in the trace."""
        return _read_placements(self._columns)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be written ({error.strerror or error})") from error

    def _begin(self, facts: TraceFacts, experts: int) -> tuple[Any, dict[str, _Column]]:
        import zarr

        self.path.mkdir()
        names = [name for name in self._shapes if name != _SOURCES or self.sources is not None]
        columns = {name: self._create(name) for name in names}
        head: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, "experts": experts, **asdict(facts)}
        return zarr.create_group(self.path, attributes={**head, "steps": 0, "placements": 0}).attrs, columns

    def _create(self, name: str) -> _Column:
        return _Column.create(self.path / name, *self._shapes[name])

    def _go_on(self, facts: TraceFacts, experts: int) -> tuple[Any, dict[str, _Column]]:
        try:
            attributes, found_facts, found_experts = _read_head(self.path, "r+")
            columns = _open_columns(self.path, attributes, "r+")
        except HeatError as error:
            raise HeatError(f"{self.path}: {error}") from error
        if self.sources is None:
            self.sources = _SOURCES in columns
        found = {name: column.tail for name, column in columns.items()}
        wanted = {name: shape[0] for name, shape in self._shapes.items() if name != _SOURCES or self.sources}
        of_found = (found_experts, found_facts.ranks, found_facts.slots, found_facts.phases)
        if found != wanted or of_found != (experts, facts.ranks, facts.slots, facts.phases):
            raise HeatError(
                f"{self.path}: is a trace of {_described(found, found_experts)}; "
                f"to be recorded are {_described(wanted, experts)}"
            )
        return attributes, columns


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


def _described(tails: Mapping[str, tuple[int, ...]], experts: int) -> str:
    arrays = ", ".join(f"{name} {list(tail)}" for name, tail in tails.items() if len(tail) > 1)
    return f"{experts} experts with {arrays}"


def _shapes(
    facts: TraceFacts, layers: int, experts: int, by_slot: bool, sources: bool
) -> dict[str, tuple[tuple[int, ...], str, tuple[str, ...]]]:
    """Rows, type and axis names of each array that the trace will have."""
    if (by_slot or sources) and not facts.ranks:
        raise HeatError("recording by slot or by source needs to know the ranks")
    shapes: dict[str, tuple[tuple[int, ...], str, tuple[str, ...]]] = {
        "step": ((), "int64", ("step",)),
        "tokens": ((), "int64", ("step",)),
        "phase": ((), "uint8", ("step",)),
    }
    if by_slot:
        slots = (facts.ranks, facts.slots)
        shapes["slot_heat"] = ((layers, facts.ranks * facts.slots), "uint32", ("step", "layer", "slot"))
        shapes["epoch"] = ((layers,), "int64", ("step", "layer"))
        shapes["placement_layer"] = ((), "int32", ("placement",))
        shapes["placement_epoch"] = ((), "int64", ("placement",))
        shapes["placement_phy2log"] = (slots, "int32", ("placement", "rank", "slot"))
    else:
        shapes["heat"] = ((layers, experts), "uint32", ("step", "layer", "expert"))
    if sources:
        shapes[_SOURCES] = ((facts.ranks, layers, experts), "uint32", ("step", "rank", "layer", "expert"))
    return shapes
