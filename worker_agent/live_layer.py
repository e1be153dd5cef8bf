"""Interface between the agent and one live MoE layer of any engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import torch

from eplb_core.placement import Int32

ExpertWeights: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
"""One kind of weight for all local slots: a tensor ``[S, ...]``, or S tensors with the same shape and dtype."""


class LiveLayer(Protocol):
    """One MoE layer on this rank.

    In shapes, S is the number of local slots, E the number of logical experts, and W the number of rows in a heat ring.
    All tensors keep their addresses for the lifetime of the layer, because captured graphs refer to them. The agent
    only writes to them in place.

    Examples
    --------
    A layer has three experts on a single rank, whose slots hold experts 2, 0 and 1. The agent may change
    ``expert_map``, ``log2phy`` and the weights between two forward passes, so each pass reads them again. A pass also
    counts the tokens that each slot receives:

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

    With several ranks, physical ids are numbered across ranks, and the forward pass dispatches each token to the rank
    that holds its slot.
    """

    expert_map: torch.Tensor
    """Local slot of each expert, or -1 if this rank does not hold the expert; int32 ``[E]``.

    The agent uses this tensor as its record of this rank's placement. If the host has no such tensor, or needs its own
    tensor to remain unchanged, the adapter creates one for the agent.
    """

    log2phy: torch.Tensor
    """Physical id to which this rank sends the tokens of each expert, int32 ``[E]``, or a dealing table, ``[E, D]``.

    With a dealing table, the ``i``-th token that this rank sends to an expert in a step goes to entry ``i % D``. The
    host chooses D, which is at most 64 and the same for all layers on all ranks.
    """

    @property
    def moe_load(self) -> torch.Tensor | None:
        """Number of tokens received by each slot, int32 ``[W, S]``. Step ``n``, counted from 0, uses row ``n % W``.

        ``None`` if the host does not count them. The service then derives them from the source heat and the tables of
        all ranks.
        """
        ...

    @property
    def source_load(self) -> torch.Tensor | None:
        """This rank's own tokens by logical expert, before dispatch, int32 ``[W, E]``; ``None`` if not counted.

        A sum over all ranks must count each token once. If several ranks see the same tokens, one of them counts the
        tokens and the rows of the other ranks are zero. Every layer needs ``moe_load`` or ``source_load``, and all
        ranks must provide the same kinds of counts.
        """
        ...

    load_counter: torch.Tensor
    """Number of forward passes so far, int64 scalar. Every pass increments it on every rank, even one without tokens.

    The model's own forward pass increments it, on the device and inside captured graphs. The counter of the last layer
    numbers the passes. Do not count the adapter's calls instead: after a missed call, ranks with the same number would
    be at different passes.
    """

    shares_tokens: bool
    """True if ranks see the same tokens before routing (all-gather dispatch). Their tables must then be equal."""

    def expert_weights(self) -> Sequence[ExpertWeights]:
        """Return every weight that the expert kernels read, with one entry per kind.

        In each entry, index ``s`` holds the weight of slot ``s``, which is contiguous. The weights of all layers are on
        one device.
        """
        ...


@runtime_checkable
class RankBound(Protocol):
    """Live layer that declares whether its experts are bound to their ranks. By default, experts are not bound."""

    rank_bound: bool
    """True if experts must stay on their ranks, as with grouped experts (MoGE), where each rank has one group."""


@runtime_checkable
class RowDealt(Protocol):
    """Live layer that declares how its host picks an entry of the dealing table."""

    entry_by_row: bool
    """True if the host picks the entry based on the token's row in the batch, so all entries get equal shares."""


@runtime_checkable
class SplitByStep(Protocol):
    """Live layer that declares whether each step's own counts determine the replicas, instead of the tables."""

    splits_by_step: bool
    """True if all ranks compute the same split of each step's tokens, chosen to minimise the hottest rank's load."""


@runtime_checkable
class Named(Protocol):
    """Live layer with a name in the model. Ranks compare the names to detect layers in a different order."""

    name: str


@runtime_checkable
class Gathering(Protocol):
    """Live layer that declares whether its dispatch gathers the tokens of all ranks."""

    gathers_all: bool
    """True if the dispatch gathers the tokens of all ranks, which must then form one token group."""


@runtime_checkable
class PlacementAware(Protocol):
    """Live layer that needs the placement of all ranks in addition to its own tables."""

    def install_placement(self, phy2log_RS: Int32) -> None:
        """Install a placement, int32 ``[R, S]``. The agent calls this between two steps, when it writes the tables."""
        ...
