"""Build traces from a file's named arrays: heat, tokens by slot with a map, routes or weights.

The arrays' names, shapes and values determine their meaning. If it remains ambiguous, the user must choose.
"""

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
"""Meaning of an array.

``heat`` is tokens by logical expert, ``slots`` tokens by physical slot, ``routes`` the experts that each token chose,
and ``weights`` one token total per expert, as used by solvers.
"""
MEANINGS: tuple[Meaning, ...] = get_args(Meaning)

LAYER_NUMBERS = "layer_numbers"
"""Name of the array with the model's own layer numbers. If a file has this array, all its layers are MoE layers."""
MAP_NAMES = ("physical_to_logical_map", "phy2log", "last_physical_to_logical_map")
"""Accepted names of the array with the expert in each slot."""
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
"""Array names for each meaning, most common first."""
_FLAGS = {
    "meaning": "--as",
    "phy2log": "--map",
    "experts": "--experts",
    "batch": "--batch",
    "top_k": "--top-k",
}
"""Command-line option for each field of ``ReadAs``."""
_HAS_NO_EFFECT = ("has no effect; omit it", "have no effect; omit them")
_USED: dict[Meaning, tuple[str, ...]] = {
    "heat": ("experts",),
    "weights": ("experts",),
    "slots": ("experts", "phy2log"),
    "routes": ("experts", "batch", "top_k"),
}
"""Fields of ``ReadAs`` that apply to each meaning."""
_MAX_LAYERS = 512
"""Upper bound on any model's number of layers. A longer axis cannot be the layer axis."""


@dataclass(frozen=True)
class ReadAs:
    """Facts about a file that the user provides; ``None`` if they follow from its content.

    A reader rejects facts that it does not use.

    Parameters
    ----------
    meaning
        Meaning of the file's array.
    phy2log
        Expert in each slot, for tokens by slot.
    experts
        Number of experts E.
    batch
        Tokens per step, for routes.
    top_k
        Number of experts that a token chooses in each layer, for routes without a choice axis.
    map_layers
        Layer number of each row of ``phy2log``. Without numbers, the rows follow the order of the heat's layers.
    map_counts_moe
        True if ``map_layers`` counts only the MoE layers, from 0. Otherwise the numbers are the model's own.
    """

    meaning: Meaning | None = None
    phy2log: Array | None = None
    experts: int | None = None
    batch: int | None = None
    top_k: int | None = None
    map_layers: tuple[int, ...] = ()
    map_counts_moe: bool = False

    def map_of(self, heat_TLX: Array, phy2log: Array, numbers: Sequence[int] = ()) -> Array:
        """Return the map row for each layer of the heat, matched by layer number if both have numbers.

        Parameters
        ----------
        heat_TLX
            Tokens by slot; the second axis is the layer axis.
        phy2log
            The user's map if there is one, otherwise the file's map, which has one row per layer of the heat.
        numbers
            The model's own numbers for the heat's layers. Without numbers, the heat must have the same layers as the
            map, or all layers of the model.

        Returns
        -------
        Array
            The expert in each slot, one row per layer of the heat. A layer that has no tokens and is missing from the
            map gets an arbitrary row.

        Raises
        ------
        HeatError
            If a layer with tokens is missing from the map.
        """
        layers = heat_TLX.shape[1]
        if self.phy2log is None or phy2log.ndim < 2 or not heat_TLX.size:
            return phy2log
        map_numbers = self.map_layers
        if not map_numbers:
            by_number = numbers and len(phy2log) > max(*numbers, len(numbers))
            return phy2log[list(numbers)] if by_number else phy2log
        numbers = () if self.map_counts_moe else numbers
        if not numbers and len(map_numbers) == layers and map_numbers[-1] - map_numbers[0] == layers - 1:
            return phy2log
        heat_numbers = numbers or range(layers)
        row_of = {number: row for row, number in enumerate(map_numbers)}
        busy_L = heat_TLX.swapaxes(0, 1).reshape(layers, -1).any(axis=1)
        missing = [
            number for number, busy in zip(heat_numbers, busy_L, strict=True) if busy and number not in row_of
        ]
        if missing or not (numbers or self.map_counts_moe or map_numbers[-1] < layers):
            subject = f"layers {listed(numbers)}" if numbers else f"{layers} layers without numbers"
            raise HeatError(f"has heat for {subject}, but the map is for layers {listed(map_numbers)}")
        return phy2log[[row_of.get(number, 0) for number in heat_numbers]]

    def refuse_unused(self, what: str, *used: str, makes: Meaning | None = "heat") -> None:
        """Reject facts that the user provides but the reader does not use.

        Parameters
        ----------
        what
            Kind of file, for the message, such as ``a table of counts``.
        used
            Names of the fields that the reader uses.
        makes
            Meaning of the array that the reader returns. The user may state it, although it is redundant.

        Raises
        ------
        HeatError
            If there are unused facts. The message names their options.
        """
        allowed = {*used, *(["meaning"] if self.meaning == makes else [])}
        unused = [
            flag for name, flag in _FLAGS.items() if getattr(self, name) is not None and name not in allowed
        ]
        if unused:
            raise HeatError(f"is {what}, for which {' and '.join(unused)} {_HAS_NO_EFFECT[len(unused) > 1]}")


