"""Dimensions and activation of an MoE layer, the tokens of a step, and their validation.

Handling of invalid input
    A rank validates everything that it can check locally (shapes, dtypes, devices, expert ids) and raises
    ``ValueError`` before it enters a collective. The remaining ranks, whose input was valid, then block in the first
    exchange of that step. They fail with a torch error when the failed process destroys its group, or when the group's
    timeout expires. A host that catches the ``ValueError`` must therefore end the step on all ranks.

    Differences between ranks are detected only if the ranks exchange sizes anyway. A preparation that gathers tokens
    raises on every rank if the tokens' widths differ between ranks (for example because K differs). If a
    token's grouped experts are not split evenly over the ranks, every rank raises as well. With all-to-all, K may
    differ between ranks. MC2's operators require the same K on all ranks but cannot check it.

    Layers must be built with the same experts, hidden size, dtype, dispatcher and options on all ranks. Building a
    layer fails if its ``log2phy`` table does not fit the placement. Code that writes a different table later must do so
    on all ranks between the same two steps, as agents do after a vote. Otherwise, tokens are lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch.nn.functional import gelu, silu

from eplb_core.heat.phase import StepPhase

_SWIGLUOAI_SLOPE = 1.702
_SWIGLUOAI_LIMIT = 7.0


class Activation(str, Enum):
    """Activation between an expert's two products: a function of the gate, times the up projection.

    The values are the names that engines use.
    """

    SILU = "silu"
    GELU = "gelu"
    """Exact GELU, based on the error function."""

    SWIGLUOAI = "swigluoai"
    """gpt-oss: both halves are clamped, the gate's sigmoid is steeper, and one is added to the up projection."""

    def __call__(self, first: torch.Tensor) -> torch.Tensor:
        """Return the activation ``[..., I]`` of a first product ``[..., 2*I]``, whose gate half comes first.

        Examples
        --------
        >>> Activation.SILU(torch.tensor([[0.0, 2.0, 5.0, 10.0]]))  # gate [0, 2], up projection [5, 10]
        tensor([[ 0.0000, 17.6159]])
        """
        gate, up = first.chunk(2, dim=-1)
        if self is Activation.SILU:
            return silu(gate) * up
        if self is Activation.GELU:
            return gelu(gate) * up
        gate = gate.clamp(max=_SWIGLUOAI_LIMIT)
        up = up.clamp(-_SWIGLUOAI_LIMIT, _SWIGLUOAI_LIMIT) + 1.0
        return gate * torch.sigmoid(gate * _SWIGLUOAI_SLOPE) * up


@dataclass(frozen=True)
class MicroBatch:
    """One rank's tokens for a step or half a step. See ``ExpertParallelMoE.forward`` for the fields."""

    hidden_TH: torch.Tensor
    topk_ids_TK: torch.Tensor
    topk_weights_TK: torch.Tensor
    active: torch.Tensor | None = None


