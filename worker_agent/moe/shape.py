"""The dimensions of one MoE layer, and the check that a call's tensors fit them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

ID_TYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class MoEShape:
    """Layer index and dimensions of one MoE layer; ``ValueError`` where a dimension is not positive."""

    layer: int
    experts: int
    """E, logical experts."""

    hidden: int
    """H."""

    intermediate: int
    """I, the width inside an expert."""

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
        dtype: torch.dtype,
        device: torch.device,
        check_ids: bool,
    ) -> None:
        """Raise ``ValueError`` naming layer, tensor and what was expected, unless a call's tensors fit.

        ``dtype`` is that of the layer's tokens, ``device`` that of all its tensors. Only ``check_ids`` looks at
        values, which on an accelerator waits for the device.
        """
        if hidden_TH.ndim != 2 or hidden_TH.shape[1] != self.hidden:
            self._refuse("hidden", f"the shape [T, {self.hidden}]", list(hidden_TH.shape))
        tokens = hidden_TH.shape[0]
        if topk_ids_TK.ndim != 2 or topk_ids_TK.shape[0] != tokens or topk_ids_TK.shape[1] < 1:
            self._refuse("topk_ids", f"the shape [{tokens}, K] with K >= 1", list(topk_ids_TK.shape))
        if topk_weights_TK.shape != topk_ids_TK.shape:
            self._refuse("topk_weights", f"the shape {list(topk_ids_TK.shape)}", list(topk_weights_TK.shape))
        if hidden_TH.dtype != dtype:
            self._refuse("hidden", f"the layer's dtype {dtype}", hidden_TH.dtype)
        if topk_ids_TK.dtype not in ID_TYPES:
            self._refuse("topk_ids", "int32 or int64", topk_ids_TK.dtype)
        if not topk_weights_TK.is_floating_point():
            self._refuse("topk_weights", "a floating-point dtype", topk_weights_TK.dtype)
        tensors = {"hidden": hidden_TH, "topk_ids": topk_ids_TK, "topk_weights": topk_weights_TK}
        for name, tensor in tensors.items():
            if tensor.device != device:
                self._refuse(name, f"the layer's device {device}", tensor.device)
        if check_ids:
            self._check_ids(topk_ids_TK)

    def _check_ids(self, topk_ids_TK: torch.Tensor) -> None:
        outside_TK = (topk_ids_TK < 0) | (topk_ids_TK >= self.experts)
        if outside_TK.any():
            token, choice = outside_TK.nonzero()[0].tolist()
            found = f"{int(topk_ids_TK[token, choice])} at token {token}, choice {choice}"
            self._refuse("topk_ids", f"expert ids 0..{self.experts - 1}", found)

    def _refuse(self, tensor: str, expected: str, found: object) -> None:
        raise ValueError(f"layer {self.layer}: {tensor} must have {expected}, got {found}")
