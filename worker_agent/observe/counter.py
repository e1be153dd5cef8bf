"""Counts the router's choices in an observed model, on the device and inside captured graphs."""

from __future__ import annotations

import torch

from worker_agent.adapters.engine_host import HeatRings
from worker_agent.adapters.vllm_ascend.choices import ChoiceCounter


class RouterCounter:
    """Counts the logical experts that the tokens of each forward pass choose, and keeps them in heat rings.

    Padding (rows beyond the pass's real tokens) and ids outside ``0..E-1`` (not routed experts) are not counted.

    Parameters
    ----------
    layers
        L, number of layers.
    experts
        E, logical experts per layer.
    device
        Device of the router's choices.
    max_rows
        Number of rows in the largest batch. In larger batches, padding is counted as well. Set it to 0 to count all
        rows, because batches also contain other ranks' tokens.

    Attributes
    ----------
    rings
        Rings with the counts of recent passes.

    Examples
    --------
    >>> counter = RouterCounter(layers=1, experts=3, device=torch.device("cpu"), max_rows=4)
    >>> counter.expect(tokens=2)
    >>> counter.count(0, torch.tensor([[0, 2], [2, 1], [1, 1]]))
    >>> counter.record()
    >>> counter.rings.sources_LWE[:, 0].tolist(), int(counter.rings.passes)
    ([[1, 1, 2]], 1)
    """

    def __init__(self, layers: int, experts: int, device: torch.device, max_rows: int = 0) -> None:
        self.rings = HeatRings(layers, device, experts=experts)
        self._layers = layers
        self._experts = experts
        # The additional column collects padding and ids that are not routed experts.
        self._choices = ChoiceCounter(layers, experts + 1, device)
        self._row_T = torch.arange(max_rows, device=device)
        self._is_real_T = torch.ones(max_rows, dtype=torch.bool, device=device)

    def expect(self, tokens: int) -> None:
        """Prepare for a pass with this number of real tokens. Call it on the pass's stream."""
        self._choices.clear()
        torch.lt(self._row_T, tokens, out=self._is_real_T)

    def count(self, layer: int, ids_TK: torch.Tensor, is_real_T: torch.Tensor | None = None) -> None:
        """Count the choices of a layer when its router runs. A graph may capture this call.

        Parameters
        ----------
        layer
            Index of the layer.
        ids_TK
            ``[T, K]``, logical expert of each choice.
        is_real_T
            bool ``[T]``, False for padding, if the engine provides this mask. By default, rows beyond the number of
            tokens passed to ``expect`` are padding.
        """
        self.rings.layer_runs(layer, self._layers)
        self.count_choices(layer, ids_TK, is_real_T)

    def count_choices(self, layer: int, ids_TK: torch.Tensor, is_real_T: torch.Tensor | None = None) -> None:
        """Count the choices of a layer without counting the pass; see ``count``."""
        is_expert_TK = (ids_TK >= 0) & (ids_TK < self._experts)
        rows = ids_TK.shape[0]
        if is_real_T is None and rows <= len(self._is_real_T):
            is_real_T = self._is_real_T[:rows]
        if is_real_T is not None:
            is_expert_TK &= is_real_T[:, None]
        self._choices.count(layer, torch.where(is_expert_TK, ids_TK, self._experts))

    def count_pass(self) -> None:
        """Count a pass whose layers cannot count it, because a rank without tokens does not route."""
        self.rings.layer_runs(0, 1)

    def record(self, *, counts: bool = True) -> None:
        """Write the row of the last pass.

        Parameters
        ----------
        counts
            False to write zeros, because the pass was a dummy or another rank counts the same tokens.
        """
        self.rings.record(chosen_LX=self._choices.chosen_LE[:, : self._experts] if counts else None)
