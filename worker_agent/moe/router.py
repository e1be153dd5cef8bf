"""Which experts a token goes to."""

from __future__ import annotations

import torch


def softmax_top_k(logits_TE: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``top_k`` likeliest experts of each token, and their probabilities scaled to sum to one.

    Returns float32 weights and int32 ids, both ``[T, K]``, likeliest first. Raises ``ValueError`` where there
    are fewer experts than ``top_k``.
    """
    experts = logits_TE.shape[-1]
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k must be 1..{experts}, the number of experts, got {top_k}")
    # Softmax over the chosen logits alone is softmax over all of them, renormalised.
    chosen_TK, ids_TK = logits_TE.float().topk(top_k, dim=-1)
    return chosen_TK.softmax(dim=-1), ids_TK.to(torch.int32)
