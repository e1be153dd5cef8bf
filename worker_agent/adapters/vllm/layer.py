"""One MoE layer of vLLM as the agent sees it, and the heat of all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class VllmLayer:
    """A ``LiveLayer`` over vLLM's own tensors.

    ``log2phy`` is the first column of vLLM's ``logical_to_physical_map``: with one replica per expert in its replica
    count, the router sends every choice there. So a commit writes vLLM's table in place, where graphs have captured it.

    Parameters
    ----------
    log2phy
        View ``[E]`` of the layer's ``logical_to_physical_map``.
    expert_map
        int32 ``[E]``, the agent's own: local slot of each expert, -1 where this rank has none. vLLM's layers map
        physical ids, whose owners never change, and need none.
    weights
        The tensors of ``get_expert_weights()``, each ``[S, ...]``.
    source_load
        int32 ``[W, E]``, rows of ``HeatRings``.
    load_counter
        int64 scalar, forward passes counted so far.
    shares_tokens
        Whether other ranks run this layer on the same tokens.
    """

    moe_load = None
    """vLLM does not count what slots receive; the service derives it from what every rank's tokens chose."""

    def __init__(
        self,
        log2phy: torch.Tensor,
        expert_map: torch.Tensor,
        weights: Sequence[torch.Tensor],
        source_load: torch.Tensor,
        load_counter: torch.Tensor,
        shares_tokens: bool,
    ) -> None:
        self.log2phy = log2phy
        self.expert_map = expert_map
        self.source_load: torch.Tensor | None = source_load
        self.load_counter = load_counter
        self.shares_tokens = shares_tokens
        self._weights = list(weights)

    def expert_weights(self) -> list[torch.Tensor]:
        """Every tensor that vLLM's own EPLB would move."""
        return self._weights


class HeatRings:
    """Per-step counts of all layers, on the device; filled once per forward pass from vLLM's ``expert_load_pass``.

    Parameters
    ----------
    layers, experts
        L and E.
    rows
        Steps that the rings hold.
    device
        Where vLLM counts.
    """

    def __init__(self, layers: int, experts: int, rows: int, device: torch.device) -> None:
        # Step by step in memory: a pass writes one piece, and a report copies one.
        sources_WLE = torch.zeros((rows, layers, experts), dtype=torch.int32, device=device)
        self.sources_LWE = sources_WLE.transpose(0, 1)
        self._row_LE_W = sources_WLE.unbind()
        # Passes are counted by calls, on the host: on a device this would be one operation more in each of them.
        self.counter = torch.zeros((), dtype=torch.int64)
        self._steps = 0

    def record(self, chosen_LP: torch.Tensor | None, phy2log_LP: torch.Tensor) -> None:
        """One forward pass is over. A few operations for all layers, queued on the current stream.

        Parameters
        ----------
        chosen_LP
            Choices of this rank's own tokens by physical expert, int32 ``[L, R*S]``; ``None`` where it had none or
            another rank counts them.
        phy2log_LP
            Logical expert of each slot during the pass, int64 ``[L, R*S]``.
        """
        sources_LE = self._row_LE_W[self._steps % len(self._row_LE_W)]
        sources_LE.zero_()
        if chosen_LP is not None:
            sources_LE.scatter_add_(1, phy2log_LP, chosen_LP)
        self._steps += 1
        self.counter.add_(1)
