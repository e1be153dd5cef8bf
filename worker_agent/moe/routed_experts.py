"""Which experts each token of a step chose, in every layer: for hosts that return them beside a response."""

from __future__ import annotations

import torch


class RoutedExperts:
    """The logical experts of one step's tokens, of all layers that record into it; written in place, on the device.

    Parameters
    ----------
    tokens
        The most tokens of a step on this rank.
    layers, top_k
        L and K; a layer's place is its index.
    """

    ids_TLK: torch.Tensor
    """int32 ``[T, L, K]``: logical experts, -1 for choices that are not real; keeps its address."""

    def __init__(self, tokens: int, layers: int, top_k: int, device: torch.device | str = "cpu") -> None:
        self.ids_TLK = torch.full((tokens, layers, top_k), -1, dtype=torch.int32, device=device)

    def of_step(self, tokens: int) -> torch.Tensor:
        """Of the first ``tokens`` tokens, ``[tokens, L, K]``: a view, which the next step overwrites."""
        return self.ids_TLK[:tokens]

    def check(self, layer: int, tokens: int, choices: int) -> None:
        """Raise ``ValueError`` naming the layer where there is no room for its choices."""
        most, layers, top_k = self.ids_TLK.shape
        if layer >= layers:
            raise ValueError(f"layer {layer}: routed experts are recorded of layers 0..{layers - 1} alone")
        if tokens > most or choices != top_k:
            raise ValueError(
                f"layer {layer}: routed experts have room for {most} tokens of {top_k} choices, "
                f"got {tokens} of {choices}"
            )

    def record(self, layer: int, ids_TK: torch.Tensor) -> None:
        """Write a layer's choices ``[T, K]``, those of micro-batches behind one another."""
        self.ids_TLK[: ids_TK.shape[0], layer].copy_(ids_TK)
