"""Expert computation of one vLLM MoE layer, without its router, collectives or other ranks' tokens."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from worker_agent.adapters.trial import Compute

_LOCAL = "vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep"
_LOCAL_CLASS = "MoEPrepareAndFinalizeNoDPEPModular"
_SEED = 20_240


def local_experts(experts: Any, slots: int, device: torch.device) -> Compute | None:
    """Return the expert computation of a layer.

    The computation calls the quantisation method's ``apply``. If the kernel exchanges tokens between ranks, its
    exchange is replaced during the call with the one that vLLM uses on a single rank. Kernels for batched tokens have
    no such replacement.

    Parameters
    ----------
    experts
        Module that owns the layer's weights.
    slots
        S, the number of local slots.
    device
        Device of the weights.

    Returns
    -------
    Compute or None
        ``None`` if the experts cannot be run in isolation.
    """
    method = getattr(experts, "quant_method", None)
    apply = getattr(method, "apply", None)
    hidden = _hidden_size(experts)
    if not callable(apply) or hidden is None:
        return None
    kernel = getattr(method, "moe_kernel", None)
    kernel = getattr(kernel, "impl", kernel)
    exchange = getattr(kernel, "prepare_finalize", None)
    if exchange is not None and getattr(exchange.activation_format, "name", "Standard") != "Standard":
        return None
    call = _caller(apply)
    physical_S = _physical_ids(experts, slots, device)
    input_type = _input_type(experts)

    def compute(slot_T: torch.Tensor) -> torch.Tensor:
        tokens = len(slot_T)
        random = torch.Generator().manual_seed(_SEED)
        x_TH = torch.randn(tokens, hidden, generator=random).to(device, input_type)
        ids_T1 = physical_S[slot_T.to(device)].reshape(tokens, 1)
        weights_T1 = torch.ones((tokens, 1), dtype=torch.float32, device=device)
        with _without_exchange(kernel):
            output: torch.Tensor = call(layer=experts, x=x_TH, topk_weights=weights_T1, topk_ids=ids_T1)
        return output

    return compute


def _caller(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper that calls ``apply`` with keyword arguments, and with ``None`` for missing required ones."""
    parameters = inspect.signature(apply).parameters

    def call(**arguments: Any) -> Any:
        required = {
            name: None
            for name, parameter in parameters.items()
            if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        }
        return apply(**{**required, **arguments})

    return call


@contextmanager
def _without_exchange(kernel: Any) -> Iterator[None]:
    """Make ``kernel`` compute only its local tokens instead of exchanging tokens with other ranks."""
    exchange = getattr(kernel, "prepare_finalize", None)
    if exchange is None or type(exchange).__name__ == _LOCAL_CLASS:
        yield
        return
    kernel.prepare_finalize = getattr(importlib.import_module(_LOCAL), _LOCAL_CLASS)()
    try:
        yield
    finally:
        kernel.prepare_finalize = exchange


def _hidden_size(experts: Any) -> int | None:
    for owner, name in ((experts, "hidden_size"), (getattr(experts, "moe_config", None), "hidden_dim")):
        size = getattr(owner, name, None)
        if isinstance(size, int):
            return size
    return None


def _input_type(experts: Any) -> torch.dtype:
    for owner, name in ((getattr(experts, "moe_config", None), "in_dtype"), (experts, "params_dtype")):
        dtype = getattr(owner, name, None)
        if isinstance(dtype, torch.dtype):
            return dtype
    return torch.float32


def _physical_ids(experts: Any, slots: int, device: torch.device) -> torch.Tensor:
    """Return the physical expert of each local slot according to the layer's map, int32 ``[S]``."""
    expert_map = getattr(experts, "_expert_map", None)
    if expert_map is None:
        expert_map = getattr(experts, "expert_map", None)
    if not isinstance(expert_map, torch.Tensor):
        return torch.arange(slots, dtype=torch.int32, device=device)
    local_P = expert_map.cpu().long()
    physical_S = torch.zeros(slots, dtype=torch.int32)
    held_P = torch.nonzero((local_P >= 0) & (local_P < slots)).reshape(-1)
    physical_S[local_P[held_P]] = held_P.to(torch.int32)
    return physical_S.to(device)
