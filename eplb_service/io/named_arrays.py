"""What the arrays of a file are: heat, tokens by slot with their map, routes, or weights; decided by name and shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from eplb_service.heat.window import HeatError
from eplb_service.io import routes
from eplb_service.io.containers.numpy_file import Array
from eplb_service.io.slot_heat import heat_of_slots
from eplb_service.io.trace import ArrayTrace, TraceFacts

Meaning = Literal["heat", "slots", "routes", "weights"]
"""Tokens by logical expert, tokens by physical slot, experts of each token, or the plain sum that solvers take."""
MEANINGS: tuple[Meaning, ...] = get_args(Meaning)

_NAMES: dict[Meaning, tuple[str, ...]] = {
    "heat": ("heat", "counts", "logical_count", "expert_load"),
    "slots": (
        "expert_load_view",
        "expert_load_window",
        "expert_load_pass",
        "slot_heat",
        "physical_count",
        "global_physical_count",
        "moe_load",
    ),
    "routes": ("routes", "routed_experts", "topk_ids", "topk_ids_of_layer"),
    "weights": ("weight", "weights"),
}
_MAP_NAMES = ("physical_to_logical_map", "phy2log", "last_physical_to_logical_map")
_SOURCE_NAMES = ("source_heat", "source")
_BOUND_NAMES = ("req_ptr", "request_bounds")
_EXPERT_NAMES = ("num_experts", "experts")
_SHAPES = (
    "[steps, layers, experts] heat, [layers, experts] weights, [tokens, layers, choices] routes, "
    "or [steps, layers, ranks, slots] tokens by slot"
)


@dataclass(frozen=True)
class ReadAs:
    """How to read a file that does not say itself what it holds.

    Parameters
    ----------
    meaning
        What its array is; ``None`` to decide by name and shape.
    phy2log
        The expert in each slot, for tokens by slot; ``None`` where the file holds it.
    experts
        E; ``None`` where the file names it.
    batch
        Tokens of a step made from routes.
    top_k
        Experts that a token chooses in each layer, for routes whose file does not say it; otherwise unused.
    """

    meaning: Meaning | None = None
    phy2log: Array | None = None
    experts: int | None = None
    batch: int = routes.DEFAULT_BATCH
    top_k: int | None = None


def trace_of_arrays(
    arrays: Mapping[str, Array], origin: str, read_as: ReadAs, file_name: str = ""
) -> ArrayTrace:
    """The trace that named arrays make.

    Parameters
    ----------
    arrays
        By name; a lone array without a name is called ``""``. Counts by slot are ``[T, L, P]``, as vLLM's
        ``expert_load_view`` has them, or ``[T, L, R, S]``, as vLLM-Ascend gathers them from the ranks.
    origin
        The format that they were read from.
    read_as
        What the user says of them.
    file_name
        Without its suffix; it names a lone array that has no name of its own.

    Raises
    ------
    HeatError
        Where they are no trace, or could be two things.
    """
    meaning, name = _meaning(arrays, read_as, file_name)
    array = arrays[name]
    if meaning == "routes" and array.ndim == 3 and array.dtype.kind == "f":
        raise HeatError(f"routes hold expert numbers, got {array.dtype}")
    if meaning == "routes":
        return _from_routes(array, arrays, origin, read_as)
    if meaning == "slots":
        phy2log = read_as.phy2log if read_as.phy2log is not None else _first(arrays, _MAP_NAMES)
        if phy2log is None:
            raise HeatError(
                f"holds tokens by physical slot {list(array.shape)} without their placement: give the expert in each "
                "slot with --map, or say --as heat if they are tokens by logical expert"
            )
        ranks, slots = array.shape[2:] if array.ndim == 4 else (0, 0)
        facts = TraceFacts(origin=f"{origin}, tokens by slot", ranks=ranks, slots=slots)
        flat_TLP = array.reshape(*array.shape[:2], -1) if array.ndim == 4 and array.size else array
        return ArrayTrace(heat_of_slots(flat_TLP, phy2log, _experts(arrays, read_as)), facts)
    if meaning == "weights":
        if array.ndim != 2:
            raise HeatError(f"weights have the shape [layers, experts], got {list(array.shape)}")
        facts = TraceFacts(origin=f"{origin}, weights [layers, experts]", batching="one sum, without steps")
        return ArrayTrace(array[None], facts)
    if read_as.experts is not None and array.ndim == 3 and array.shape[2] != read_as.experts:
        raise HeatError(
            f"counts {array.shape[2]} experts, and there are {read_as.experts}: if these are physical slots, give the "
            "expert in each with --map"
        )
    return _from_heat(array, arrays, f"{origin}, tokens by logical expert")


def _from_heat(array: Array, arrays: Mapping[str, Array], origin: str) -> ArrayTrace:
    source_TRLE, phase_T = _first(arrays, _SOURCE_NAMES), _first(arrays, ("phase",))
    names = _first(arrays, ("phase_names",))
    phases = ("unknown",) if names is None else tuple(map(str, names.ravel().tolist()))
    ranks = 0 if source_TRLE is None or source_TRLE.ndim != 4 else source_TRLE.shape[1]
    facts = TraceFacts(origin=origin, ranks=ranks, phases=phases)
    return ArrayTrace(array, facts, source_TRLE=source_TRLE, phase_T=phase_T if names is not None else None)


def _from_routes(array: Array, arrays: Mapping[str, Array], origin: str, read_as: ReadAs) -> ArrayTrace:
    bounds = _first(arrays, _BOUND_NAMES)
    experts = _experts(arrays, read_as)
    if experts is None:
        experts = int(array.max()) + 1 if array.size else 1
    heat_TLE, tokens_T = routes.heat_of_routes(array, bounds, experts, read_as.batch)
    requests = 1 if bounds is None else len(bounds) - 1
    facts = TraceFacts(
        origin=f"{origin}, experts of each token",
        top_k=int(array.shape[2]),
        batching=routes.rule(read_as.batch, requests),
    )
    return ArrayTrace(heat_TLE, facts, tokens_T)


def _meaning(arrays: Mapping[str, Array], read_as: ReadAs, file_name: str) -> tuple[Meaning, str]:
    named = [(meaning, name) for meaning, names in _NAMES.items() for name in names if name in arrays]
    if read_as.meaning is not None:
        fitting = [name for meaning, name in named if meaning == read_as.meaning]
        others = [name for name, array in arrays.items() if array.ndim >= 2]
        if not (fitting or others):
            raise HeatError(f"holds no array that could be {read_as.meaning}; found {_inventory(arrays)}")
        return read_as.meaning, (fitting or others)[0]
    if named:
        meaning, name = named[0]
        return ("weights" if meaning == "heat" and arrays[name].ndim == 2 and name == "" else meaning), name
    if len(arrays) == 1:
        [(name, array)] = arrays.items()
        if name == "" or read_as.phy2log is not None:
            return _meaning_of_bare(array, read_as, file_name), name
    raise HeatError(
        f"holds no array whose name says heat ({', '.join(name for names in _NAMES.values() for name in names)}); "
        f"found {_inventory(arrays)}"
    )


def _meaning_of_bare(array: Array, read_as: ReadAs, file_name: str) -> Meaning:
    counts_slots = array.ndim == 4 or (array.ndim == 3 and any(name in file_name for name in _NAMES["slots"]))
    if read_as.phy2log is not None or counts_slots:
        return "slots"
    if array.ndim == 2:
        return "weights"
    if array.ndim != 3:
        raise HeatError(f"holds an array of shape {list(array.shape)}; expected {_SHAPES}")
    if routes.look_like_routes(array):
        raise HeatError(
            f"holds an array of shape {list(array.shape)} whose rows are distinct small numbers: "
            "say --as routes if they are the experts of each token, or --as heat"
        )
    return "heat"


def _experts(arrays: Mapping[str, Array], read_as: ReadAs) -> int | None:
    if read_as.experts is not None:
        return read_as.experts
    stated = _first(arrays, _EXPERT_NAMES)
    if stated is None:
        return None
    if stated.size != 1 or stated.dtype.kind not in "iu" or int(stated.ravel()[0]) < 1:
        raise HeatError(f"names {stated.tolist()} as the number of experts; expected one positive integer")
    return int(stated.ravel()[0])


def _first(arrays: Mapping[str, Array], names: tuple[str, ...]) -> Array | None:
    return next((arrays[name] for name in names if name in arrays), None)


def _inventory(arrays: Mapping[str, Array]) -> str:
    return (
        ", ".join(f"{name or 'an unnamed array'} {list(array.shape)}" for name, array in arrays.items())
        or "nothing"
    )


def as_array(value: object) -> Array | None:
    """A nested list, number or array as an array of numbers; ``None`` for anything else."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | list | tuple):
        return None
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        return None
    return array if array.dtype.kind in "iuf" else None
