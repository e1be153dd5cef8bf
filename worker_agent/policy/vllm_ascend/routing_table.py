"""Routing tables of vLLM-Ascend's second model runner, as dealing tables with 1,024 entries per expert.

The runner sends the token in row ``t`` of a batch to the replica in row ``t % 1024`` of the table. The engine fills the
table so that an expert's replicas take turns. Here, each replica has its own number of rows, and the replicas' rows
are interleaved evenly, so that small batches are split in nearly the same proportions.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from worker_agent.policy.figures import Int64

ROWS = 1024
"""Rows of the engine's table."""


def routing_table(rows_P: Int64, slots_P: Int64, rank: int, ranks: int) -> npt.NDArray[np.int32]:
    """Return one layer's table for one rank: the slot for each table row and expert, int32 ``[ROWS, E]``.

    Parameters
    ----------
    rows_P
        int64 ``[P]``, number of rows of each slot, as returned by ``rows_of_slots``.
    slots_P
        int64 ``[P]``, expert in each slot.
    rank, ranks
        Rank that uses the table, and number of ranks. Each rank starts at a different row, so that the first tokens of
        small batches go to different replicas.

    Examples
    --------
    Three of four tokens for expert 0 go to slot 0:

    >>> table = routing_table(np.array([768, 1024, 256]), np.array([0, 1, 0]), rank=0, ranks=2)
    >>> table[:8, 0].tolist(), table[:3, 1].tolist()
    ([0, 0, 2, 0, 0, 0, 2, 0], [1, 1, 1])
    """
    slot_X = np.repeat(np.arange(rows_P.size), rows_P)
    turn_X = np.arange(slot_X.size) - np.repeat(np.cumsum(rows_P) - rows_P, rows_P)
    position_X = (turn_X + 0.5) / rows_P[slot_X]
    expert_X = slots_P[slot_X]
    table_ED = slot_X[np.lexsort((position_X, expert_X))].reshape(-1, ROWS)
    start_E = rank * (ROWS // ranks + 1) + np.arange(len(table_ED))
    row_ED = (np.arange(ROWS) + start_E[:, None]) % ROWS
    return np.ascontiguousarray(np.take_along_axis(table_ED, row_ED, axis=1).T, dtype=np.int32)