def trace_of_arrays(
    arrays: Mapping[str, Array], origin: str, read_as: ReadAs, file_name: str = ""
) -> ArrayTrace:
    """Build a trace from named arrays.

    Counts by slot have one of three shapes: ``[L, P]`` for one step, as in vLLM's ``expert_load_pass``, ``[T, L, P]``,
    or ``[T, L, R, S]``, as vLLM-Ascend gathers them from the ranks.

    Parameters
    ----------
    arrays
        Arrays, keyed by name. A bare array, from a file without names, is called ``""``.
    origin
        Format that the arrays were read from.
    read_as
        Facts that the user provides.
    file_name
        Name of the file without its suffix. It can hint at the meaning of a bare array.

    Raises
    ------
    HeatError
        If the arrays do not form a trace, or their meaning is ambiguous.
    """
    meaning, name = _meaning_of(arrays, read_as, file_name)
    read_as.refuse_unused(_DESCRIBED[meaning], *_USED[meaning], makes=meaning)
    trace = _MAKERS[meaning](arrays[name], arrays, origin, read_as)
    layer_numbers = _first(arrays, LAYER_NUMBERS)
    return trace if layer_numbers is None else _with_layer_numbers(trace, layer_numbers)


def _with_layer_numbers(trace: ArrayTrace, layer_numbers: Array) -> ArrayTrace:
    """Return the trace with the file's layer numbers, marking every layer as an MoE layer."""
    numbers = _checked_numbers(layer_numbers, trace.layers)
    return replace(trace, facts=replace(trace.facts, layer_numbers=numbered(numbers)), states_layers=True)


def _checked_numbers(layer_numbers: Array | None, layers: int) -> list[int]:
    """Return a file's layer numbers as a list, or an empty list for ``None``.

    Raises ``HeatError`` unless there is one number per layer, in increasing order.
    """
    if layer_numbers is None:
        return []
    numbers = layer_numbers.ravel().tolist() if layer_numbers.dtype.kind in "iu" else []
    if len(numbers) != layers or numbers != sorted(set(numbers)) or min(numbers, default=0) < 0:
        raise HeatError(
            f"has layer numbers {layer_numbers.tolist()} for {layers} layers; expected one number per layer, "
            "in increasing order"
        )
    return numbers


def listed(numbers: Sequence[int]) -> str:
    """Format numbers as text, shortening runs to "first to last".

    Examples
    --------
    >>> listed([3, 4, 5, 6, 9])
    '3 to 6, 9'
    """
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
            f"holds tokens by physical slot, of shape {list(array.shape)}, without a placement: pass the expert in "
            "each slot with --map, or use --as heat or --as weights if the tokens are by logical expert"
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
        raise HeatError(f"holds weights of shape {list(array.shape)}; expected [layers, experts]")
    facts = TraceFacts(origin=f"{origin}, weights [layers, experts]", batching="one sum over all steps")
    return ArrayTrace(array[None], facts)


def _from_heat(array: Array, arrays: Mapping[str, Array], origin: str, read_as: ReadAs) -> ArrayTrace:
    array = array[:, None] if array.ndim == 2 else array
    if read_as.experts is not None and array.ndim == 3 and array.shape[2] != read_as.experts:
        raise HeatError(
            f"counts {array.shape[2]} experts, but --experts is {read_as.experts}: if the counts are by physical slot, "
            "pass the expert in each slot with --map"
        )
    source_TRLE = _first(arrays, "source_heat", "source")
    phase_T = _first(arrays, "phase")
    names = _first(arrays, "phase_names")
    facts = TraceFacts(
        origin=f"{origin}, tokens by logical expert",
        ranks=0 if source_TRLE is None or source_TRLE.ndim != 4 else source_TRLE.shape[1],
        phases=("unknown",) if names is None else tuple(map(str, names.ravel().tolist())),
    )
    return ArrayTrace(array, facts, source_TRLE=source_TRLE, phase_T=None if names is None else phase_T)


