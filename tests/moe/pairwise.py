"""Tables that cover every pair of values of any two options, except incompatible pairs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def pairwise(
    options: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool], *, seed: int = 0, tries: int = 20
) -> list[Row]:
    """Return rows that together cover every pair of values found in some allowed row.

    The search is greedy: each row starts with a missing pair and is completed with the values that cover the most
    missing pairs. ``allowed`` must also judge partial rows, based on the options that they contain.
    """
    rng = random.Random(seed)
    values = [(name, value) for name in options for value in options[name]]
    every = [frozenset(pair) for pair in itertools.combinations(values, 2) if pair[0][0] != pair[1][0]]
    missing = {pair for pair in every if allowed(dict(pair))}

    def completed(row: Row) -> Row:
        remaining_names = [name for name in options if name not in row]
        for name in rng.sample(remaining_names, len(remaining_names)):
            fitting = [value for value in options[name] if allowed(row | {name: value})]
            if not fitting:
                return {}
            gains = [
                sum(frozenset({(name, value), item}) in missing for item in row.items()) for value in fitting
            ]
            best = max(range(len(fitting)), key=lambda place: (gains[place], rng.random()))
            row = row | {name: fitting[best]}
        return row

    rows = []
    for pair in every:
        if pair in missing:
            candidates = [completed(dict(pair)) for _ in range(tries)]
            met = [
                missing.intersection(map(frozenset, itertools.combinations(row.items(), 2)))
                for row in candidates
            ]
            best = max(range(tries), key=lambda place: len(met[place]))
            missing -= met[best] | {pair}
            if met[best]:
                rows.append({name: candidates[best][name] for name in options})
    return rows
