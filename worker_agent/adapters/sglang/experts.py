"""Expert computation of one SGLang MoE layer, without its router, collectives or other ranks' tokens."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from worker_agent.adapters.trial import Compute

_SEED = 20_240


def local_experts(experts: Any, slots: int, device: torch.device) -> Compute | None:
    """Return the expert computation of a layer.

    The computation calls the quantisation method's ``apply`` with tokens and their local slots, in the standard
    dispatcher's output format. Other dispatchers use different formats, which the computation cannot use.

    Parameters
    ----------
    experts
        SGLang's ``FusedMoE``.
    slots
        S, the number of local slots.
    device
        Device of the weights.

    Returns
    -------
    Compute or None
        ``None`` if the experts cannot be run in isolation.
    """
    apply = getattr(getattr(experts, "quant_method", None), "apply", None)
    hidden = getattr(experts, "hidden_size", None)
    if not callable(apply) or not isinstance(hidden, int):
        return None
    if type(getattr(experts, "dispatcher", None)).__name__ != "StandardDispatcher":
        return None
    input_type = getattr(experts, "params_dtype", None)
    if not isinstance(input_type, torch.dtype) or not input_type.is_floating_point:
        input_type = torch.bfloat16

    def compute(slot_T: torch.Tensor) -> torch.Tensor:
        standard = importlib.import_module("sglang.srt.layers.moe.token_dispatcher.standard")
        topk = importlib.import_module("sglang.srt.layers.moe.topk")
        tokens = len(slot_T)
        random = torch.Generator().manual_seed(_SEED)
        x_TH = torch.randn(tokens, hidden, generator=random).to(device, input_type)
        ids_T1 = slot_T.to(device, torch.int32).reshape(tokens, 1)
        weights_T1 = torch.ones((tokens, 1), dtype=torch.float32, device=device)
        logits_TS = torch.zeros((tokens, slots), dtype=torch.float32, device=device)
        choice = topk.StandardTopKOutput(weights_T1, ids_T1, logits_TS)
        output = apply(layer=experts, dispatch_output=standard.StandardDispatchOutput(x_TH, None, choice))
        result: torch.Tensor = output.hidden_states
        return result

    return compute
