"""Reference expert-parallel Mixture-of-Experts (MoE) layer: a ``LiveLayer`` that agents can rebalance."""

from eplb_lab.layer.block import MoEBlock
from eplb_lab.layer.checkpoint import ExpertLoader
from eplb_lab.layer.compose import LayerOptions
from eplb_lab.layer.dense import DenseMoE
from eplb_lab.layer.layer import ExpertParallelMoE
from eplb_lab.layer.router import Router, Scoring
from eplb_lab.layer.shape import Activation, MicroBatch, MoEShape
from eplb_lab.layer.shared_experts import SharedExperts
from eplb_lab.layer.weights import ExpertSource, seeded_experts

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
