"""Counts which experts the rank's own tokens choose, where the host maps them to physical ids."""

from __future__ import annotations

from typing import Any

import torch

from worker_agent.adapters.errors import UnsupportedEngineError


class SourceCounter:
    """Adds choices to the row of their layer; the operations are captured with the host's own in an ACL graph.

    Parameters
    ----------
    layers
        The host's layers.
    chosen_LE
        int32 ``[L, E]``, added to in place.
    first_rank
        Whether this is rank 0 of the EP group: under all-gather dispatch every rank sees all tokens, and one counts.
    shares_tokens
        Whether the ranks' tables are one, as all-gather dispatch needs them.
    redundant
        Whether experts have replicas.
    """

    def __init__(
        self,
        layers: list[Any],
        chosen_LE: torch.Tensor,
        *,
        first_rank: bool,
        shares_tokens: bool,
        redundant: bool,
    ) -> None:
        self._rows = {id(layer.log2phy): row_E for layer, row_E in zip(layers, chosen_LE, strict=True)}
        self._first_rank = first_rank
        self._shares_tokens = shares_tokens
        self._redundant = redundant

    def count(self, fused_experts_input: Any, gathers: bool) -> None:
        """A layer is about to dispatch; ``gathers`` where by all-gather.

        Raises
        ------
        UnsupportedEngineError
            Where all-gather dispatch meets replicas or tables per rank.
        """
        routing = fused_experts_input.routing
        row_E = self._rows.get(id(routing.log2phy))
        if row_E is None:
            return
        if gathers:
            self._check_gathering()
            if not self._first_rank:
                return
        ids = fused_experts_input.topk_ids
        ones = torch.ones_like(ids, dtype=torch.int32)
        if routing.mc2_mask is not None and not gathers:
            ones = ones * routing.mc2_mask.to(torch.int32).reshape(-1, 1)
        row_E.index_add_(0, ids.reshape(-1).long(), ones.reshape(-1))

    def _check_gathering(self) -> None:
        if self._redundant:
            raise UnsupportedEngineError(
                "all-gather dispatch with redundant experts",
                "vLLM-Ascend looks physical ids up in a map of logical experts there",
                "Set num_redundant_experts to 0, or keep batches within the capacity of MC2",
            )
        if not self._shares_tokens:
            raise UnsupportedEngineError(
                "all-gather dispatch on a device that was not expected to use it",
                "Ranks that see the same tokens need one table",
                "Report this device",
            )
