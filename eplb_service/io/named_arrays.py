"""What the arrays of a file are: heat, tokens by slot with their map, routes, or weights; decided by name and shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from eplb_service.heat.window import HeatError
from eplb_service.io import routes
from eplb_service.io.array_meaning import MAP_NAMES, Meaning, meaning_of
from eplb_service.io.containers.numpy_file import Array
from eplb_service.io.slot_heat import heat_of_slots
from eplb_service.io.trace import ArrayTrace, TraceFacts

_SOURCE_NAMES = ("source_heat", "source")
_BOUND_NAMES = ("req_ptr", "request_bounds")
_EXPERT_NAMES = ("num_experts", "experts")


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
        By name; a lone array without a name is called ``""``. Counts by slot are ``[L, P]`` of one step, as vLLM's
        ``expert_load_pass`` has them, ``[T, L, P]``, or ``[T, L, R, S]``, as vLLM-Ascend gathers them from the ranks.
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
    meaning, name = meaning_of(arrays, read_as.meaning, file_name, mapped=read_as.phy2log is not None)
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
        return ArrayTrace(heat_of_slots(flat_TLP, phy2log, _experts(arrays, read_as)), facts)
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
