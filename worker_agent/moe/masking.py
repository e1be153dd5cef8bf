"""Which choices are real: padding and dummy tokens are routed nowhere."""

from __future__ import annotations

import torch

from worker_agent.heat import StepPhase
from worker_agent.moe.shape import MoEShape


def real_ids(
    shape: MoEShape, topk_ids_TK: torch.Tensor, active: torch.Tensor | None, phase: StepPhase | None
) -> torch.Tensor:
    """The ids, -1 for choices that are not real; the same tensor where all are.

    ``active`` bool ``[T]`` or ``[T, K]`` tells which are; ``ValueError`` where it does not fit. In a dummy phase
    none is.
    """
    if active is not None:
        shape.check_active(active, topk_ids_TK)
    if phase is StepPhase.DUMMY:
        return torch.full_like(topk_ids_TK, -1)
    if active is None:
        return topk_ids_TK
    active_TK = active if active.ndim == 2 else active.unsqueeze(1)
    return topk_ids_TK.masked_fill(~active_TK, -1)
