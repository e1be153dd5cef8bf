"""Deals a rank's tokens over the entries of its dealing table, with tensor operators alone: graphs may capture it."""

from __future__ import annotations

import torch

from worker_agent.moe.operators import count_ids


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
    turn_N = turns(counted_N, experts + 1)
    if begun_E is not None:
        turn_N = turn_N + begun_E.index_select(0, ids_N.long())
    return table_ED.reshape(-1).index_select(0, ids_N.long() * width + turn_N % width)


def turns(ids_N: torch.Tensor, experts: int) -> torch.Tensor:
    """How many choices of the same expert come before each one, int64 ``[N]``; ids are 0 to ``experts - 1``."""
    order_N = ids_N.argsort(stable=True)
    count_E = count_ids(ids_N, experts)
    first_E = count_E.cumsum(0) - count_E
    place_N = torch.arange(ids_N.shape[0], device=ids_N.device)
    turn_N = place_N - first_E.index_select(0, ids_N.index_select(0, order_N))
    return torch.empty_like(turn_N).scatter_(0, order_N, turn_N)
