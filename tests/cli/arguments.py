"""Arguments of a command of which some are changed: an option may be given only once."""

from __future__ import annotations

from collections.abc import Iterable


def changed(good: Iterable[object], *changes: object) -> list[str]:
    """The arguments ``good``, each option with its value, but for those that ``changes`` give; these follow."""
    other = [str(part) for part in changes]
    names = {part.partition("=")[0] for part in other if part.startswith("--")}
    kept: list[str] = []
    keeping = True
    for part in map(str, good):
        if part.startswith("--"):
            keeping = part not in names
        if keeping:
            kept.append(part)
    return [*kept, *other]
