"""Staging memory, which holds received experts until they are committed, and the commit itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch

from eplb_core.placement import expert_map
from eplb_core.wire.plan import RankLayer
from worker_agent.device import on_host
from worker_agent.live_layer import ExpertWeights, LiveLayer, PlacementAware
from worker_agent.swap.commit_register import FatalSwitchError


class Staging:
    """Buffers for the experts that one transfer receives. Later transfers reuse them.

    Examples
    --------
    A later transfer that needs no more rows allocates nothing.

    >>> staging = Staging()
    >>> weights = [torch.zeros(4, 3, 2), torch.zeros(4, 5)]
    >>> (buffers,) = staging.reserve([weights], [3])
    >>> [tuple(buffer.shape) for buffer in buffers]
    [(3, 3, 2), (3, 5)]
    >>> (smaller,) = staging.reserve([weights], [2])
    >>> smaller[0].data_ptr() == buffers[0].data_ptr()
    True
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[object, ...], list[ExpertWeights]] = {}
        """Buffers keyed by the kind of expert; see ``_kind``. Most models have only one kind."""

    @property
    def nbytes(self) -> int:
        """Number of allocated bytes, including buffers that are not in use. Any thread may read it."""
        allocated = [buffer for buffers in tuple(self._buffers.values()) for buffer in buffers]
        return sum(
            buffer.nbytes if isinstance(buffer, torch.Tensor) else sum(row.nbytes for row in buffer)
            for buffer in allocated
        )

    def reserve(
        self, layers: Sequence[Sequence[ExpertWeights]], rows: Sequence[int]
    ) -> list[list[ExpertWeights]]:
        """Return buffers for the experts that one transfer receives.

        Memory is allocated only if the layers need more rows or different shapes than before.

        Parameters
        ----------
        layers
            The live weights of each layer, by kind of weight.
        rows
            Number of experts to receive in each layer.

        Returns
        -------
        list of list of ExpertWeights
            Per layer, one buffer for each kind of weight. Apart from the number of rows, it has the weight's shape,
            dtype and device.
        """
        kinds = [_kind(weights) for weights in layers]
        needed: Counter[tuple[object, ...]] = Counter()
        for kind, count in zip(kinds, rows, strict=True):
            needed[kind] += count
        short = [kind for kind, count in needed.items() if count > self._rows(kind)]
        if short:
            fitting = needed.keys() - set(short)
            self._buffers = {kind: buffers for kind, buffers in self._buffers.items() if kind in fitting}
            for kind in short:
                weights = layers[kinds.index(kind)]
                self._buffers[kind] = [_allocate(weight, needed[kind]) for weight in weights]
        begins: Counter[tuple[object, ...]] = Counter()
        reserved = []
        for kind, count, weights in zip(kinds, rows, layers, strict=True):
            begin = begins[kind]
            begins[kind] += count
            buffers = self._buffers.get(kind, weights)
            reserved.append([buffer[begin : begin + count] for buffer in buffers])
        return reserved

    def drop(self) -> None:
        """Discard all buffers, because a failed transfer may still write to them."""
        self._buffers = {}

    def _rows(self, kind: tuple[object, ...]) -> int:
        return len(self._buffers[kind][0]) if kind in self._buffers else 0


def _kind(weights: Sequence[ExpertWeights]) -> tuple[object, ...]:
    """Return a key that is equal for layers whose experts fit in the same buffers."""
    return tuple(
        (isinstance(weight, torch.Tensor), weight[0].shape, weight[0].dtype, weight[0].device)
        for weight in weights
    )


def _allocate(weight: ExpertWeights, rows: int) -> ExpertWeights:
    """Return a buffer of ``rows`` experts for one kind of weight.

    If the weight is a list, each row gets separate storage, because a device may be unable to send or receive a tensor
    that begins in the middle of its storage.
    """
    if isinstance(weight, torch.Tensor):
        return weight.new_empty((rows, *weight.shape[1:]))
    return [torch.empty_like(weight[0]) for _ in range(rows)]


def install_layer(
    live: LiveLayer,
    update: RankLayer,
    rank: int,
    staged: Sequence[ExpertWeights],
    slots: Sequence[int],
    *,
    on_commit: Callable[[int], None] | None = None,
) -> int:
    """Commit one layer in place: copy its staged experts into their slots, then switch its tables.

    Parameters
    ----------
    live
        The layer to change.
    update
        Its new placement and tables.
    rank
        This rank.
    staged
        Received experts, one buffer for each kind of weight.
    slots
        Target slot of each row of ``staged``.
    on_commit
        Called with the layer's index once the change is complete.

    Returns
    -------
    int
        Number of bytes of weights written.

    Raises
    ------
    FatalSwitchError
        If any step fails. The layer may then be partially written.
    """
    try:
        local_E = expert_map(update.phy2log_RS[rank], live.expert_map.shape[0])
        written = copy_into(
            live, staged, slots, torch.from_numpy(local_E), torch.from_numpy(update.log2phy_E)
        )
        if isinstance(live, PlacementAware):
            live.install_placement(update.phy2log_RS)
        if on_commit is not None:
            on_commit(update.layer)
    except Exception as error:
        raise FatalSwitchError(f"layer {update.layer} could not be installed: {error}") from error
    return written


@torch.inference_mode()
def copy_into(
    layer: LiveLayer,
    staged: Sequence[ExpertWeights],
    slots: Sequence[int],
    expert_map_E: torch.Tensor,
    log2phy_E: torch.Tensor,
) -> int:
    """Copy experts into a layer, and then the tables that route to them.

    All copies are queued on the caller's stream. On a device, the call returns before the copies have run.

    Parameters
    ----------
    layer
        The layer to change.
    staged
        Received experts, one buffer for each kind of weight.
    slots
        Target slot of each row of ``staged``.
    expert_map_E
        Local slot of each expert, int32 ``[E]`` on the host.
    log2phy_E
        Physical id of each expert, int32 ``[E]`` on the host, or ``[E, D]`` for a dealing table.

    Returns
    -------
    int
        Number of bytes of weights written.
    """
    written = 0
    for weight, buffer in zip(layer.expert_weights(), staged, strict=True):
        for row, slot in enumerate(slots):
            weight[slot].copy_(buffer[row])
            written += buffer[row].nbytes
    table_E = log2phy_E.view(layer.log2phy.shape)
    for table, new_E in ((layer.expert_map, expert_map_E), (layer.log2phy, table_E)):
        table.copy_(on_host(new_E, table.device), non_blocking=True)
    return written