def _from_routes(array: Array, arrays: Mapping[str, Array], origin: str, read_as: ReadAs) -> ArrayTrace:
    bounds = _first(arrays, "req_ptr", "request_bounds")
    experts = _experts(arrays, read_as)
    if read_as.top_k is not None and array.ndim == 3 and array.shape[2] != read_as.top_k:
        raise HeatError(f"has {array.shape[2]} choices per token, but --top-k is {read_as.top_k}")
    origin = f"{origin}, each token's experts"
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
    "routes": "each token's experts",
}
_MAKERS = {"heat": _from_heat, "slots": _from_slots, "routes": _from_routes, "weights": _from_weights}


def _experts(arrays: Mapping[str, Array], read_as: ReadAs) -> int | None:
    """Return E from the user or from the file, or ``None`` if neither states it."""
    array = _first(arrays, "num_experts", "experts")
    if read_as.experts is not None or array is None:
        return read_as.experts
    if array.size != 1 or array.dtype.kind not in "iu" or int(array.ravel()[0]) < 1:
        raise HeatError(f"states {array.tolist()} as the number of experts; expected one positive integer")
    return int(array.ravel()[0])


def _first(arrays: Mapping[str, Array], *names: str) -> Array | None:
    return next((arrays[name] for name in names if name in arrays), None)


def _meaning_of(arrays: Mapping[str, Array], read_as: ReadAs, file_name: str) -> tuple[Meaning, str]:
    """Return the meaning and the name of the array to read. Raises ``HeatError`` if they are ambiguous.

    Only tokens by slot need a map, so a map from the user implies ``--as slots``.
    """
    named = [(meaning, name) for meaning, names in _NAMES.items() for name in names if name in arrays]
    requested = read_as.meaning or ("slots" if read_as.phy2log is not None else None)
    if requested is not None:
        named.sort(key=lambda pair: pair[0] != requested)
        unnamed = [name for name, array in arrays.items() if array.ndim >= 2 and name not in MAP_NAMES]
        for name in (*(name for _, name in named), *unnamed):
            return requested, name
    elif len({meaning for meaning, _ in named}) == 1:
        meaning, name = named[0]
        if meaning == "heat" and (arrays[name].ndim == 2 or _first(arrays, *MAP_NAMES) is not None):
            raise HeatError(
                f"holds {_inventory(arrays)}: use --as weights if the rows of {name} are layers, --as heat if they are "
                "steps of one layer, or --as slots if it has tokens by slot"
            )
        return meaning, name
    elif list(arrays) == [""]:
        return _meaning_of_bare(arrays[""], file_name), ""
    raise HeatError(
        f"holds {_inventory(arrays)}: specify the meaning with --as; recognised array names are "
        f"{', '.join(name for names in _NAMES.values() for name in names)}"
    )


def _inventory(arrays: Mapping[str, Array]) -> str:
    """Format the names and shapes of arrays for a message."""
    return (
        ", ".join(f"{name or 'an array'} {list(array.shape)}" for name, array in arrays.items()) or "nothing"
    )


def _looks_like_placement(array: Array) -> bool:
    """Return True if an array of integers looks like the expert in each slot.

    This is the case if its smallest number is -1, for an empty slot, or if every row or layer contains every expert.
    """
    if array.dtype.kind == "i" and array.min() == -1:
        return True
    rows = array.reshape(len(array), -1)
    if (array.ndim == 3 and len(array) > _MAX_LAYERS) or rows.shape[1] < 2 or rows.max() >= rows.shape[1]:
        return False
    all_experts = np.arange(int(rows.max()) + 1)
    return bool(all(np.array_equal(np.unique(row), all_experts) for row in rows))


def _meaning_of_bare(array: Array, file_name: str) -> Meaning:
    """Return the meaning of an unnamed array. Raises ``HeatError`` if it is ambiguous."""
    shape = list(array.shape)
    if array.ndim in (2, 3) and array.size and array.dtype.kind in "iu" and _looks_like_placement(array):
        raise HeatError(
            f"holds expert numbers of shape {shape}, like a placement or an expert map, not tokens: pass it with "
            "--placement, or with --map in addition to tokens by slot; use --as weights or --as heat if the numbers "
            "are tokens"
        )
    if array.ndim == 4 or any(name in file_name for name in _NAMES["slots"]):
        return "slots"
    if array.ndim == 2 and len(array) <= _MAX_LAYERS:
        return "weights"
    if array.ndim == 3 and not routes.look_like_routes(array):
        return "heat"
    raise HeatError(
        f"holds an array of shape {shape}, which is ambiguous: use --as heat, weights, routes or slots. "
        "Heat is [steps, layers, experts], weights are [layers, experts], routes (each token's experts) are "
        "[tokens, layers, choices], and tokens by slot are [steps, layers, ranks, slots]"
    )
