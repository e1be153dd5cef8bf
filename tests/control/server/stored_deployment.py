"""A stored deployment with a distinct value in each field."""

from __future__ import annotations

from eplb_service.control.core.deployment import Totals
from eplb_service.control.server.store import StoredDeployment

STORED = StoredDeployment("decode", True, 9, Totals(3, 4, 5, 6, 7), "kept", 12, (1 << 64) - 1, 3, 8, 4, 3)
