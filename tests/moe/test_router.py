"""The router must choose the likeliest experts, with weights that sum to one."""

from __future__ import annotations

import pytest
import torch

from worker_agent.moe import softmax_top_k


def test_weights_are_the_renormalised_probabilities():
    logits_TE = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    weights_TK, ids_TK = softmax_top_k(logits_TE, 3)
    probabilities_TK = logits_TE.softmax(-1).gather(1, ids_TK.long())
    torch.testing.assert_close(weights_TK, probabilities_TK / probabilities_TK.sum(-1, keepdim=True))
    assert torch.equal(ids_TK.long(), logits_TE.argsort(dim=-1, descending=True)[:, :3])
    assert ids_TK.dtype == torch.int32
    assert weights_TK.dtype == torch.float32


def test_no_tokens():
    weights_TK, ids_TK = softmax_top_k(torch.empty(0, 5), 2)
    assert weights_TK.shape == ids_TK.shape == (0, 2)


@pytest.mark.parametrize("top_k", [0, 6])
def test_a_top_k_that_cannot_be(top_k: int):
    with pytest.raises(ValueError, match=r"top_k must be 1\.\.5"):
        softmax_top_k(torch.zeros(2, 5), top_k)
