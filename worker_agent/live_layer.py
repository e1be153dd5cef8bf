"""Interface of one live MoE layer of any engine to the agent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import torch

from eplb_service.placement import Int32

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
        others have rows of zeros. One of ``moe_load`` and ``source_load`` must be there, the same on all ranks.
        """
        ...

    load_counter: torch.Tensor
    """int64 scalar: forward passes so far, also those without tokens; each adds one on every rank.

    The model's own forward advances it, on the device and inside captured graphs; the last layer's counter numbers the
    passes. Do not count the adapter's calls: after a missed call, ranks that agree on a number are a pass apart.
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
    """A live layer that states if its experts may leave their ranks; the experts of other layers may."""

    rank_bound: bool
    """True if they may not, such as grouped experts (MoGE), with a group on every rank."""


@runtime_checkable
class RowDealt(Protocol):
    """A live layer that knows how its host picks an entry of its dealing table."""

    entry_by_row: bool
    """True if by a token's row in the batch, so that all entries of an expert get the same part of its tokens."""


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
    """A live layer that must know the replicas of all ranks, and not only the targets of its own tokens."""

    def install_placement(self, phy2log_RS: Int32) -> None:
        """Note a placement, int32 ``[R, S]``: called as its tables are written, between the same two steps."""
        ...
