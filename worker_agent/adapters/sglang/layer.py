"""One MoE layer of SGLang as the agent sees it, and the heat of all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class SglangLayer:
    """A ``LiveLayer`` over SGLang's own tensors.

    Parameters
    ----------
    log2phy
        The row of SGLang's table that its dispatch reads, ``[E]`` or ``[E, D]``.
    expert_map
        int32 ``[E]``, the agent's own: SGLang maps physical ids, whose owners never change, and needs none.
    weights
        By kind, each ``[S, ...]``.
    heat
        The rings of all layers.
    index
        Which of them this layer is.
    shares_tokens
        Whether all ranks run the experts on the same tokens.
    """

    def __init__(
        self,
        log2phy: torch.Tensor,
        expert_map: torch.Tensor,
        weights: Sequence[torch.Tensor],
        heat: HeatRings,
        index: int,
        shares_tokens: bool,
    ) -> None:
        self.log2phy = log2phy
        self.expert_map = expert_map
        self.moe_load = None if heat.slots_LWS is None else heat.slots_LWS[index]
        self.source_load = None if heat.sources_LWE is None else heat.sources_LWE[index]
        self.load_counter = heat.counter
        self.shares_tokens = shares_tokens
        self._weights = list(weights)

    def expert_weights(self) -> Sequence[torch.Tensor]:
        """What SGLang's own EPLB would move."""
        return self._weights


class HeatRings:
    """Per-step counts of all layers, on the device, from what SGLang's recorder counts in a pass.

    Three cases: this rank's slots are counted (DeepEP's low-latency mode); all slots are, by a rank that sees all
    tokens; or all slots are by a rank that sees its own tokens alone, which makes source counts.

    Parameters
    ----------
    counted
        The recorder's tensor, int32 ``[layers of the model, S]`` or ``[layers of the model, R*S]``.
    layer_ids
        Its rows.
    slots, experts
        S and E.
    rank
        This rank's number among those of the experts.
    shares_tokens
        Whether this rank sees all tokens.
    rows
        W, steps that the rings hold.
    """

    def __init__(
        self,
        counted: torch.Tensor,
        layer_ids: list[int],
        slots: int,
        experts: int,
        rank: int,
        shares_tokens: bool,
        rows: int,
    ) -> None:
        device, layers = counted.device, len(layer_ids)
        self._counted = counted
        self._layer_ids_L = torch.tensor(layer_ids, device=device)
        self._of_rank = slice(rank * slots, (rank + 1) * slots) if counted.shape[1] != slots else slice(None)
        self._rows = rows
        self._steps = 0
        self.counter = torch.zeros((), dtype=torch.int64, device=device)
        self.slots_LWS: torch.Tensor | None = None
        self.sources_LWE: torch.Tensor | None = None
        if shares_tokens or counted.shape[1] == slots:
            self.slots_LWS = torch.zeros((layers, rows, slots), dtype=torch.int32, device=device)
        else:
            self.sources_LWE = torch.zeros((layers, rows, experts), dtype=torch.int32, device=device)

    def record(self, counts: bool, phy2log_NP: torch.Tensor) -> None:
        """One forward pass is over. A few operations for all layers, queued on the current stream.

        Parameters
        ----------
        counts
            Whether SGLang counted it.
        phy2log_NP
            Logical expert of each slot during the pass, integers ``[layers of the model, R*S]``.
        """
        row = self._steps % self._rows
        self._steps += 1
        self.counter.add_(1)
        ring = self.sources_LWE if self.slots_LWS is None else self.slots_LWS
        assert ring is not None
        ring[:, row].zero_()
        if not counts:
            return
        counted_LP = self._counted.index_select(0, self._layer_ids_L)
        if self.slots_LWS is not None:
            ring[:, row].copy_(counted_LP[:, self._of_rank])
        else:
            phy2log_LP = phy2log_NP.index_select(0, self._layer_ids_L).long()
            ring[:, row].scatter_add_(1, phy2log_LP, counted_LP)
