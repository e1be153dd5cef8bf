"""Weighing expert outputs and summing each token's: done once, by the experts or by ``combine``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker_agent.moe.dispatch.interface import DispatchRequest
from worker_agent.moe.operators import Operators


@dataclass(frozen=True)
class Weights:
    """A request's weights, put where they will be applied: one of the two is ``None``."""

    by_experts_TK: torch.Tensor | None
    by_combine_TK: torch.Tensor | None

    @classmethod
    def of(cls, request: DispatchRequest) -> Weights:
        """Where the request wants them."""
        weights_TK = request.real_weights()
        return cls(weights_TK, None) if request.experts_weigh else cls(None, weights_TK)


@dataclass(frozen=True)
class WeightAndReduce:
    """Where each choice's row stands, and what it weighs."""

    row_of_choice: torch.Tensor
    """int32 ``[T*K]``; any number outside the rows for a choice that has none."""

    choices: int
    """K."""

    weights_TK: torch.Tensor | None
    """``None`` where the experts have weighed: rows are then only summed."""

    absent_TK: torch.Tensor | None = None
    """bool: the choices that have no row; ``None`` where all have one."""

    def __call__(self, operators: Operators, rows_NH: torch.Tensor) -> torch.Tensor:
        """The tokens' outputs ``[T, H]``, of the rows' dtype; the rows are used up."""
        tokens = self.row_of_choice.shape[0] // self.choices
        if not rows_NH.shape[0]:
            return rows_NH.new_zeros(tokens, rows_NH.shape[1])
        weights_TK = self.weights_TK
        if weights_TK is None:
            weights_TK = rows_NH.new_ones(tokens, self.choices, dtype=torch.float32)
        row_of_choice = self.row_of_choice
        if self.absent_TK is not None:
            # Row 0 stands in for a missing one and weighs nothing; where it is nobody's it may hold anything, even NaN.
            weights_TK = weights_TK.masked_fill(self.absent_TK, 0.0)
            row_of_choice = row_of_choice.masked_fill(self.absent_TK.reshape(-1), 0)
            rows_NH[0].masked_fill_(self.absent_TK.all(), 0.0)
        return operators.npu_moe_token_unpermute(rows_NH, row_of_choice, weights_TK)
