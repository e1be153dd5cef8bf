"""Make real SGLang run expert parallelism with EPLB on CPU, for tests only. Entry point in ``sglang.srt.plugins``.

The scheduler, runners, router, recorder, layers and sampler are the real ones. ``absent_on_cpu`` replaces the compiled
kernels.
"""

from __future__ import annotations

import os

import torch


def register() -> None:
    """Patch this process. SGLang calls this function in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    native = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"
    HookRegistry.register(native, _experts_of_this_rank, HookType.AROUND)
    pad = "sglang.srt.model_executor.forward_batch_info.ForwardBatch._pad_inputs_to_size"
    HookRegistry.register(pad, _pad_for_plain_attention, HookType.AROUND)
    scatter = "sglang.srt.distributed.parallel_state.GroupCoordinator.reduce_scatterv"
    HookRegistry.register(scatter, _scatter_without_nccl, HookType.AROUND)
    # SGLang's own EPLB calls this function, which torch does not have for CPUs.
    torch.cpu.empty_cache = lambda: None
    if os.environ.get("EPLB_TEST_MEASURE"):
        from measure_eplb import measure_sglang_routing

        routing = "sglang.srt.layers.moe.topk._post_process_topk_ids"
        HookRegistry.register(routing, measure_sglang_routing, HookType.AFTER)
    if os.environ.get("EPLB_TEST_COMMIT_WITHOUT_WEIGHTS"):
        from commit_without_weights import commit_without_weights

        commit_without_weights()


def _experts_of_this_rank(original, layer, x, topk_output, moe_runner_config):
    """Ignore choices of other ranks' experts (id -1), because SGLang's plain forward is not aware of ranks."""
    weights_TK, ids_TK, _ = topk_output
    out = torch.zeros_like(x)
    for slot in range(layer.w13_weight.shape[0]):
        token, choice = (ids_TK == slot).nonzero(as_tuple=True)
        gate, up = (x[token] @ layer.w13_weight[slot].T).chunk(2, dim=-1)
        part = (torch.nn.functional.silu(gate) * up) @ layer.w2_weight[slot].T
        out.index_add_(0, token, part * weights_TK[token, choice, None].to(x.dtype))
    return out


def _pad_for_plain_attention(original, batch, model_runner, *sizes):
    """Provide the padding's fill value, which SGLang's plain attention only defines for CUDA graphs."""
    backend = type(model_runner.attn_backend)
    if not hasattr(backend, "get_cpu_graph_seq_len_fill_value"):
        backend.get_cpu_graph_seq_len_fill_value = lambda _: 1
    return original(batch, model_runner, *sizes)


def _scatter_without_nccl(_, group, whole, output=None, sizes=None):
    """Use SGLang's own all-reduce variant, which SGLang normally uses for deterministic answers."""
    return group._deterministic_reduce_scatterv(whole, output, sizes)
