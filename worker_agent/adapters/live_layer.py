"""What an agent needs of one live MoE layer, whatever engine it belongs to."""

from __future__ import annotations

from typing import Protocol

import torch


class LiveLayer(Protocol):
    """One MoE layer on this rank.

    S local slots, E logical experts, W rows of the heat ring. All tensors keep their addresses for the life of
    the layer: graphs have captured them, and an agent only ever writes into them in place.
    """

    expert_map: torch.Tensor
    """int32 ``[E]``: local slot of each expert, -1 where this rank has none."""

    log2phy: torch.Tensor
    """int32 ``[E]``: physical id that this rank's tokens of each expert go to."""

    moe_load: torch.Tensor
    """int32 ``[W, S]``: tokens received by each slot; step ``n`` (counted from 0) is row ``n % W``."""

    source_load: torch.Tensor | None
    """int32 ``[W, E]``: this rank's own tokens by logical expert, before dispatch; ``None`` where not counted."""

    load_counter: torch.Tensor
    """int64 scalar on the device: forward passes so far, also those without tokens; each adds one on every rank."""

    shares_tokens: bool
    """Whether ranks see the same tokens before they route them (all-gather dispatch): their tables must be one."""

    def expert_weights(self) -> list[torch.Tensor]:
        """Every tensor that the expert kernels read, each ``[S, ...]`` with slot ``s`` at index ``s``, contiguous.

        Those of all layers are on one device.
        """
        ...
