"""Two batches through one kernel: while the tokens of one travel, the experts work on the other's."""

from __future__ import annotations

import torch

from worker_agent.moe.dispatch import DispatchRequest
from worker_agent.moe.kernel.modular_kernel import KernelResult, ModularKernel
from worker_agent.moe.weights.expert_weights import ExpertWeights


def run_two(
    kernel: ModularKernel,
    first: DispatchRequest,
    second: DispatchRequest,
    weights: ExpertWeights,
    dtype: torch.dtype,
) -> tuple[KernelResult, KernelResult]:
    """The results of both, each as ``run`` would give it. The kernel's workspaces must have two sets.

    The order of exchanges is the same on all ranks: dispatch, dispatch, combine, combine.
    """
    first_travelling = kernel.start_dispatch(first)
    second_travelling = kernel.start_dispatch(second)
    first_here = first_travelling.receive()
    first_rows = kernel.compute(first_here.batch, weights, dtype, workspace_set=0)
    first_returning = kernel.start_combine(first_rows, first_here)
    second_here = second_travelling.receive()
    second_rows = kernel.compute(second_here.batch, weights, dtype, workspace_set=1)
    second_returning = kernel.start_combine(second_rows, second_here)
    return (
        KernelResult(first_returning.receive(), first_here.batch.heat_S, None),
        KernelResult(second_returning.receive(), second_here.batch.heat_S, None),
    )
