"""The reference expert-parallel Mixture-of-Experts layer: a real live layer for agents to serve."""

from worker_agent.moe.dense import DenseMoE
from worker_agent.moe.expert_source import ExpertSource, seeded_experts
from worker_agent.moe.layer import ExpertParallelMoE
from worker_agent.moe.router import softmax_top_k
from worker_agent.moe.shape import MoEShape

__all__ = ["DenseMoE", "ExpertParallelMoE", "ExpertSource", "MoEShape", "seeded_experts", "softmax_top_k"]
