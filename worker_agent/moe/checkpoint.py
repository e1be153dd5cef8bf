"""Loads a checkpoint's expert tensors, named by logical expert, into every local slot that holds the expert."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch


class Shard(str, Enum):
    """One of the three matrices of a gated expert, by the names that checkpoints use."""

    W1 = "w1"
    """Gate projection, the first half of w13."""

    W2 = "w2"
    """Down projection."""

    W3 = "w3"
    """Up projection, the second half of w13."""


class Granularity(str, Enum):
    """What one value of a parameter covers."""

    WEIGHT = "weight"
    """A weight: w13 ``[S, 2*I, H]``, w2 ``[S, H, I]``."""

    GROUP = "group"
    """A scale for a group of a row or a block of a matrix: shaped as the weight, with fewer rows and columns."""

    CHANNEL = "channel"
    """A scale for an output row: w13 ``[S, 2*I]`` or ``[S, 2*I, 1]``, w2 ``[S, H]`` or ``[S, H, 1]``.

    Checkpoints may hold them with or without the last dimension as well.
    """

    TENSOR = "tensor"
    """A scale for a matrix: w13 ``[S, 2]``, w2 ``[S, 1]``; checkpoints hold scalars."""


@dataclass(frozen=True)
class ExpertParameter:
    """A tensor of all local slots. ``transposed`` swaps its two inner dimensions.

    Tensor parallelism splits w1 and w3 by rows and w2 by columns: a rank's tensor holds its part alone.
    """

    tensor_S: torch.Tensor
    granularity: Granularity = Granularity.WEIGHT
    transposed: bool = False

    def loaded_shape(self, shard: Shard, tp_size: int) -> tuple[int, ...]:
        """The shape of a checkpoint tensor of one expert's shard, of which this rank takes its part."""
        shape = list(self._destination(0, shard).shape)
        split = self._split_dimension(shard)
        if split is not None:
            shape[split] *= tp_size
        return tuple(shape)

    def fitted(self, shard: Shard, loaded: torch.Tensor) -> torch.Tensor:
        """A checkpoint tensor, its scales per output row with a last dimension of one or without, as here."""
        if self.granularity is not Granularity.CHANNEL:
            return loaded
        dimensions = self._destination(0, shard).ndim
        if loaded.ndim == dimensions + 1 and loaded.shape[-1] == 1:
            return loaded.squeeze(-1)
        return loaded.unsqueeze(-1) if loaded.ndim == dimensions - 1 else loaded

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether values of ``dtype`` can be copied: floating point into floating point, integers into the same."""
        own = self.tensor_S.dtype
        return dtype.is_floating_point if own.is_floating_point else dtype == own

    def fill(self, slot: int, shard: Shard, loaded: torch.Tensor, tp_rank: int) -> None:
        """Copy ``tp_rank``'s part of a tensor of ``loaded_shape`` into a slot."""
        destination = self._destination(slot, shard)
        split = self._split_dimension(shard)
        if split is not None:
            width = destination.shape[split]
            loaded = loaded.narrow(split, tp_rank * width, width)
        destination.copy_(loaded)

    def _destination(self, slot: int, shard: Shard) -> torch.Tensor:
        part = self.tensor_S[slot]
        if self.granularity is Granularity.TENSOR:
            return part[1 if shard is Shard.W3 else 0]
        rows = part.transpose(0, 1) if self.transposed and part.ndim == 2 else part
        if shard is Shard.W2:
            return rows
        gate, up = rows.chunk(2, dim=0)
        return gate if shard is Shard.W1 else up

    def _split_dimension(self, shard: Shard) -> int | None:
        if self.granularity is Granularity.TENSOR:
            return None
        if shard is Shard.W2:
            return None if self.granularity is Granularity.CHANNEL else 1
        return 0


