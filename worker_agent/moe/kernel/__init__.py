"""The modular kernel: dispatch -> experts -> combine, composed from interchangeable parts."""

from worker_agent.moe.kernel.batched_experts import BatchedExperts
from worker_agent.moe.kernel.experts_part import ExpertsPart
from worker_agent.moe.kernel.grouped_experts import GroupedExperts
from worker_agent.moe.kernel.modular_kernel import KernelResult, ModularKernel
from worker_agent.moe.kernel.slotwise_experts import SlotwiseExperts
from worker_agent.moe.kernel.workspaces import Workspaces

__all__ = [
    "BatchedExperts",
    "ExpertsPart",
    "GroupedExperts",
    "KernelResult",
    "ModularKernel",
    "SlotwiseExperts",
    "Workspaces",
]
