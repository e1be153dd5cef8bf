"""Loads a checkpoint's expert tensors, named by logical expert, into every local slot that holds the expert."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import torch


class Shard(str, Enum):
    """One of the matrices of an expert, by the names that checkpoints use; there is no w3 without a gate."""

    W1 = "w1"
    """Gate projection, the first half of w13; the only one that is there where experts have no gate."""

    W2 = "w2"
    """Down projection."""

    W3 = "w3"
    """Up projection, the second half of w13."""


class Granularity(str, Enum):
    """Extent of one value of a parameter."""

    WEIGHT = "weight"
    """A weight: w13 ``[S, 2*I, H]``, w2 ``[S, H, I]``."""

    CHANNEL = "channel"
    """A scale or offset for an output row: w13 ``[S, 2*I]`` or ``[S, 2*I, 1]``, w2 ``[S, H]`` or ``[S, H, 1]``.

    Checkpoints may hold them with or without the last dimension as well.
    """

    BIAS = "bias"
    """Added to an output row: shaped as a channel's scale. Tensor-parallel ranks add up, so one has all of w2's."""


@dataclass(frozen=True)
class ExpertParameter:
    """A tensor of all local slots.

    Tensor parallelism splits w1 and w3 by rows and w2 by columns: a rank's tensor holds its part alone.
    """

    tensor_S: torch.Tensor
    granularity: Granularity = Granularity.WEIGHT
    gated: bool = True
    """w13 has a half for each of w1 and w3."""

    zeros: bool = False
    """Only zeros are taken and nothing is kept: the offset of a symmetric quantization, there or not."""

    def loaded_shape(self, shard: Shard, tp_size: int) -> tuple[int, ...]:
        """Return the shape of a checkpoint tensor of one expert's shard, of which this rank takes its part."""
        shape = list(self._destination(0, shard).shape)
        split = self._split_dimension(shard)
        if split is not None:
            shape[split] *= tp_size
        return tuple(shape)

    def fitted(self, shard: Shard, loaded: torch.Tensor, tp_size: int) -> torch.Tensor:
        """Return one expert's checkpoint tensor in the shape that is held here; ``ValueError`` where it does not fit.

        Floating point goes into such, integers into the same.
        """
        own, expected = self.tensor_S.dtype, self.loaded_shape(shard, tp_size)
        if own.is_floating_point and not loaded.dtype.is_floating_point:
            raise ValueError(f"must have a floating-point dtype, got {loaded.dtype}")
        if not own.is_floating_point and loaded.dtype != own:
            raise ValueError(f"must have {own}, got {loaded.dtype}")
        shape = tuple(loaded.shape)
        if self.granularity is Granularity.CHANNEL and ((*shape, 1) == expected or shape == (*expected, 1)):
            loaded = loaded.reshape(expected)
        if loaded.shape != expected:
            raise ValueError(f"must have the shape {list(expected)} for {shard.value}, got {list(shape)}")
        if self.zeros and loaded.any():
            raise ValueError("must be zeros: the layer's quantization is symmetric")
        return loaded

    def fill(self, slot: int, shard: Shard, loaded: torch.Tensor, tp_rank: int) -> None:
        """Copy ``tp_rank``'s part of a tensor of ``loaded_shape`` into a slot."""
        if self.zeros:
            return
        destination, split = self._destination(slot, shard), self._split_dimension(shard)
        if split is not None:
            width = destination.shape[split]
            destination.copy_(loaded.narrow(split, tp_rank * width, width))
        elif self.granularity is Granularity.BIAS and tp_rank:
            destination.zero_()
        else:
            destination.copy_(loaded)

    def _destination(self, slot: int, shard: Shard) -> torch.Tensor:
        rows = self.tensor_S[slot]
        if shard is Shard.W2 or not self.gated:
            return rows
        gate, up = rows.chunk(2, dim=0)
        return gate if shard is Shard.W1 else up

    def _split_dimension(self, shard: Shard) -> int | None:
        if shard is not Shard.W2:
            return 0
        return 1 if self.granularity is Granularity.WEIGHT else None


_Parsed: TypeAlias = tuple[int | None, tuple[Shard, ...], str]
"""Of a checkpoint tensor: its expert, ``None`` where it has all as its first dimension; its shards, both w1 and w3
where it has the rows of both; its suffix."""