@dataclass(frozen=True)
class MoEShape:
    """Layer index, dimensions and activation of one MoE layer.

    Raises ``ValueError`` if a dimension is not positive.
    """

    layer: int
    experts: int
    """E, the number of logical experts."""

    hidden: int
    """H, the width of a token."""

    intermediate: int
    """I, the width inside an expert."""

    activation: Activation = Activation.SILU

    def __post_init__(self) -> None:
        if min(self.experts, self.hidden, self.intermediate) < 1:
            raise ValueError(
                f"layer {self.layer}: experts, hidden and intermediate must be positive, got {self}"
            )

    def check_tokens(
        self,
        hidden_TH: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        active: torch.Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
        check_ids: bool,
    ) -> None:
        """Validate the tensors of one call.

        Parameters
        ----------
        hidden_TH
            Tokens ``[T, H]``.
        topk_ids_TK
            Logical experts ``[T, K]``.
        topk_weights_TK
            Weights ``[T, K]``.
        active
            Mask of the real tokens ``[T]`` or choices ``[T, K]``.
        dtype
            Data type of the layer's tokens.
        device
            Device of the layer.
        check_ids
            True to also check the ids of the real choices. On an accelerator, this makes the host wait for the device.

        Raises
        ------
        ValueError
            If a tensor is invalid. The error message names the layer, the tensor and the requirement.
        """
        ids_shape = list(topk_ids_TK.shape)
        if hidden_TH.ndim != 2 or hidden_TH.shape[1] != self.hidden:
            self._reject("hidden", f"shape [T, {self.hidden}]", list(hidden_TH.shape))
        tokens = hidden_TH.shape[0]
        if len(ids_shape) != 2 or ids_shape[0] != tokens or ids_shape[1] < 1:
            self._reject("topk_ids", f"shape [{tokens}, K] with K >= 1", ids_shape)
        if list(topk_weights_TK.shape) != ids_shape:
            self._reject("topk_weights", f"shape {ids_shape}", list(topk_weights_TK.shape))
        if active is not None and list(active.shape) not in (ids_shape[:1], ids_shape):
            self._reject("active", f"shape {ids_shape[:1]} or {ids_shape}", list(active.shape))
        is_floating = topk_weights_TK.is_floating_point()
        is_integer = topk_ids_TK.dtype in (torch.int32, torch.int64)
        is_mask = active is None or active.dtype == torch.bool
        for name, tensor, requirement, fits in (
            ("hidden", hidden_TH, f"the layer's dtype {dtype}", hidden_TH.dtype == dtype),
            ("topk_ids", topk_ids_TK, "dtype int32 or int64", is_integer),
            ("topk_weights", topk_weights_TK, "a floating-point dtype", is_floating),
            ("active", active, "dtype torch.bool", is_mask),
        ):
            if tensor is not None and not fits:
                self._reject(name, requirement, tensor.dtype)
            if tensor is not None and tensor.device != device:
                self._reject(name, f"the layer's device {device}", tensor.device)
        if check_ids:
            self._check_ids(topk_ids_TK, active)

    def _check_ids(self, topk_ids_TK: torch.Tensor, active: torch.Tensor | None) -> None:
        invalid_TK = (topk_ids_TK < 0) | (topk_ids_TK >= self.experts)
        if active is not None:
            invalid_TK &= active if active.ndim == 2 else active.unsqueeze(1)
        if invalid_TK.any():
            token, choice = invalid_TK.nonzero()[0].tolist()
            value = f"{int(topk_ids_TK[token, choice])} at token {token}, choice {choice}"
            self._reject("topk_ids", f"expert ids 0..{self.experts - 1}", value)

    def _reject(self, tensor: str, requirement: str, value: object) -> None:
        raise ValueError(f"layer {self.layer}: {tensor} must have {requirement}, got {value}")


def real_ids(topk_ids_TK: torch.Tensor, active: torch.Tensor | None, phase: StepPhase | None) -> torch.Tensor:
    """Return the ids as int32, with -1 for choices that are not ``active`` and for all choices of a dummy step."""
    topk_ids_TK = topk_ids_TK.to(torch.int32)
    if phase is StepPhase.DUMMY:
        return torch.full_like(topk_ids_TK, -1)
    if active is None:
        return topk_ids_TK
    active_TK = active if active.ndim == 2 else active.unsqueeze(1)
    return topk_ids_TK.masked_fill(~active_TK, -1)


def masked_outputs(
    out_TH: torch.Tensor, active: torch.Tensor | None, phase: StepPhase | None
) -> torch.Tensor:
    """Return the outputs with zeros for padding tokens and for all tokens of a dummy step.

    A mask per choice (``[T, K]``) marks no token as padding, so it leaves the outputs unchanged.
    """
    if phase is StepPhase.DUMMY:
        return torch.zeros_like(out_TH)
    if active is None or active.ndim == 2:
        return out_TH
    return out_TH.masked_fill(~active.unsqueeze(1), 0.0)
