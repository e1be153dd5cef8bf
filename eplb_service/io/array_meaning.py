"""What an array of a file is, by name and shape: heat, slots, routes or weights; a question where it could be two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np

from eplb_service.heat.window import HeatError
from eplb_service.io import routes
from eplb_service.io.containers.numpy_file import Array

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


def meaning_of(
    arrays: Mapping[str, Array], wanted: Meaning | None, file_name: str, *, mapped: bool
) -> tuple[Meaning, str]:
    """What the arrays are, and the name of the one that it is.

    Parameters
    ----------
    arrays
        By name; a lone array without a name is called ``""``.
    wanted
        What the user says that it is.
    file_name
        Without its suffix; it names a lone array that has no name of its own.
    mapped
        Whether the user gives the expert in each slot.

    Raises
    ------
    HeatError
        Where they are nothing that is known, or could be two things; it asks the question that decides.
    """
    named = [(meaning, name) for meaning, names in _NAMES.items() for name in names if name in arrays]
    if wanted is not None:
        fitting = [name for meaning, name in named if meaning == wanted]
        other = [name for name, array in arrays.items() if array.ndim >= 2 and name not in MAP_NAMES]
        candidates = [*fitting, *(name for _, name in named), *other]
        if not candidates:
            raise HeatError(f"holds no array that could be {wanted}; found {inventory(arrays)}")
        return wanted, candidates[0]
    if named:
        if len({meaning for meaning, _ in named}) > 1:
            raise HeatError(
                f"holds {inventory({name: arrays[name] for _, name in named})}: say with --as which one is meant"
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
        f"found {inventory(arrays)}"
    )


def inventory(arrays: Mapping[str, Array]) -> str:
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
    """Whether integers ``[L, P]`` or ``[L, R, S]`` name in every layer all experts from 0 to the largest."""
    if array.dtype.kind not in "iu" or 0 in array.shape or len(array) > _MOST_LAYERS:
        return False
    experts = int(array[0].max()) + 1
    if not 1 < experts <= array[0].size:
        return False
    return all(np.array_equal(np.unique(layer), np.arange(experts)) for layer in array)