@dataclass(frozen=True)
class CheckpointNames:
    """Names of a checkpoint's expert tensors: ``<prefix>.<expert>.<projection>.<suffix>``.

    ``prefix`` is for example ``model.layers.3.mlp.experts``. Tensors of all experts, ``[E, ...]``, have no
    ``<expert>``, and no suffix where they are weights: ``<prefix>.<projection>``, ``<prefix>.<projection>_bias``.
    """

    prefix: str
    gate: str = "gate_proj"
    """Of experts without a gate, the projection that comes first, often ``up_proj``."""

    down: str = "down_proj"
    up: str | None = "up_proj"
    """``None`` where experts have no gate."""

    gate_up: str = "gate_up_proj"
    """Gate and up projection in one tensor."""

    interleaved: bool = False
    """Rows of gate and up projection take turns in such a tensor, as in gpt-oss; else gate's come first."""

    transposed: bool = False
    """Tensors of all experts hold their matrices transposed: ``[E, H, 2*I]`` and ``[E, I, H]``."""

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The matrices of an expert."""
        return (Shard.W1, Shard.W2) if self.up is None else (Shard.W1, Shard.W2, Shard.W3)

    def parse(self, name: str) -> _Parsed:
        """Read a name; ``ValueError`` where it is none of an expert tensor."""
        prefix = re.escape(self.prefix)
        projections: dict[str, tuple[Shard, ...]] = {self.gate: (Shard.W1,), self.down: (Shard.W2,)}
        if self.up is not None:
            projections |= {self.up: (Shard.W3,), self.gate_up: (Shard.W1, Shard.W3)}
        known = "|".join(sorted(map(re.escape, projections), key=len, reverse=True))
        match = re.fullmatch(
            rf"{prefix}\.(?P<expert>\d+)\.(?P<projection>[^.]+)\.(?P<suffix>[^.]+)", name
        ) or re.fullmatch(rf"{prefix}\.(?P<projection>{known})(?:[._](?P<suffix>[^.]+))?", name)
        if match is None:
            raise ValueError(f"is no expert tensor: expected {self.prefix}.<expert>.<projection>.<suffix>")
        found = match.groupdict()
        projection = found["projection"]
        if projection not in projections:
            raise ValueError(
                f"has the unknown projection {projection!r}; expected one of {', '.join(projections)}"
            )
        expert = found.get("expert")
        number = None if expert is None else int(expert)
        return number, projections[projection], found["suffix"] or "weight"

    def tensor(self, expert: int, shard: Shard, suffix: str) -> str:
        """Return the name of one expert's tensor."""
        projection = {Shard.W1: self.gate, Shard.W2: self.down, Shard.W3: self.up}[shard]
        return f"{self.prefix}.{expert}.{projection}.{suffix}"

    def parts(
        self, shards: tuple[Shard, ...], tensor: torch.Tensor, *, of_all: bool
    ) -> Iterator[tuple[Shard, torch.Tensor]]:
        """Split one expert's tensor, or its part of one ``of_all`` experts, by shard."""
        if of_all and self.transposed and tensor.ndim == 2:
            tensor = tensor.transpose(0, 1)
        if len(shards) == 1 or not tensor.ndim:
            yield from ((shard, tensor) for shard in shards)
        elif self.interleaved:
            yield from ((shard, tensor[first::2]) for first, shard in enumerate(shards))
        else:
            yield from zip(shards, tensor.tensor_split(2), strict=True)


class ExpertLoader:
    """Fills one layer's parameters from checkpoint tensors, in whatever order they come.

    The checkpoint has all ``experts``, of which this rank takes those in its slots, ``logical_S``, and of each the part
    of ``tp_rank`` where experts are split further by tensor parallelism. ``parameters`` has by checkpoint suffix
    (``weight``, ``weight_scale``, ...) the layer's tensors for w1 and w3, and for w2. Raises ``ValueError`` where there
    is no such rank, or names and parameters disagree about a gate.
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
        for suffix, (w13, _) in parameters.items():
            if w13.gated != (names.up is not None):
                has, up = "a gate" if w13.gated else "no gate", "none" if names.up is None else repr(names.up)
                raise ValueError(
                    f"layer {layer}: {suffix} has {has}, but the name of the up projection is {up}"
                )
        self._layer = layer
        self._experts = experts
        self._names = names
        self._parameters = parameters
        self._tp_rank, self._tp_size = tp_rank, tp_size
        self._slots_of: dict[int, list[int]] = {}
        for slot, expert in enumerate(logical_S):
            self._slots_of.setdefault(expert, []).append(slot)
        self._missing = {
            (expert, shard, suffix)
            for expert in self._slots_of
            for suffix, (w13, _) in parameters.items()
            for shard in names.shards
            if not w13.zeros
        }

    def load(self, name: str, tensor: torch.Tensor) -> int:
        """Copy one checkpoint tensor to where it belongs; return how many slots took it (0: not held here).

        Raises ``ValueError`` naming layer, tensor and what was expected where the name is no expert tensor of
        this layer, or the shape is not that of the parameter.
        """
        try:
            expert, shards, suffix = self._names.parse(name)
            if suffix not in self._parameters:
                known = ", ".join(self._parameters)
                raise ValueError(f"has no parameter to go to: {suffix!r} is none of {known}")
            if expert is not None:
                return self._load_expert(expert, suffix, self._names.parts(shards, tensor, of_all=False))
            if not tensor.ndim or tensor.shape[0] != self._experts:
                shape = list(tensor.shape)
                raise ValueError(f"must have the {self._experts} experts as first dimension, got {shape}")
            return sum(
                self._load_expert(held, suffix, self._names.parts(shards, tensor[held], of_all=True))
                for held in self._slots_of
            )
        except ValueError as problem:
            raise ValueError(f"layer {self._layer}: checkpoint tensor {name} {problem}") from None

    def finish(self) -> None:
        """Raise ``ValueError`` naming the first missing tensor and its shape, unless all that this rank needs came."""
        if self._missing:
            expert, shard, suffix = min(self._missing)
            name = self._names.tensor(expert, shard, suffix)
            shape = list(self._parameter(suffix, shard).loaded_shape(shard, self._tp_size))
            raise ValueError(
                f"layer {self._layer}: checkpoint tensor {name} of shape {shape} is missing "
                f"({len(self._missing)} tensors are)"
            )

    def _load_expert(self, expert: int, suffix: str, found: Iterable[tuple[Shard, torch.Tensor]]) -> int:
        if expert >= self._experts:
            raise ValueError(f"is of expert {expert}; the layer has experts 0..{self._experts - 1}")
        parts = []
        for shard, part in found:
            parameter = self._parameter(suffix, shard)
            parts.append((shard, parameter, parameter.fitted(shard, part, self._tp_size)))
        slots = self._slots_of.get(expert, [])
        for shard, parameter, part in parts:
            for slot in slots:
                parameter.fill(slot, shard, part, self._tp_rank)
            self._missing.discard((expert, shard, suffix))
        return len(slots)

    def _parameter(self, suffix: str, shard: Shard) -> ExpertParameter:
        w13, w2 = self._parameters[suffix]
        return w2 if shard is Shard.W2 else w13
