"""Arrays of a file: heat, tokens by slot with their map, routes or weights, decided by name and shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from eplb_core.heat.window import HeatError
from eplb_service.io import routes
from eplb_service.io.containers import Array
from eplb_service.io.trace import ArrayTrace, TraceFacts, numbered

Meaning = Literal["heat", "slots", "routes", "weights"]
"""Tokens by logical expert, tokens by physical slot, experts of each token, or the plain sum that solvers take."""
MEANINGS: tuple[Meaning, ...] = get_args(Meaning)

LAYER_NUMBERS = "layer_numbers"
"""Name of the model's own numbers of the layers; a file that has them states that all are MoE layers."""
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
_FLAGS = {
    "meaning": "--as",
    "phy2log": "--map",
    "experts": "--experts",
    "batch": "--batch",
    "top_k": "--top-k",
}
_MEANS = ("means nothing; leave it out", "mean nothing; leave them out")
_USED: dict[Meaning, tuple[str, ...]] = {
    "heat": ("experts",),
    "weights": ("experts",),
    "slots": ("experts", "phy2log"),
    "routes": ("experts", "batch", "top_k"),
}
_MAX_LAYERS = 512
"""More rows than any model has layers are not taken for layers."""


@dataclass(frozen=True)
class ReadAs:
    """Facts about a file that does not say itself what it holds; what is ``None`` is decided by the file.

    ``meaning`` is what its array is, ``phy2log`` the expert in each slot, for tokens by slot, ``experts`` E, ``batch``
    the tokens of a step made from routes, ``top_k`` the experts that a token chooses in each layer, for routes without
    it. ``map_layers`` are the layer numbers of ``phy2log``: the model's own, or, with ``map_counts_moe``, numbers that
    count only MoE layers from 0. Without numbers, the rows are in the order of the heat's layers. A reader rejects
    each fact that it does not use.
    """

    meaning: Meaning | None = None
    phy2log: Array | None = None
    experts: int | None = None
    batch: int | None = None
    top_k: int | None = None
    map_layers: tuple[int, ...] = ()
    map_counts_moe: bool = False

    def map_of(self, heat_TLX: Array, phy2log: Array, numbers: Sequence[int] = ()) -> Array:
        """Return the map's row for each layer of heat, matched by number if both sides have numbers.

        Parameters
        ----------
        heat_TLX
            Tokens by slot; the second axis is the layers.
        phy2log
            The user's map, or else the file's own, which has a row per layer of the heat.
        numbers
            The model's own numbers of the heat's layers. Without them, the heat must have the same layers as the
            map, or every layer of the model.

        Returns
        -------
        Array
            The expert in each slot, a row per layer of the heat. A layer without tokens that is missing from the map
            gets an arbitrary row.

        Raises
        ------
        HeatError
            If the map lacks a layer that has tokens.
        """
        layers = heat_TLX.shape[1]
        if self.phy2log is None or phy2log.ndim < 2 or not heat_TLX.size:
            return phy2log
        known = self.map_layers
        if not known:
            by_number = numbers and len(phy2log) > max(*numbers, len(numbers))
            return phy2log[list(numbers)] if by_number else phy2log
        numbers = () if self.map_counts_moe else numbers
        if not numbers and len(known) == layers and known[-1] - known[0] == layers - 1:
            return phy2log
        wanted = numbers or range(layers)
        row_of = {number: row for row, number in enumerate(known)}
        busy_L = heat_TLX.swapaxes(0, 1).reshape(layers, -1).any(axis=1)
        missing = [
            number for number, busy in zip(wanted, busy_L, strict=True) if busy and number not in row_of
        ]
        if missing or not (numbers or self.map_counts_moe or known[-1] < layers):
            whose = f"the layers {listed(numbers)}" if numbers else f"{layers} layers without numbers"
            raise HeatError(f"has heat of {whose}, but the map is of the layers {listed(known)}")
        return phy2log[[row_of.get(number, 0) for number in wanted]]

    def refuse_unused(self, what: str, *used: str, makes: Meaning | None = "heat") -> None:
        """Reject facts that the user states but the reader does not use.

        Parameters
        ----------
        what
            Kind of file, for the message, such as ``a file of lines``.
        used
            Names of the fields that the reader uses.
        makes
            Meaning of the array that the reader returns; the user may state it as well.

        Raises
        ------
        HeatError
            If there are unused facts. The message names their options.
        """
        known = {*used, *(["meaning"] if self.meaning == makes else [])}
        unused = [
            flag for name, flag in _FLAGS.items() if getattr(self, name) is not None and name not in known
        ]
        if unused:
            raise HeatError(f"is {what}, for which {' and '.join(unused)} {_MEANS[len(unused) > 1]}")


