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
    # A value is known by its number; values of an earlier option have lower ones, so a pair is in order by them.
    values = [(name, value) for name in names for value in options[name]]
    numbers: dict[str, list[int]] = {name: [] for name in names}
    for number, (name, _) in enumerate(values):
        numbers[name].append(number)
    missing = {
        pair
        for first, second in itertools.combinations(names, 2)
        for pair in itertools.product(numbers[first], numbers[second])
    }

    def completed(start: tuple[int, int]) -> tuple[list[int], Row] | None:
        chosen = list(start)
        row = dict(values[number] for number in start)
        others = [name for name in names if name not in row]
        rng.shuffle(others)
        for name in others:
            fitting = []
            for number, value in zip(numbers[name], options[name], strict=True):
                row[name] = value
                if allowed(row):
                    gain = sum(((number, o) if number < o else (o, number)) in missing for o in chosen)
                    fitting.append((gain, rng.random(), number))
            if not fitting:
                return None
            best = max(fitting)[2]
            chosen.append(best)
            row[name] = values[best][1]
        return sorted(chosen), row

    rows = []
    for pair in sorted(missing):
        if pair not in missing:
            continue
        possible = allowed(dict(values[number] for number in pair))
        candidates = [completed(pair) for _ in range(tries)] if possible else []
        complete = [candidate for candidate in candidates if candidate is not None]
        missing.discard(pair)
        if not complete:
            continue
        chosen, row = max(
            complete, key=lambda found: len(missing.intersection(itertools.combinations(found[0], 2)))
        )
        missing.difference_update(itertools.combinations(chosen, 2))
        rows.append({name: row[name] for name in names})
    return rows
