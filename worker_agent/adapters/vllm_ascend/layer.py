"""One MoE layer of vLLM-Ascend as the agent sees it, and the heat of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from worker_agent.adapters.errors import UnsupportedEngineError
from worker_agent.adapters.live_layer import ExpertWeights


class AscendLayer:
    """A ``LiveLayer`` over an ``AscendFusedMoE``.

    Parameters
    ----------
    layer
        The host's layer. Its ``log2phy`` is the table that its kernels read, so a commit is written there, in place.
    expert_map
        int32 ``[E]``, the agent's own: the host's is read by its length (MC2) or by physical ids (all-gather), and
        never changes.
    weights
        By kind, as ``weights.expert_weights`` gives them.
    heat
        The rings of all layers.
    index
        Which of them this layer is.
    shares_tokens
        Whether ranks may see the same tokens.
    """

    def __init__(
        self,
        layer: Any,
        expert_map: torch.Tensor,
        weights: Sequence[ExpertWeights],
        heat: HeatRings,
        index: int,
        shares_tokens: bool,
    ) -> None:
        self.log2phy: torch.Tensor = layer.log2phy
        self.expert_map = expert_map
        self.moe_load = heat.slots_LWS[index]
        self.source_load = heat.sources_LWE[index]
        self.load_counter = heat.counter
        self.shares_tokens = shares_tokens
        self._weights = weights
        self._first = [list(kind) for kind in weights if isinstance(kind, list)]

    def expert_weights(self) -> Sequence[ExpertWeights]:
        """What the host's own balancer would move.

        Raises
        ------
        UnsupportedEngineError
            Where the host has put another tensor into one of its lists: its kernels would not see an expert arrive.
        """
        lists = [kind for kind in self._weights if isinstance(kind, list)]
        for held, first in zip(lists, self._first, strict=True):
            if len(held) != len(first) or any(
                one is not other for one, other in zip(held, first, strict=True)
            ):
                raise UnsupportedEngineError(
                    "a quantised expert whose tensors vLLM-Ascend replaces while it serves",
                    "Without its custom operators it converts scales on first use, in place of the ones that it loaded",
                    "Install vLLM-Ascend with its custom operators, or serve without dynamic_eplb",
                )
        return self._weights


class HeatRings:
    """Per-step counts of all layers, on the device.

    The host adds to running totals (heat policies 0 to 2) or to rows by its own count of passes (policy 3), which is
    set back here after every pass; choices before dispatch are added to ``chosen_LE`` by ``SourceCounter``.

    Parameters
    ----------
    layers
        The host's layers, all with L, S and E alike.
    experts
        E.
    rows
        W, steps that the rings hold.
    """

    def __init__(self, layers: Sequence[Any], experts: int, rows: int) -> None:
        device = layers[0].log2phy.device
        count, slots = len(layers), int(layers[0].local_num_experts)
        # Step by step in memory: a pass writes one piece, and a report copies one.
        slots_WLS = torch.zeros((rows, count, slots), dtype=torch.int32, device=device)
        sources_WLE = torch.zeros((rows, count, experts), dtype=torch.int32, device=device)
        self.slots_LWS, self.sources_LWE = slots_WLS.transpose(0, 1), sources_WLE.transpose(0, 1)
        self.chosen_LE = torch.zeros((count, experts), dtype=torch.int32, device=device)
        self.counter = torch.zeros((), dtype=torch.int64, device=device)
        self._loads = [layer.moe_load for layer in layers]
        self._counters = [layer.load_counter for layer in layers if hasattr(layer, "load_counter")]
        self._rows = rows
        self._steps = 0

    def record(self, counts: bool, own_tokens: bool) -> None:
        """One forward pass is over.

        Parameters
        ----------
        counts
            Whether the host collects heat of it.
        own_tokens
            Whether this rank had tokens of its own, rather than dummies.
        """
        row = self._steps % self._rows
        if counts:
            received = torch.stack(self._loads)
            self.slots_LWS[:, row].copy_(received if received.dim() == 2 else received.sum(dim=1))
        else:
            self.slots_LWS[:, row].zero_()
        if counts and own_tokens:
            self.sources_LWE[:, row].copy_(self.chosen_LE)
        else:
            self.sources_LWE[:, row].zero_()
        self._steps += 1
        self.counter.add_(1)
        self.clear()

    def clear(self) -> None:
        """Forget what the host has counted since the last pass."""
        torch._foreach_zero_([*self._loads, *self._counters, self.chosen_LE])
