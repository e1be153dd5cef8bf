"""Dispatch methods of vLLM's MoE layers, which determine which ranks run their experts on the same tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from worker_agent.adapters.compat import UnsupportedEngineError, refuse


@dataclass(frozen=True)
class TokenGroup:
    """Group of the EP ranks that run their experts on the same tokens as this rank.

    Parameters
    ----------
    number
        ID of the group, the same on all of its ranks; ``None`` if no other rank has this rank's tokens.
    first
        Lowest EP rank in the group, which counts the tokens.
    """

    number: int | None
    first: int

    def covers(self, data_parallel: int, *, naive: bool) -> bool:
        """Return True if the group consists of all EP ranks."""
        return self.number is not None and (naive or data_parallel == 1)


class Dispatch(NamedTuple):
    """Dispatch method of an MoE layer.

    Parameters
    ----------
    naive
        True if the tokens of all ranks are gathered before the router runs.
    sequence_parallel
        True if each tensor-parallel rank has its own tokens.
    monolithic
        True if the kernel itself routes tokens.
    """

    naive: bool
    sequence_parallel: bool
    monolithic: bool


def dispatch_of(layer: Any) -> Dispatch:
    """Determine an MoE layer's dispatch method from its runner or, in 0.23, from a ``FusedMoE`` and its attributes."""
    runner = getattr(layer, "runner", layer)
    if not hasattr(runner, "do_naive_dispatch_combine"):
        raise UnsupportedEngineError(
            f"MoE layers of the class {type(layer).__name__} (for example from --moe-backend deep_gemm_mega_moe)",
            "They dispatch inside one kernel, whose experts and tables are unknown to the agent",
            "Choose another MoE backend",
        )
    method = layer.quant_method if runner is not layer else layer
    return Dispatch(
        naive=bool(runner.do_naive_dispatch_combine),
        sequence_parallel=bool(layer.moe_config.is_sequence_parallel),
        monolithic=bool(method.is_monolithic),
    )


def token_group(layers: Iterable[Any], parallel_config: Any, rank: int, ranks: int) -> TokenGroup:
    """Derive this rank's token group from the dispatch methods of vLLM's layers.

    Tokens are replicated across the tensor-parallel ranks of one data-parallel rank, unless the layer is sequence
    parallel. The naive dispatcher gathers the tokens of all ranks before the router runs. Every rank then routes all
    tokens and needs the same table.

    Parameters
    ----------
    layers
        vLLM's MoE layers.
    parallel_config
        vLLM's ``ParallelConfig``.
    rank
        This rank's index in the EP group.
    ranks
        Size of the EP group.

    Raises
    ------
    UnsupportedEngineError
        If prefill context parallelism is on, a kernel routes tokens itself, or layers dispatch differently.
    """
    dispatches = [dispatch_of(layer) for layer in layers]
    refuse(
        [
            (
                any(dispatch.monolithic for dispatch in dispatches),
                "an MoE layer with a monolithic kernel",
                "The kernel routes tokens itself, without the tables",
                "Choose another MoE backend",
            ),
            (
                getattr(parallel_config, "prefill_context_parallel_size", 1) > 1,
                "prefill context parallelism with EPLB",
                "With this option, the ranks that share tokens change within a step",
                "Start without --prefill-context-parallel-size",
            ),
            (
                len(set(dispatches)) > 1,
                "a model whose MoE layers dispatch differently",
                "Ranks would share tokens only in some layers",
                "Use one MoE backend for all layers",
            ),
        ]
    )
    if dispatches[0].naive:
        return TokenGroup(0, 0)
    tensor_parallel = ranks // parallel_config.data_parallel_size
    if dispatches[0].sequence_parallel or tensor_parallel == 1:
        return TokenGroup(None, rank)
    first = rank - rank % tensor_parallel
    return TokenGroup(first, first)
