"""Interface between the agent and one live MoE layer of any engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import torch

from eplb_core.placement import Int32

ExpertWeights: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
"""One kind of weight of all local slots: a tensor ``[S, ...]``, or S tensors of one shape and type."""


class LiveLayer(Protocol):
    """One MoE layer on this rank.

    S local slots, E logical experts, W rows of the heat ring. All tensors keep their addresses for the life of
    the layer: graphs have captured them, and an agent only ever writes into them in place.
    """

    expert_map: torch.Tensor
    """int32 ``[E]``: local slot of each expert, -1 where this rank has none.

    It is the agent's record of what this rank serves. If the host has no such tensor, or uses its own for something
    that must not change, the adapter makes one for the agent.
    """

    log2phy: torch.Tensor
    """int32 ``[E]``: physical id that this rank's tokens of each expert go to; or ``[E, D]``, a dealing table.

    Of a dealing table the ``i``-th token that this rank sends to an expert in a step goes to entry ``i % D``. D, at
    most 64, is the host's choice, the same in all layers on all ranks.
    """

    @property
    def moe_load(self) -> torch.Tensor | None:
        """int32 ``[W, S]``: tokens received by each slot; step ``n`` (counted from 0) is row ``n % W``.

        ``None`` if the host does not count them: the service then derives them from the source counts and the tables of
        all ranks.
        """
        ...

    @property
    def source_load(self) -> torch.Tensor | None:
        """int32 ``[W, E]``: this rank's own tokens by logical expert, before dispatch; ``None`` if not counted.

        A sum over all ranks counts each token once: if several ranks see the same tokens, one counts them and the
        others have rows of zeros. Every layer needs at least one of ``moe_load`` and ``source_load``, the same on all
        ranks.
        """
        ...

    load_counter: torch.Tensor
    """int64 scalar: forward passes so far, also those without tokens; each adds one on every rank.

    The model's own forward advances it, on the device and inside captured graphs. The last layer's counter numbers the
    passes. Do not count the adapter's calls: if one is missed, ranks with the same number are at different passes.
    """

    shares_tokens: bool
    """True if ranks see the same tokens before they route them (all-gather dispatch): their tables must be one."""

    def expert_weights(self) -> Sequence[ExpertWeights]:
        """Every weight that the expert kernels read, by kind; of each, slot ``s`` is at index ``s``, contiguous.

        The weights of all layers are on one device.
        """
        ...


@runtime_checkable
class RankBound(Protocol):
    """A live layer that states if its experts may leave their ranks. Experts of layers without this field may."""

    rank_bound: bool
    """True if they may not leave, as with grouped experts (MoGE), which have one group per rank."""


@runtime_checkable
class RowDealt(Protocol):
    """A live layer that states how its host picks an entry of its dealing table."""

    entry_by_row: bool
    """True if it picks by a token's row in the batch, so that an expert's entries get equal shares of its tokens."""


@runtime_checkable
class Named(Protocol):
    """A live layer that knows its name in the model: ranks that hand layers over in other orders are then refused."""

    name: str


@runtime_checkable
class Gathering(Protocol):
    """A live layer that knows how far its dispatch gathers."""

    gathers_all: bool
    """True if it gathers the tokens of all ranks, which must then be one token group."""


@runtime_checkable
class PlacementAware(Protocol):
    """A live layer that needs the placement of all ranks, and not only the targets of its own tokens."""

    def install_placement(self, phy2log_RS: Int32) -> None:
        """Record a placement, int32 ``[R, S]``. The agent calls it between the same two steps as it writes tables."""
        ...
