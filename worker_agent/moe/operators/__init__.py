"""The operators that MoE layers are made of, under torch_npu's own names and arguments."""

from worker_agent.moe.operators.contract import (
    DispatchQuantMode,
    GroupListType,
    Operators,
    QuantMode,
    token_counts,
)
from worker_agent.moe.operators.selection import operators_for

__all__ = ["DispatchQuantMode", "GroupListType", "Operators", "QuantMode", "operators_for", "token_counts"]
