"""All ranks' tokens brought to all ranks, and partial outputs brought back to the tokens' owners."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker_agent.moe.dispatch.interface import DispatchRequest
from worker_agent.moe.ep_group import EpGroup
from worker_agent.moe.packing import pack_rows, unpack_rows


@dataclass(frozen=True)
class GatheredTokens:
    """The N tokens of all ranks, in order of rank, and how many each rank gave."""

    sizes: list[int]
    hidden_NH: torch.Tensor
    topk_ids_NK: torch.Tensor
    topk_weights_NK: torch.Tensor


def gather_tokens(group: EpGroup, request: DispatchRequest) -> GatheredTokens:
    """Two exchanges: sizes, then tokens with their choices.

    Raises ``ValueError`` on all ranks alike where they disagree about the bytes of a token.
    """
    columns = [request.hidden_TH, request.topk_ids_TK, request.topk_weights_TK]
    packed_TB = pack_rows(columns)
    own = torch.tensor(packed_TB.shape, dtype=torch.int64, device=packed_TB.device)
    sizes, widths = group.exchange(own.repeat(group.size, 1)).t().tolist()
    if len(set(widths)) > 1:
        raise ValueError(
            f"all-gather dispatch: ranks disagree about bytes per token {widths}; "
            "hidden, topk_ids and topk_weights must have the same width and dtype on all ranks"
        )
    return GatheredTokens(sizes, *unpack_rows(group.all_gather(packed_TB, sizes), columns))
