"""A scoreboard for a short demo with known loads."""

from __future__ import annotations

from typing import Any

from eplb_lab.demo.scoreboard import Scoreboard

RANKS = 2
LAYERS = 1
STEPS = 4
# Rank 0 receives all tokens until the layer switches after step 1. After that, each rank receives half of the tokens
# and steps take half as long.
LIVE = [[40, 0], [40, 0], [20, 20], [20, 20]]
STILL = [[40, 0]] * STEPS


def rank_line(rank: int, steps: range, **changes: Any) -> dict[str, Any]:
    rows = [
        {
            "live_load": [LIVE[step][rank]],
            "still_load": [STILL[step][rank]],
            "source": [[10, 10]],
            "live_ms": 5.0 + rank,
            "still_ms": 9.0 + rank,
            "agent_ms": 0.5 + rank / 10,
            "tokens": 8,
            "epoch": int(step >= 1),
        }
        for step in steps
    ]
    facts = {
        "layers_switched": int(steps.stop > 1),
        "experts_received": rank,
        "bytes_received": 100 * rank,
        "worst_difference": 1e-7,
        "largest_output": 2.0,
        "halted": None,
    }
    return {"rank": rank, "steps": rows, **facts, **changes}


def scored_board(**changes: Any) -> Scoreboard:
    board = Scoreboard(RANKS, LAYERS)
    for rank in range(RANKS):
        board.add(rank_line(rank, range(STEPS), **changes))
    return board
