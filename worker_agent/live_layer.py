"""Interface between the agent and one live MoE layer of any engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import torch

from eplb_core.placement import Int32

ExpertWeights: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
"""One kind of weight of all local slots: a tensor ``[S, ...]``, or S tensors of the same shape and type."""


class LiveLayer(Protocol):
    """One MoE layer on this rank.

    In shapes, S is the number of local slots, E of logical experts, and W of rows of a heat ring. All tensors keep
    their addresses for the life of the layer, because graphs have captured them. The agent only writes into them in
    place.

    Examples
    --------
    A layer of three experts on a single rank, whose slots hold the experts 2, 0 and 1. The agent may change
    ``expert_map``, ``log2phy`` and the weights between two forward passes, so each pass reads them again. A pass also
    counts the tokens of each slot:

    >>> class ToyLayer:
    ...     source_load = None
    ...     shares_tokens = False
    ...
    ...     def __init__(self, experts_EHH):
    ...         self.weights_SHH = experts_EHH[[2, 0, 1]]
    ...         self.expert_map = torch.tensor([1, 2, 0], dtype=torch.int32)
    ...         self.log2phy = torch.tensor([1, 2, 0], dtype=torch.int32)
    ...         self.moe_load = torch.zeros(16, 3, dtype=torch.int32)
    ...         self.load_counter = torch.zeros((), dtype=torch.int64)
    ...
    ...     def expert_weights(self):
    ...         return [self.weights_SHH]
    ...
    ...     def forward(self, hidden_TH, expert_T):
    ...         slot_T = self.log2phy[expert_T].long()
    ...         self.moe_load[self.load_counter % 16] = torch.bincount(slot_T, minlength=3).int()
    ...         self.load_counter += 1
    ...         return torch.einsum("th,thg->tg", hidden_TH, self.weights_SHH[slot_T])
    >>> layer = ToyLayer(torch.randn(3, 8, 8))
    >>> outputs_TH = layer.forward(torch.randn(6, 8), expert_T=torch.tensor([0, 2, 0, 1, 0, 2]))
    >>> layer.moe_load[0], layer.load_counter
    (tensor([2, 3, 1], dtype=torch.int32), tensor(1))

    With more ranks, physical ids are numbered across ranks, and the forward pass dispatches each token to the rank of
    its slot.
    """

    expert_map: torch.Tensor
    """int32 ``[E]``: local slot of each expert, or -1 if this rank does not hold the expert.

    The agent uses it as its record of this rank's placement. If the host has no such tensor, or uses its own for
    something that must not change, the adapter creates one for the agent.
    """

    log2phy: torch.Tensor
    """int32 ``[E]``: physical id that this rank's tokens of each expert go to; or ``[E, D]``, a dealing table.

    With a dealing table, the ``i``-th token that this rank sends to an expert in a step goes to entry ``i % D``. The
    host chooses D, which is at most 64 and the same in all layers on all ranks.
    """

    @property
    def moe_load(self) -> torch.Tensor | None:
        """int32 ``[W, S]``: tokens received by each slot. Step ``n``, counted from 0, uses row ``n % W``.

        ``None`` if the host does not count them. The service then derives them from the source heat and the tables of
        all ranks.
        """
        ...

    @property
    def source_load(self) -> torch.Tensor | None:
        """int32 ``[W, E]``: this rank's own tokens by logical expert, before dispatch; ``None`` if not counted.

        A sum over all ranks must count each token once. If several ranks see the same tokens, one of them counts the
        tokens and the other ranks have rows of zeros. Every layer needs ``moe_load`` or ``source_load``, and all ranks
        must have the same ones.
        """
        ...

    load_counter: torch.Tensor
    """int64 scalar: forward passes so far, including those without tokens. Each pass adds one on every rank.

    The model's own forward advances it, on the device and inside captured graphs. The counter of the last layer numbers
    the passes. Do not count the adapter's calls instead: after a missed call, ranks with the same number would be at
    different passes.
    """

    shares_tokens: bool
    """True if ranks see the same tokens before they route them (all-gather dispatch). They must then have equal tables.
    """

    def expert_weights(self) -> Sequence[ExpertWeights]:
        """Every weight that the expert kernels read, one entry per kind.

        In each entry, index ``s`` is the weight of slot ``s``, contiguous. The weights of all layers are on one device.
        """
        ...


@runtime_checkable
class RankBound(Protocol):
    """A live layer that declares if its experts may leave their ranks. The experts of layers without this field may."""

    rank_bound: bool
    """True if they may not leave. Grouped experts (MoGE) may not, because each rank has one group."""


@runtime_checkable
class RowDealt(Protocol):
    """A live layer that declares how its host picks an entry of the dealing table."""

    entry_by_row: bool
    """True if the host picks it by the token's row in the batch, so that an expert's entries get equal shares."""


@runtime_checkable
class Named(Protocol):
    """A live layer that has a name in the model. Ranks that list the layers in different orders are then rejected."""

    name: str


@runtime_checkable
class Gathering(Protocol):
    """A live layer that declares how far its dispatch gathers tokens."""

    gathers_all: bool
    """True if it gathers the tokens of all ranks. They must then form one token group."""


@runtime_checkable
class PlacementAware(Protocol):
    """A live layer that needs the placement of all ranks, in addition to its own table."""

    def install_placement(self, phy2log_RS: Int32) -> None:
        """Install a placement, int32 ``[R, S]``. The agent calls this when it writes tables, between two steps."""
        ...
