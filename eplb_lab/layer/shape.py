"""Dimensions and activation of one MoE layer, a step's tokens, and the check that they fit.

How bad input ends
    What one rank can see for itself (a shape, a dtype, a device, an id out of range) it refuses with ``ValueError``
    before it enters a collective. Ranks whose input was good are then alone in that step's first exchange: they
    fail with torch's own error as soon as the refusing process ends its group, or else when the group's timeout runs
    out. A host that catches the error must end the step on all ranks.

    What can be seen only by comparing ranks is found where ranks exchange sizes anyway: tokens of different
    widths (another K) are refused by all ranks of a gathering preparation alike, and so are grouped experts that are
    not chosen equally. All2AllV lets each rank have its own K; MC2's operators want one K on all
    ranks and cannot check it. Layers must be built alike on all ranks: experts, hidden size, dtype, dispatcher, parts.
    log2phy tables that do not fit the placement are refused when a layer is built; who writes others into them later
    must do so on all ranks between the same two steps, as agents do by their votes, or tokens are lost.
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
    """The function of an expert's first product, by the names that engines give it: of its gate, times its up part."""

    SILU = "silu"
    GELU = "gelu"
    """Exact, by the error function."""

    SWIGLUOAI = "swigluoai"
    """gpt-oss: both halves are clamped, the gate's sigmoid is steeper, and one is added to the up projection."""

    def __call__(self, first: torch.Tensor) -> torch.Tensor:
        """Return the activation ``[..., I]`` of a first product ``[..., 2*I]``, gate first."""
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
    """One rank's tokens of a step, or of one of a step's two parts; ``ExpertParallelMoE.forward`` describes them."""

    hidden_TH: torch.Tensor
    topk_ids_TK: torch.Tensor
    topk_weights_TK: torch.Tensor
    active: torch.Tensor | None = None


@dataclass(frozen=True)
class MoEShape:
    """Layer index, dimensions and activation of one MoE layer; ``ValueError`` where a dimension is not positive."""

    layer: int
    experts: int
    """E, logical experts."""

    hidden: int
    """H."""

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
        """Raise ``ValueError`` naming layer, tensor and what was expected, unless a call's tensors fit.

        These are ``hidden_TH``, ``topk_ids_TK`` and ``topk_weights_TK``, and ``active``, the real tokens ``[T]`` or
        choices ``[T, K]``; the layer's tokens are of ``dtype``, on ``device``. With ``check_ids`` the values of real
        choices are looked at too, which on an accelerator waits for the device.
        """
        ids_shape = list(topk_ids_TK.shape)
        if hidden_TH.ndim != 2 or hidden_TH.shape[1] != self.hidden:
            self._refuse("hidden", f"the shape [T, {self.hidden}]", list(hidden_TH.shape))
        tokens = hidden_TH.shape[0]
        if len(ids_shape) != 2 or ids_shape[0] != tokens or ids_shape[1] < 1:
            self._refuse("topk_ids", f"the shape [{tokens}, K] with K >= 1", ids_shape)
        if list(topk_weights_TK.shape) != ids_shape:
            self._refuse("topk_weights", f"the shape {ids_shape}", list(topk_weights_TK.shape))
        if active is not None and list(active.shape) not in (ids_shape[:1], ids_shape):
            self._refuse("active", f"the shape {ids_shape[:1]} or {ids_shape}", list(active.shape))
        floating, integers = topk_weights_TK.is_floating_point(), (torch.int32, torch.int64)
        for name, tensor, expected, fits in (
            ("hidden", hidden_TH, f"the layer's dtype {dtype}", hidden_TH.dtype == dtype),
            ("topk_ids", topk_ids_TK, "int32 or int64", topk_ids_TK.dtype in integers),
            ("topk_weights", topk_weights_TK, "a floating-point dtype", floating),
            ("active", active, "the dtype torch.bool", active is None or active.dtype == torch.bool),
        ):
            if tensor is not None and not fits:
                self._refuse(name, expected, tensor.dtype)
            if tensor is not None and tensor.device != device:
                self._refuse(name, f"the layer's device {device}", tensor.device)
        if not check_ids:
            return
        outside_TK = (topk_ids_TK < 0) | (topk_ids_TK >= self.experts)
        if active is not None:
            outside_TK &= active if active.ndim == 2 else active.unsqueeze(1)
        if outside_TK.any():
            token, choice = outside_TK.nonzero()[0].tolist()
            found = f"{int(topk_ids_TK[token, choice])} at token {token}, choice {choice}"
            self._refuse("topk_ids", f"expert ids 0..{self.experts - 1}", found)

    def _refuse(self, tensor: str, expected: str, found: object) -> None:
        raise ValueError(f"layer {self.layer}: {tensor} must have {expected}, got {found}")


def real_ids(topk_ids_TK: torch.Tensor, active: torch.Tensor | None, phase: StepPhase | None) -> torch.Tensor:
    """Return the ids, int32, -1 for choices that are not ``active``, as none is in a dummy phase."""
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
    """Outputs with zeros for padding tokens, and for all of a dummy phase; a mask by choice leaves all tokens."""
    if phase is StepPhase.DUMMY:
        return torch.zeros_like(out_TH)
    if active is None or active.ndim == 2:
        return out_TH
    return out_TH.masked_fill(~active.unsqueeze(1), 0.0)
