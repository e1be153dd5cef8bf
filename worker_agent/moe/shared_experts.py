"""Experts that every token goes to, split in two parts so that they run while tokens travel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from worker_agent.moe.activation import Activation
from worker_agent.moe.dense import plain_activation
from worker_agent.moe.expert_batch import ExpertBatch
from worker_agent.moe.expert_tensors import ExpertTensors
from worker_agent.moe.experts import activated, grouped_product
from worker_agent.moe.operators import GroupListType, Operators
from worker_agent.moe.rank_group import RankGroup
from worker_agent.moe.weights import ExpertWeights

SharedModule = Callable[[torch.Tensor], torch.Tensor]
"""A host's own shared experts as a whole: ``[T, H]`` -> ``[T, H]``."""


class SharedExperts(ExpertTensors):
    """A feed-forward network over all tokens, in floating point or W8A8.

    Parameters
    ----------
    layer
        Layer index, for messages.
    weights
        One slot: w13 ``[1, 2*I, H]`` (``[1, I, H]`` without a gate) and w2 ``[1, H, I]``, I that of all shared experts
        together; with biases or without.
    dtype
        That of the tokens.
    gate_H
        ``[H]``: the outputs are multiplied by the sigmoid of its product with each token; ``None`` for no gate.
    activation
        Between the two products.
    tp
        The tensor-parallel ranks that have the same tokens, and each a part of I: ``weights`` are this rank's, and the
        second part ends with an all-reduce. w2's bias counts on the first of them alone, so that all may hold it. By
        default this rank has all of I.
    whole
        A host's own module, whose place the two parts take: ``verify`` holds them against it before they are used, on
        all tensor-parallel ranks together. ``None`` where there is none.

    Raises ``ValueError`` naming the layer where shapes do not fit, or the two parts are not the whole.
    """

    gate_H: torch.Tensor | None

    def __init__(
        self,
        layer: int,
        weights: ExpertWeights,
        operators: Operators,
        dtype: torch.dtype,
        gate_H: torch.Tensor | None = None,
        activation: Activation = Activation.SILU,
        tp: RankGroup | None = None,
        whole: SharedModule | None = None,
    ) -> None:
        hidden = weights.w2_SHI.shape[1]
        if weights.w13_SIH.shape[0] != 1 or weights.w13_SIH.shape[2] != hidden:
            raise ValueError(
                f"layer {layer}: shared experts' w13 must have the shape [1, 2*I, {hidden}], "
                f"got {list(weights.w13_SIH.shape)}"
            )
        if gate_H is not None and gate_H.shape != (hidden,):
            raise ValueError(
                f"layer {layer}: shared experts' gate must have the shape [{hidden}], got {list(gate_H.shape)}"
            )
        super().__init__()
        self._hold(layer, weights, gated=activation.gated)
        self.register_buffer("gate_H", gate_H)
        self._layer = layer
        self._operators = operators
        self._dtype = dtype
        self._activation = activation
        self._tp = RankGroup(None) if tp is None else tp
        if whole is not None:
            self.verify(whole)

    def part1(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """The first product: gate and up projection, ``[T, 2*I]``."""
        weights = self._weights()
        return self._product(hidden_TH, weights.w13_SIH, weights.w13_scale_SI, weights.w13_bias_SI)

    def part2(self, hidden_TH: torch.Tensor, gate_up_TI: torch.Tensor) -> torch.Tensor:
        """Activation, down projection and gate, ``[T, H]``; summed over tensor-parallel ranks."""
        weights, inner_TI = self._weights(), activated(self._operators, self._activation, gate_up_TI)
        bias_1H = weights.w2_bias_SH if self._tp.rank == 0 else None
        out_TH = self._product(inner_TI, weights.w2_SHI, weights.w2_scale_SH, bias_1H)
        if self._tp.size > 1:
            out_TH = self._tp.all_reduce(out_TH)
        if self.gate_H is None:
            return out_TH
        return out_TH * torch.sigmoid(hidden_TH @ self.gate_H).unsqueeze(1)

    def beside(self, hidden_TH: torch.Tensor) -> SharedRun:
        """The two parts of one call, for the kernel to run while tokens travel."""
        return SharedRun(self, hidden_TH)

    @torch.no_grad()
    def verify(self, whole: SharedModule, tokens: int = 8, tolerance: float | None = None) -> None:
        """Hold the two parts against a host's own module on random tokens; again where other weights were loaded.

        Tensor-parallel ranks call it together, each with the same module. Raises ``ValueError`` naming the layer where
        their relative difference is past ``tolerance``, by default 1 %, and 5 % in W8A8: a module that does more than
        these two parts must not be split.
        """
        w2_1HI = self.w2_weight
        if tolerance is None:
            tolerance = 5e-2 if self._weights().quantized else 1e-2
        generator = torch.Generator().manual_seed(self._layer)
        hidden_TH = torch.randn(tokens, w2_1HI.shape[1], generator=generator).to(w2_1HI.device, self._dtype)
        expected_TH = whole(hidden_TH).float()
        found_TH = self.part2(hidden_TH, self.part1(hidden_TH)).float()
        if found_TH.shape != expected_TH.shape:
            raise ValueError(
                f"layer {self._layer}: shared experts give the shape {list(expected_TH.shape)} as a whole and "
                f"{list(found_TH.shape)} in two parts"
            )
        difference = float((found_TH - expected_TH).norm() / expected_TH.norm().clamp(min=1e-20))
        if not difference <= tolerance:
            raise ValueError(
                f"layer {self._layer}: shared experts in two parts differ from the whole by {difference:.3g} "
                f"of its norm, past {tolerance:g}; run them unsplit, or mend the weights"
            )

    def _product(
        self,
        rows_TK: torch.Tensor,
        weight_1MK: torch.Tensor,
        weight_scale_1M: torch.Tensor | None,
        bias_1M: torch.Tensor | None,
    ) -> torch.Tensor:
        """All rows times the one matrix, plus its bias, ``[T, M]``; in W8A8 a grouped product of one group."""
        if weight_scale_1M is None or not rows_TK.shape[0]:
            bias_M = None if bias_1M is None else bias_1M[0].to(rows_TK.dtype)
            return linear(rows_TK, weight_1MK[0].to(rows_TK.dtype), bias_M)
        rows_TK, scale_T = self._operators.npu_dynamic_quant(rows_TK)
        count_1 = torch.full((1,), rows_TK.shape[0], dtype=torch.int64, device=rows_TK.device)
        batch = ExpertBatch(rows_TK, count_1, GroupListType.CUMULATIVE)
        return grouped_product(
            self._operators, batch, rows_TK, scale_T, weight_1MK, weight_scale_1M, bias_1M, self._dtype
        )


@dataclass
class SharedRun:
    """One call's two parts; the second needs the first."""

    _experts: SharedExperts
    _hidden_TH: torch.Tensor
    _gate_up_TI: torch.Tensor | None = None

    def during_dispatch(self) -> None:
        """Part 1."""
        self._gate_up_TI = self._experts.part1(self._hidden_TH)

    def during_combine(self) -> torch.Tensor:
        """Part 2, ``[T, H]``."""
        assert self._gate_up_TI is not None, "the first part comes first"
        gate_up_TI, self._gate_up_TI = self._gate_up_TI, None
        return self._experts.part2(self._hidden_TH, gate_up_TI)


def dense_shared_experts(
    w13_IH: torch.Tensor,
    w2_HI: torch.Tensor,
    gate_H: torch.Tensor | None = None,
    activation: Activation = Activation.SILU,
) -> SharedModule:
    """The same network as a whole, in plain torch and without biases."""

    def whole(hidden_TH: torch.Tensor) -> torch.Tensor:
        out_TH = linear(plain_activation(activation, linear(hidden_TH, w13_IH)), w2_HI)
        return out_TH if gate_H is None else out_TH * torch.sigmoid(hidden_TH @ gate_H).unsqueeze(1)

    return whole
