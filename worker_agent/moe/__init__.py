"""Reference expert-parallel Mixture-of-Experts (MoE) layer, a ``LiveLayer`` that agents can rebalance."""

from worker_agent.moe.block import MoEBlock
from worker_agent.moe.checkpoint import ExpertLoader
from worker_agent.moe.compose import LayerOptions
from worker_agent.moe.dense import DenseMoE
from worker_agent.moe.layer import ExpertParallelMoE
from worker_agent.moe.router import Router, Scoring
from worker_agent.moe.shape import Activation, MicroBatch, MoEShape
from worker_agent.moe.shared_experts import SharedExperts
from worker_agent.moe.weights import ExpertSource, seeded_experts

__all__ = [
    "Activation",
    "DenseMoE",
    "ExpertLoader",
    "ExpertParallelMoE",
    "ExpertSource",
    "LayerOptions",
    "MicroBatch",
    "MoEBlock",
    "MoEShape",
    "Router",
    "Scoring",
    "SharedExperts",
    "seeded_experts",
]