def trace_of_arrays(
    arrays: Mapping[str, Array], origin: str, read_as: ReadAs, file_name: str = ""
) -> ArrayTrace:
    """Return the trace that named arrays make, as ``read_as`` and their names and shapes say.

    A lone array without a name is called ``""``; ``file_name``, without its suffix, then names it. Counts by slot are
    ``[L, P]`` of one step, as vLLM's ``expert_load_pass`` has them, ``[T, L, P]``, or ``[T, L, R, S]``, as vLLM-Ascend
    gathers them from the ranks. ``origin`` is the format that they were read from. Raises ``HeatError`` where they are
    no trace, or could be two things.
    """
    meaning, name = _meaning_of(arrays, read_as, file_name)
    read_as.refuse_unused(_DESCRIBED[meaning], *_USED[meaning], makes=meaning)
    trace = _MAKERS[meaning](arrays[name], arrays, origin, read_as)
    stated = _first(arrays, LAYER_NUMBERS)
    return trace if stated is None else _numbered_as_stated(trace, stated)


def _numbered_as_stated(trace: ArrayTrace, stated: Array) -> ArrayTrace:
    """Return the trace with the layer numbers that its file states, all marked as MoE layers."""
    numbers = _checked_numbers(stated, trace.layers)
    return replace(trace, facts=replace(trace.facts, layer_numbers=numbered(numbers)), states_layers=True)


def _checked_numbers(stated: Array | None, layers: int) -> list[int]:
    """Return the layer numbers of a file, or an empty list. Raises ``HeatError`` if they do not fit the layers."""
    if stated is None:
        return []
    numbers = stated.ravel().tolist() if stated.dtype.kind in "iu" else []
    if len(numbers) != layers or numbers != sorted(set(numbers)) or min(numbers, default=0) < 0:
        raise HeatError(
            f"has the layer numbers {stated.tolist()} for {layers} layers; expected increasing numbers"
        )
    return numbers


