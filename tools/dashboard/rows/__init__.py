"""What the dashboard shows, in reading order."""

from __future__ import annotations

from collections.abc import Sequence

from tools.dashboard.panel import Row
from tools.dashboard.rows import agents, balance, moves, overview, service

ROWS: Sequence[Row] = (overview.ROW, balance.ROW, moves.ROW, agents.ROW, service.ROW)
