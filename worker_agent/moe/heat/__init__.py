"""Heat as a layer counts it: on the device, a row a step, real tokens alone."""

from worker_agent.moe.heat.ring import count_ids, write_row
from worker_agent.moe.heat.stage import HeatStage

__all__ = ["HeatStage", "count_ids", "write_row"]
