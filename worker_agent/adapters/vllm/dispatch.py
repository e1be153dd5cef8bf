"""How vLLM's MoE layers dispatch, and which ranks therefore run their experts on the same tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from worker_agent.adapters.errors import UnsupportedEngineError


@dataclass(frozen=True)
class Dispatch:
    """How one MoE layer gets its tokens to experts.

    Parameters
    ----------
    naive
        Whether tokens of all ranks are gathered before the router runs.
    sequence_parallel
        Whether tensor-parallel ranks have tokens of their own.
    monolithic
        Whether the kernel routes inside and follows no table.
    """

    naive: bool
    sequence_parallel: bool
    monolithic: bool


def dispatch_of(layer: Any) -> Dispatch:
    """Read it from a layer: a runner that knows all, or, in 0.23, a ``FusedMoE`` beside its runner and method."""
    runner = getattr(layer, "runner", layer)
    method = layer.quant_method if runner is not layer else layer
    return Dispatch(
        bool(runner.do_naive_dispatch_combine),
        bool(layer.moe_config.is_sequence_parallel),
        bool(method.is_monolithic),
    )


@dataclass(frozen=True)
class TokenGroup:
    """Which ranks of the EP group run their experts on the same tokens as this one.

    Parameters
    ----------
    number
        Equal on all ranks of the group; ``None`` where this rank's tokens are its own.
    first
        Lowest EP rank of the group: the one that counts the tokens.
    """

    number: int | None
    first: int


def token_group(layers: Iterable[Any], parallel_config: Any, rank: int, ranks: int) -> TokenGroup:
    """Derive it from how vLLM's layers dispatch.

    Tokens are replicated over the tensor-parallel ranks of one data-parallel rank, unless the layer is sequence
    parallel; the naive dispatcher gathers the tokens of all ranks before the router runs, so that every rank routes
    all of them and needs the same table.

    Raises
    ------
    UnsupportedEngineError
        Under prefill context parallelism, where a kernel routes inside, or where layers differ.
    """
    found = [dispatch_of(layer) for layer in layers]
    for index, layer in enumerate(found):
        if layer.monolithic:
            raise UnsupportedEngineError(
                f"MoE layer {index} runs a monolithic kernel",
                "It routes inside the kernel and follows no table",
                "Choose another MoE backend",
            )
    if getattr(parallel_config, "prefill_context_parallel_size", 1) > 1:
        raise UnsupportedEngineError(
            "prefill context parallelism with EPLB",
            "Which ranks share tokens then changes within a step",
            "Start without --prefill-context-parallel-size",
        )
    if len(set(found)) > 1:
        raise UnsupportedEngineError(
            "MoE layers that dispatch differently in one model",
            "Ranks would share tokens in some layers only",
            "Use one MoE backend for all layers",
        )
    if found[0].naive:
        return TokenGroup(0, 0)
    tensor_parallel = ranks // parallel_config.data_parallel_size
    if found[0].sequence_parallel or tensor_parallel == 1:
        return TokenGroup(None, rank)
    first = rank - rank % tensor_parallel
    return TokenGroup(first, first)
