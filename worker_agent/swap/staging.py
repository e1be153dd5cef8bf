"""Memory in which incoming experts wait for their commit, and the commit itself, between two forward passes."""

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
    """Buffers for the experts that one transfer receives, kept and reused by later transfers."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[object, ...], list[ExpertWeights]] = {}
        """Buffers by the kind of a layer's experts; most models have layers of only one kind."""

    @property
    def nbytes(self) -> int:
        """Bytes that are held, whether or not a transfer uses them; may be asked for on any thread."""
        held = [buffer for buffers in tuple(self._buffers.values()) for buffer in buffers]
        return sum(
            buffer.nbytes if isinstance(buffer, torch.Tensor) else sum(row.nbytes for row in buffer)
            for buffer in held
        )

    def reserve(
        self, layers: Sequence[Sequence[ExpertWeights]], rows: Sequence[int]
    ) -> list[list[ExpertWeights]]:
        """Return buffers for ``rows[n]`` experts of ``layers[n]``, one for each of its weights and of the same kind.

        Allocates memory only if the layers need more rows, or other shapes, than earlier ones.
        """
        kinds = [_kind(weights) for weights in layers]
        needed: Counter[tuple[object, ...]] = Counter()
        for kind, count in zip(kinds, rows, strict=True):
            needed[kind] += count
        short = [kind for kind, count in needed.items() if count > self._rows(kind)]
        if short:
            fitting = needed.keys() - set(short)
            self._buffers = {kind: held for kind, held in self._buffers.items() if kind in fitting}
            for kind in short:
                weights = layers[kinds.index(kind)]
                self._buffers[kind] = [_buffer_of(weight, needed[kind]) for weight in weights]
        begins: Counter[tuple[object, ...]] = Counter()
        reserved = []
        for kind, count, weights in zip(kinds, rows, layers, strict=True):
            begin = begins[kind]
            begins[kind] += count
            buffers = self._buffers.get(kind, weights)
            reserved.append([buffer[begin : begin + count] for buffer in buffers])
        return reserved

    def drop(self) -> None:
        """Give the memory up: a transfer that failed may still write into it."""
        self._buffers = {}

    def _rows(self, kind: tuple[object, ...]) -> int:
        return len(self._buffers[kind][0]) if kind in self._buffers else 0


def _kind(weights: Sequence[ExpertWeights]) -> tuple[object, ...]:
    """Return a key that is equal for layers whose experts fit each other's buffers."""
    return tuple(
        (isinstance(weight, torch.Tensor), weight[0].shape, weight[0].dtype, weight[0].device)
        for weight in weights
    )


def _buffer_of(weight: ExpertWeights, rows: int) -> ExpertWeights:
    """Tensors of their own for a list: a device may not send or receive what begins inside another's storage."""
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
    """Switch the layer ``live`` of ``rank`` to ``update``, in place; return the bytes of weights written.

    ``staged[i][n]`` goes to slot ``slots[n]`` of the layer's weight ``i``. Then ``on_commit`` is called with the index
    of the layer. Whatever fails is a ``FatalSwitchError``.
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
    """Copy experts (``staged``, ``slots`` as for ``install_layer``), then the tables that route to them, to ``layer``.

    ``expert_map_E`` and ``log2phy_E`` are int32 ``[E]``, the latter ``[E, D]`` where the rank deals. All is on the
    caller's stream: on a device this only queues the copies.
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