def listed(numbers: Sequence[int]) -> str:
    """Format numbers as text, with runs shortened to "first to last"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _from_slots(array: Array, arrays: Mapping[str, Array], origin: str, read_as: ReadAs) -> ArrayTrace:
    phy2log = read_as.phy2log if read_as.phy2log is not None else _first(arrays, *MAP_NAMES)
    if phy2log is None:
        raise HeatError(
            f"holds tokens by physical slot {list(array.shape)} without their placement: give the expert in each slot "
            "with --map, or say --as heat or --as weights if they are tokens by logical expert"
        )
    array = array[None] if array.ndim == 2 else array
    if array.ndim > 1:
        numbers = _checked_numbers(_first(arrays, LAYER_NUMBERS), array.shape[1])
        phy2log = read_as.map_of(array, phy2log, numbers)
    ranks, slots = array.shape[2:] if array.ndim == 4 else (0, 0)
    facts = TraceFacts(origin=f"{origin}, tokens by slot", ranks=ranks, slots=slots)
    flat_TLP = array.reshape(*array.shape[:2], -1) if array.ndim == 4 and array.size else array
    return ArrayTrace(routes.heat_of_slots(flat_TLP, phy2log, _experts(arrays, read_as)), facts)


def _from_weights(array: Array, _arrays: Mapping[str, Array], origin: str, _read_as: ReadAs) -> ArrayTrace:
    if array.ndim != 2:
        raise HeatError(f"weights have the shape [layers, experts], got {list(array.shape)}")
    facts = TraceFacts(origin=f"{origin}, weights [layers, experts]", batching="one sum, without steps")
    return ArrayTrace(array[None], facts)


def _from_heat(array: Array, arrays: Mapping[str, Array], origin: str, read_as: ReadAs) -> ArrayTrace:
    array = array[:, None] if array.ndim == 2 else array
    if read_as.experts is not None and array.ndim == 3 and array.shape[2] != read_as.experts:
        raise HeatError(
            f"counts {array.shape[2]} experts, and there are {read_as.experts}: if these are physical slots, give the "
            "expert in each with --map"
        )
    source_TRLE, phase_T = _first(arrays, "source_heat", "source"), _first(arrays, "phase")
    names = _first(arrays, "phase_names")
    facts = TraceFacts(
        origin=f"{origin}, tokens by logical expert",
        ranks=0 if source_TRLE is None or source_TRLE.ndim != 4 else source_TRLE.shape[1],
        phases=("unknown",) if names is None else tuple(map(str, names.ravel().tolist())),
    )
    return ArrayTrace(array, facts, source_TRLE=source_TRLE, phase_T=None if names is None else phase_T)


def _from_routes(array: Array, arrays: Mapping[str, Array], origin: str, read_as: ReadAs) -> ArrayTrace:
    bounds, experts = _first(arrays, "req_ptr", "request_bounds"), _experts(arrays, read_as)
    if read_as.top_k is not None and array.ndim == 3 and array.shape[2] != read_as.top_k:
        raise HeatError(f"has {array.shape[2]} choices of each token, not the {read_as.top_k} of --top-k")
    origin = f"{origin}, experts of each token"
    numbers: tuple[int, ...] = ()
    if array.ndim == 3 and array.size and array.dtype.kind in "iu":
        moe = routes.moe_layers(array)
        if moe and len(moe) < array.shape[1]:
            origin += f", {array.shape[1] - len(moe)} dense layers left out"
            array = array[:, moe]
            numbers = numbered(moe)
    return routes.trace_of_routes(array, bounds, experts, read_as.batch, origin, layer_numbers=numbers)


_DESCRIBED: dict[Meaning, str] = {
    "heat": "tokens by logical expert",
    "weights": "weights",
    "slots": "tokens by slot",
    "routes": "experts of each token",
}
_MAKERS = {"heat": _from_heat, "slots": _from_slots, "routes": _from_routes, "weights": _from_weights}


def _experts(arrays: Mapping[str, Array], read_as: ReadAs) -> int | None:
    stated = _first(arrays, "num_experts", "experts")
    if read_as.experts is not None or stated is None:
        return read_as.experts
    if stated.size != 1 or stated.dtype.kind not in "iu" or int(stated.ravel()[0]) < 1:
        raise HeatError(f"names {stated.tolist()} as the number of experts; expected one positive integer")
    return int(stated.ravel()[0])


def _first(arrays: Mapping[str, Array], *names: str) -> Array | None:
    return next((arrays[name] for name in names if name in arrays), None)


def _meaning_of(arrays: Mapping[str, Array], read_as: ReadAs, file_name: str) -> tuple[Meaning, str]:
    """Return what the arrays are, and the name of the one; raises ``HeatError`` with the question that decides.

    A map is given for tokens by slot alone, and says as much as ``--as slots``.
    """
    named = [(meaning, name) for meaning, names in _NAMES.items() for name in names if name in arrays]
    wanted = read_as.meaning or ("slots" if read_as.phy2log is not None else None)
    if wanted is not None:
        named.sort(key=lambda pair: pair[0] != wanted)
        other = [name for name, array in arrays.items() if array.ndim >= 2 and name not in MAP_NAMES]
        for name in (*(name for _, name in named), *other):
            return wanted, name
    elif len({meaning for meaning, _ in named}) == 1:
        meaning, name = named[0]
        if meaning == "heat" and (arrays[name].ndim == 2 or _first(arrays, *MAP_NAMES) is not None):
            raise HeatError(
                f"holds {_inventory(arrays)}: say --as weights if the rows of {name} are layers, --as heat if they are "
                "steps of one layer, --as slots if it is tokens by slot"
            )
        return meaning, name
    elif list(arrays) == [""]:
        return _of_bare(arrays[""], file_name), ""
    raise HeatError(
        f"holds {_inventory(arrays)}: say with --as what is meant; known are arrays named "
        f"{', '.join(name for names in _NAMES.values() for name in names)}"
    )


def _inventory(arrays: Mapping[str, Array]) -> str:
    """Names and shapes, for a message."""
    return (
        ", ".join(f"{name or 'an array'} {list(array.shape)}" for name, array in arrays.items()) or "nothing"
    )


def _looks_like_placement(array: Array) -> bool:
    """Return whether integers name experts: with -1 for none, or with every expert in each row or layer."""
    if array.dtype.kind == "i" and array.min() == -1:
        return True
    rows = array.reshape(len(array), -1)
    if (array.ndim == 3 and len(array) > _MAX_LAYERS) or rows.shape[1] < 2 or rows.max() >= rows.shape[1]:
        return False
    every = np.arange(int(rows.max()) + 1)
    return bool(all(np.array_equal(np.unique(row), every) for row in rows))


def _of_bare(array: Array, file_name: str) -> Meaning:
    shape = list(array.shape)
    if array.ndim in (2, 3) and array.size and array.dtype.kind in "iu" and _looks_like_placement(array):
        raise HeatError(
            f"holds {shape} numbers of experts, as a placement or an expert map does, not tokens: give it with "
            "--placement, or with --map beside tokens by slot; say --as weights or --as heat if these are tokens"
        )
    if array.ndim == 4 or any(name in file_name for name in _NAMES["slots"]):
        return "slots"
    if array.ndim == 2 and len(array) <= _MAX_LAYERS:
        return "weights"
    if array.ndim == 3 and not routes.look_like_routes(array):
        return "heat"
    raise HeatError(
        f"holds an array of shape {shape}, which could be several things: say --as heat, weights, routes or slots. "
        "Expected are [steps, layers, experts] heat, [layers, experts] weights, [tokens, layers, choices] routes (the "
        "experts of each token), or [steps, layers, ranks, slots] tokens by slot"
    )
