"""Arrays of a file: heat, tokens by slot with their map, routes or weights, decided by name and shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from eplb_service.heat.window import HeatError
from eplb_service.io import routes
from eplb_service.io.containers import Array
from eplb_service.io.trace import ArrayTrace, TraceFacts

Meaning = Literal["heat", "slots", "routes", "weights"]
"""Tokens by logical expert, tokens by physical slot, experts of each token, or the plain sum that solvers take."""
MEANINGS: tuple[Meaning, ...] = get_args(Meaning)

MAP_NAMES = ("physical_to_logical_map", "phy2log", "last_physical_to_logical_map")
"""Names of the expert in each slot."""
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
    "routes": ("routes", "routed_experts", "topk_ids"),
    "weights": ("weight", "weights"),
}
_OF_EITHER = ("heat", "counts", "expert_load")
"""Names that programs give to tokens by expert and by slot alike."""
_SHAPES = (
    "[steps, layers, experts] heat, [layers, experts] weights, [tokens, layers, choices] routes, "
    "or [steps, layers, ranks, slots] tokens by slot"
)
_MOST_LAYERS = 512
"""More rows than any model has layers are not taken for layers."""
_SOURCE_NAMES = ("source_heat", "source")
_BOUND_NAMES = ("req_ptr", "request_bounds")
_EXPERT_NAMES = ("num_experts", "experts")


@dataclass(frozen=True)
class ReadAs:
    """Facts about a file that does not say itself what it holds; what is ``None`` is decided by the file.

    ``meaning`` is what its array is, ``phy2log`` the expert in each slot, for tokens by slot, ``experts`` E, ``batch``
    the tokens of a step made from routes, ``top_k`` the experts that a token chooses in each layer, for routes without
    it.
    """

    meaning: Meaning | None = None
    phy2log: Array | None = None
    experts: int | None = None
    batch: int = routes.DEFAULT_BATCH
    top_k: int | None = None


def trace_of_arrays(
    arrays: Mapping[str, Array], origin: str, read_as: ReadAs, file_name: str = ""
) -> ArrayTrace:
    """Return the trace that named arrays make, as ``read_as`` and their names and shapes say.

    A lone array without a name is called ``""``; ``file_name``, without its suffix, then names it. Counts by slot are
    ``[L, P]`` of one step, as vLLM's ``expert_load_pass`` has them, ``[T, L, P]``, or ``[T, L, R, S]``, as vLLM-Ascend
    gathers them from the ranks. ``origin`` is the format that they were read from. Raises ``HeatError`` where they are
    no trace, or could be two things.
    """
    meaning, name = _meaning_of(arrays, read_as.meaning, file_name, mapped=read_as.phy2log is not None)
    array = arrays[name]
    if meaning == "routes" and array.ndim == 3 and array.dtype.kind == "f":
        raise HeatError(f"routes hold expert numbers, got {array.dtype}")
    if meaning == "routes":
        return _from_routes(array, arrays, origin, read_as)
    if meaning == "slots":
        phy2log = read_as.phy2log if read_as.phy2log is not None else _first(arrays, MAP_NAMES)
        if phy2log is None:
            otherwise = "weights" if array.ndim == 2 else "heat"
            raise HeatError(
                f"holds tokens by physical slot {list(array.shape)} without their placement: give the expert in each "
                f"slot with --map, or say --as {otherwise} if they are tokens by logical expert"
            )
        if array.ndim == 2:
            array = array[None]
        ranks, slots = array.shape[2:] if array.ndim == 4 else (0, 0)
        facts = TraceFacts(origin=f"{origin}, tokens by slot", ranks=ranks, slots=slots)
        flat_TLP = array.reshape(*array.shape[:2], -1) if array.ndim == 4 and array.size else array
        return ArrayTrace(routes.heat_of_slots(flat_TLP, phy2log, _experts(arrays, read_as)), facts)
    if meaning == "weights":
        if array.ndim != 2:
            raise HeatError(f"weights have the shape [layers, experts], got {list(array.shape)}")
        facts = TraceFacts(origin=f"{origin}, weights [layers, experts]", batching="one sum, without steps")
        return ArrayTrace(array[None], facts)
    if array.ndim == 2:
        array = array[:, None]
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
    origin += ", experts of each token"
    if experts is None:
        experts = int(array.max()) + 1 if array.size else 1
        origin += f", {experts} experts by the largest that was chosen"
    heat_TLE, tokens_T = routes.heat_of_routes(array, bounds, experts, read_as.batch)
    requests = 1 if bounds is None else len(bounds) - 1
    facts = TraceFacts(
        origin=origin,
        top_k=int(array.shape[2]),
        batching=routes.rule(read_as.batch, requests),
    )
    return ArrayTrace(heat_TLE, facts, tokens_T)


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


def _meaning_of(
    arrays: Mapping[str, Array], wanted: Meaning | None, file_name: str, *, mapped: bool
) -> tuple[Meaning, str]:
    """Return what the arrays are, and the name of the one; raises ``HeatError`` with the question that decides.

    ``mapped`` says that the user gives the expert in each slot.
    """
    named = [(meaning, name) for meaning, names in _NAMES.items() for name in names if name in arrays]
    if wanted is not None:
        fitting = [name for meaning, name in named if meaning == wanted]
        other = [name for name, array in arrays.items() if array.ndim >= 2 and name not in MAP_NAMES]
        candidates = [*fitting, *(name for _, name in named), *other]
        if not candidates:
            raise HeatError(f"holds no array that could be {wanted}; found {_inventory(arrays)}")
        return wanted, candidates[0]
    if named:
        if len({meaning for meaning, _ in named}) > 1:
            raise HeatError(
                f"holds {_inventory({name: arrays[name] for _, name in named})}: say with --as which one is meant"
            )
        meaning, name = named[0]
        _check_one_reading(meaning, name, arrays, mapped=mapped)
        return meaning, name
    if len(arrays) == 1:
        [(name, array)] = arrays.items()
        if name == "" or mapped:
            return _of_bare(array, file_name, mapped=mapped), name
    raise HeatError(
        f"holds no array whose name says heat ({', '.join(name for names in _NAMES.values() for name in names)}); "
        f"found {_inventory(arrays)}"
    )


def _inventory(arrays: Mapping[str, Array]) -> str:
    """Names and shapes, for a message."""
    return (
        ", ".join(f"{name or 'an unnamed array'} {list(array.shape)}" for name, array in arrays.items())
        or "nothing"
    )


def _check_one_reading(meaning: Meaning, name: str, arrays: Mapping[str, Array], *, mapped: bool) -> None:
    """Raise ``HeatError`` where an array under a name of tokens by expert could as well be tokens by slot."""
    if meaning != "heat":
        return
    array = arrays[name]
    if mapped:
        raise HeatError(
            f"calls its array {name}, as tokens by logical expert are called, which need no --map: say --as slots if "
            "they are tokens by slot, or leave --map out"
        )
    if array.ndim == 2:
        raise HeatError(
            f"holds {name} {list(array.shape)}: say --as weights if its rows are layers, --as heat if they are steps "
            "of one layer"
        )
    found = next((arrays[other] for other in MAP_NAMES if other in arrays), None)
    if name in _OF_EITHER and found is not None and found.size and array.ndim == 3:
        slots = found.size // len(found) if found.ndim > 1 else found.size
        if slots == array.shape[2]:
            raise HeatError(
                f"holds {name} {list(array.shape)} and a placement of as many slots: say --as slots if these are "
                "tokens by slot, --as heat if they are tokens by logical expert"
            )


def _of_bare(array: Array, file_name: str, *, mapped: bool) -> Meaning:
    counts_slots = array.ndim in (2, 3) and any(name in file_name for name in _NAMES["slots"])
    if mapped or counts_slots or array.ndim == 4:
        return "slots"
    if array.ndim not in (2, 3):
        raise HeatError(f"holds an array of shape {list(array.shape)}; expected {_SHAPES}")
    shape = list(array.shape)
    meaning: Meaning = "weights" if array.ndim == 2 else "heat"
    if _looks_like_placement(array):
        raise HeatError(
            f"holds an array of shape {shape} whose every row names each of the experts 0 to {array.max()}: it is a "
            f"placement, which --map and --placement take; or say --as {meaning} if these are tokens"
        )
    if array.ndim == 2 and len(array) > _MOST_LAYERS:
        raise HeatError(
            f"holds an array of shape {shape}: say --as heat if its rows are steps of one layer, --as weights if they "
            "are layers"
        )
    if array.ndim == 3 and routes.look_like_routes(array):
        raise HeatError(
            f"holds an array of shape {shape} whose rows are distinct small numbers: "
            "say --as routes if they are the experts of each token, or --as heat"
        )
    return meaning


def _looks_like_placement(array: Array) -> bool:
    """Return whether integers ``[L, P]`` or ``[L, R, S]`` name in every layer all experts from 0 to the largest."""
    if array.dtype.kind not in "iu" or 0 in array.shape or len(array) > _MOST_LAYERS:
        return False
    experts = int(array[0].max()) + 1
    if not 1 < experts <= array[0].size:
        return False
    return all(np.array_equal(np.unique(layer), np.arange(experts)) for layer in array)
