"""Reference outputs for a layer on the vLLM-Ascend rank: all experts on one machine, with plain matrix products.

``vllm_ascend_rank.py`` imports this module in the engine's own Python.
"""

import torch
import torch_npu

RANKS = 2
LAYERS = 3
EXPERTS = 8
HIDDEN = 32
INTERMEDIATE = 32
TOP_K = 2
TOKENS = 12


def experts_of(layer):
    """Return the weights of a layer's experts, ``[E, 2I, H]`` and ``[E, H, I]``, which are equal on all ranks."""
    draw = torch.Generator().manual_seed(1000 + layer)
    return (
        torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=draw) * 0.3,
        torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=draw) * 0.3,
    )


def product(matrices_TKYX, rows_TKX):
    """Multiply each row by its matrix, and return ``[T, K, Y]``."""
    return torch.einsum("tkyx,tkx->tky", matrices_TKYX, rows_TKX)


def product_w8a8(matrices_TKYX, rows_TKX):
    """Like ``product``, with int8 rows and int8 output channels that have one scale each. The sums are exact."""
    rows, rows_scale_TK = torch_npu.npu_dynamic_quant(rows_TKX)
    matrices, channel_scale_TKY = torch_npu.npu_dynamic_quant(matrices_TKYX)
    return (product(matrices.double(), rows.double()) * channel_scale_TKY * rows_scale_TK[..., None]).float()


def dense(layer, hidden_TH, logits_TE, multiply):
    """Return the layer's expected output, with every expert on one machine."""
    w13_EJH, w2_EHI = experts_of(layer)
    weights_TK, ids_TK = torch.softmax(logits_TE, -1).topk(TOP_K, -1)
    weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    wide_TKJ = multiply(w13_EJH[ids_TK], hidden_TH[:, None].expand(-1, TOP_K, -1))
    gate, up = wide_TKJ.chunk(2, dim=-1)
    out_TKH = multiply(w2_EHI[ids_TK], torch.nn.functional.silu(gate) * up)
    return (weights_TK.unsqueeze(-1) * out_TKH).sum(1)


def choices_of(logits_LTE, rank, gathers):
    """Return how often a rank must count each expert, ``[L, E]``. If it gathers, the first rank counts all tokens."""
    ids_LTK = logits_LTE.topk(TOP_K, -1).indices
    parts = (ids_LTK, ids_LTK[:, :0]) if gathers else ids_LTK.tensor_split(RANKS, dim=1)
    return torch.nn.functional.one_hot(parts[rank], EXPERTS).sum(dim=(1, 2))
