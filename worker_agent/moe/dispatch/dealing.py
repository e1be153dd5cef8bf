"""Deals a rank's tokens over the entries of its dealing table, with tensor operators alone: graphs may capture it."""

from __future__ import annotations

import torch

from worker_agent.moe.operators import count_ids
from worker_agent.moe.turns import turns


def dealt(
    table_ED: torch.Tensor, ids_N: torch.Tensor, active_N: torch.Tensor | None, begun_E: torch.Tensor | None
) -> torch.Tensor:
    """The entry of each choice, of the table's dtype ``[N]``; anything for choices that are not real.

    Parameters
    ----------
    table_ED
        Integers ``[E, D]``, physical ids: the ``i``-th real choice of an expert goes to entry ``i % D``.
    ids_N
        Integers ``[N]``, the expert of each choice in order, 0 to E - 1.
    active_N
        bool ``[N]``, the choices that are real; ``None`` where all are.
    begun_E
        int64 ``[E]``, choices of each expert that were dealt before these; ``None`` for none.
    """
    experts, width = table_ED.shape
    counted_N = ids_N.long() if active_N is None else ids_N.long().masked_fill(~active_N, experts)
    turn_N = turns(counted_N, count_ids(counted_N, experts + 1))
    if begun_E is not None:
        turn_N = turn_N + begun_E.index_select(0, ids_N.long())
    return table_ED.reshape(-1).index_select(0, ids_N.long() * width + turn_N % width)
