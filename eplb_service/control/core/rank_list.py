"""Ranks in an operator's words."""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN = 8


def rank_list(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 2``, or the first eight and how many more."""
    shown = ", ".join(str(rank) for rank in ranks[:_SHOWN])
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"
