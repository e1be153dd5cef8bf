"""Tables in which any two values of any two options meet, unless they exclude each other."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def pairwise(
    options: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool], *, seed: int = 0, tries: int = 40
) -> list[Row]:
    """Rows that between them hold every pair of values that some allowed row holds.

    Greedy: each row begins with a pair that is still missing, and is completed by the values that bring most missing
    pairs with them. ``allowed`` judges partial rows as well, by the options that they have.
    """
    rng = random.Random(seed)
    names = list(options)
    missing = {
        ((first, i), (second, j))
        for first, second in itertools.combinations(names, 2)
        for i, j in itertools.product(range(len(options[first])), range(len(options[second])))
    }

    def values(chosen: dict[str, int]) -> Row:
        return {name: options[name][index] for name, index in chosen.items()}

    def completed(start: dict[str, int]) -> dict[str, int] | None:
        chosen = dict(start)
        others = [name for name in names if name not in chosen]
        rng.shuffle(others)
        for name in others:
            fitting = []
            for index in range(len(options[name])):
                if allowed(values({**chosen, name: index})):
                    gain = sum(_pair(names, (name, index), pair) in missing for pair in chosen.items())
                    fitting.append((gain, rng.random(), index))
            if not fitting:
                return None
            chosen[name] = max(fitting)[2]
        return chosen

    rows = []
    for pair in sorted(missing):
        if pair not in missing:
            continue
        start = dict(pair)
        candidates = [completed(start) for _ in range(tries)] if allowed(values(start)) else []
        complete = [row for row in candidates if row is not None]
        missing.discard(pair)
        if not complete:
            continue
        best = max(complete, key=lambda row: sum(pair in missing for pair in _pairs(names, row)))
        missing.difference_update(_pairs(names, best))
        rows.append(values(best))
    return rows


def _pairs(names: list[str], row: dict[str, int]) -> list[tuple[tuple[str, int], tuple[str, int]]]:
    return list(itertools.combinations([(name, row[name]) for name in names], 2))


def _pair(
    names: list[str], one: tuple[str, int], other: tuple[str, int]
) -> tuple[tuple[str, int], tuple[str, int]]:
    return (one, other) if names.index(one[0]) < names.index(other[0]) else (other, one)