@dataclass(frozen=True)
class CheckpointNames:
    """How a checkpoint names its expert tensors: ``<prefix>.<expert>.<projection>.<suffix>``.

    ``prefix`` is for example ``model.layers.3.mlp.experts``.
    """

    prefix: str
    gate: str = "gate_proj"
    down: str = "down_proj"
    up: str = "up_proj"
    pattern: re.Pattern[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        pattern = rf"{re.escape(self.prefix)}\.(?P<expert>\d+)\.(?P<projection>[^.]+)\.(?P<suffix>[^.]+)"
        object.__setattr__(self, "pattern", re.compile(pattern))

    def shard(self, projection: str) -> Shard | None:
        """The shard that a projection's name means."""
        return {self.gate: Shard.W1, self.down: Shard.W2, self.up: Shard.W3}.get(projection)

    def tensor(self, expert: int, shard: Shard, suffix: str) -> str:
        """The name of one expert's tensor."""
        projection = {Shard.W1: self.gate, Shard.W2: self.down, Shard.W3: self.up}[shard]
        return f"{self.prefix}.{expert}.{projection}.{suffix}"


class ExpertLoader:
    """Fills one layer's parameters from checkpoint tensors, in whatever order they come.

    Parameters
    ----------
    layer
        Layer index, for messages.
    experts
        E; the checkpoint has all of them, of which this rank takes those that it holds.
    logical_S
        The logical expert in each local slot.
    parameters
        By checkpoint suffix (``weight``, ``weight_scale``, ...): the layer's tensors for w1 and w3, and for
        w2.
    tp_rank, tp_size
        This rank's part of each expert where experts are split further by tensor parallelism.
    """

    def __init__(
        self,
        layer: int,
        experts: int,
        logical_S: Iterable[int],
        names: CheckpointNames,
        parameters: Mapping[str, tuple[ExpertParameter, ExpertParameter]],
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> None:
        if not 0 <= tp_rank < tp_size:
            raise ValueError(f"layer {layer}: there is no tensor-parallel rank {tp_rank} among {tp_size}")
        self._layer = layer
        self._experts = experts
        self._names = names
        self._parameters = parameters
        self._tp_rank, self._tp_size = tp_rank, tp_size
        self._slots_of: dict[int, list[int]] = {}
        for slot, expert in enumerate(logical_S):
            self._slots_of.setdefault(expert, []).append(slot)
        self._missing = {
            names.tensor(expert, shard, suffix): list(
                self._parameter(suffix, shard).loaded_shape(shard, tp_size)
            )
            for expert in self._slots_of
            for suffix in parameters
            for shard in Shard
        }

    def load(self, name: str, tensor: torch.Tensor) -> int:
        """Copy one checkpoint tensor to where it belongs; return how many slots took it (0: not held here).

        Raises ``ValueError`` naming layer, tensor and what was expected where the name is no expert tensor of
        this layer, or the shape is not that of the parameter.
        """
        match = self._names.pattern.fullmatch(name)
        if match is None:
            raise self._error(
                name, f"is no expert tensor: expected {self._names.prefix}.<expert>.<projection>.<suffix>"
            )
        shard = self._names.shard(match["projection"])
        if shard is None:
            known = f"{self._names.gate}, {self._names.down} or {self._names.up}"
            raise self._error(name, f"has the unknown projection {match['projection']!r}; expected {known}")
        if match["suffix"] not in self._parameters:
            known = ", ".join(self._parameters)
            raise self._error(name, f"has no parameter to go to: {match['suffix']!r} is none of {known}")
        expert = int(match["expert"])
        if expert >= self._experts:
            raise self._error(name, f"is of expert {expert}; the layer has experts 0..{self._experts - 1}")
        parameter = self._parameter(match["suffix"], shard)
        expected = parameter.loaded_shape(shard, self._tp_size)
        if not parameter.takes(tensor.dtype):
            own = parameter.tensor_S.dtype
            raise self._error(
                name,
                f"must have {'a floating-point dtype' if own.is_floating_point else own}, got {tensor.dtype}",
            )
        tensor = parameter.fitted(shard, tensor)
        if tuple(tensor.shape) != expected:
            raise self._error(name, f"must have the shape {list(expected)}, got {list(tensor.shape)}")
        slots = self._slots_of.get(expert, [])
        for slot in slots:
            parameter.fill(slot, shard, tensor, self._tp_rank)
        self._missing.pop(name, None)
        return len(slots)

    def finish(self) -> None:
        """Raise ``ValueError`` naming the first missing tensor and its shape, unless all that this rank needs came."""
        if self._missing:
            name, shape = next(iter(self._missing.items()))
            raise self._error(name, f"of shape {shape} is missing ({len(self._missing)} tensors are)")

    def _parameter(self, suffix: str, shard: Shard) -> ExpertParameter:
        w13, w2 = self._parameters[suffix]
        return w2 if shard is Shard.W2 else w13

    def _error(self, name: str, what: str) -> ValueError:
        return ValueError(f"layer {self._layer}: checkpoint tensor {name} {what}")
