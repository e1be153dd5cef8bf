"""Loads a checkpoint's expert tensors, named by logical expert, into every local slot that holds the expert."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from worker_agent.moe.expert_parameter import ExpertParameter, Shard


@dataclass(frozen=True)
class NamedTensor:
    """What a checkpoint tensor's name says of it."""

    expert: int | None
    """``None`` where it has all experts, as its first dimension."""

    shards: tuple[Shard, ...]
    """Both w1 and w3 where it has the rows of both."""

    suffix: str


@dataclass(frozen=True)
class CheckpointNames:
    """How a checkpoint names its expert tensors: ``<prefix>.<expert>.<projection>.<suffix>``.

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
    """Whether rows of gate and up projection take turns in such a tensor, as in gpt-oss; else gate's come first."""

    transposed: bool = False
    """Whether tensors of all experts hold their matrices transposed: ``[E, H, 2*I]`` and ``[E, I, H]``."""

    _of_one: re.Pattern[str] = field(init=False, repr=False)
    _of_all: re.Pattern[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        of_one = rf"{re.escape(self.prefix)}\.(?P<expert>\d+)\.(?P<projection>[^.]+)\.(?P<suffix>[^.]+)"
        known = "|".join(sorted(map(re.escape, self._projections()), key=len, reverse=True))
        of_all = rf"{re.escape(self.prefix)}\.(?P<projection>{known})(?:[._](?P<suffix>[^.]+))?"
        object.__setattr__(self, "_of_one", re.compile(of_one))
        object.__setattr__(self, "_of_all", re.compile(of_all))

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Those that an expert has."""
        return (Shard.W1, Shard.W2) if self.up is None else (Shard.W1, Shard.W2, Shard.W3)

    def parse(self, name: str) -> NamedTensor:
        """What a name says; ``ValueError`` where it is none of an expert tensor."""
        match = self._of_one.fullmatch(name) or self._of_all.fullmatch(name)
        if match is None:
            raise ValueError(f"is no expert tensor: expected {self.prefix}.<expert>.<projection>.<suffix>")
        found, projections = match.groupdict(), self._projections()
        projection = found["projection"]
        if projection not in projections:
            known = ", ".join(projections)
            raise ValueError(f"has the unknown projection {projection!r}; expected one of {known}")
        expert = found.get("expert")
        return NamedTensor(
            None if expert is None else int(expert), projections[projection], found["suffix"] or "weight"
        )

    def tensor(self, expert: int, shard: Shard, suffix: str) -> str:
        """The name of one expert's tensor."""
        projection = {Shard.W1: self.gate, Shard.W2: self.down, Shard.W3: self.up}[shard]
        return f"{self.prefix}.{expert}.{projection}.{suffix}"

    def parts(self, found: NamedTensor, tensor: torch.Tensor) -> Iterator[tuple[Shard, torch.Tensor]]:
        """One expert's tensor by shard."""
        if found.expert is None and self.transposed and tensor.ndim == 2:
            tensor = tensor.transpose(0, 1)
        if len(found.shards) == 1 or not tensor.ndim:
            yield from ((shard, tensor) for shard in found.shards)
        elif self.interleaved:
            yield from ((shard, tensor[first::2]) for first, shard in enumerate(found.shards))
        else:
            yield from zip(found.shards, tensor.tensor_split(2), strict=True)

    def _projections(self) -> dict[str, tuple[Shard, ...]]:
        projections: dict[str, tuple[Shard, ...]] = {self.gate: (Shard.W1,), self.down: (Shard.W2,)}
        if self.up is not None:
            projections |= {self.up: (Shard.W3,), self.gate_up: (Shard.W1, Shard.W3)}
        return projections


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

    Raises ``ValueError`` where there is no such rank, or names and parameters disagree about a gate.
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
            found = self._names.parse(name)
            if found.suffix not in self._parameters:
                known = ", ".join(self._parameters)
                raise ValueError(f"has no parameter to go to: {found.suffix!r} is none of {known}")
            if found.expert is not None:
                return self._load_expert(found.expert, found, tensor)
            if not tensor.ndim or tensor.shape[0] != self._experts:
                shape = list(tensor.shape)
                raise ValueError(f"must have the {self._experts} experts as first dimension, got {shape}")
            return sum(self._load_expert(expert, found, tensor[expert]) for expert in self._slots_of)
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

    def _load_expert(self, expert: int, found: NamedTensor, tensor: torch.Tensor) -> int:
        if expert >= self._experts:
            raise ValueError(f"is of expert {expert}; the layer has experts 0..{self._experts - 1}")
        parts = [
            (shard, self._checked(shard, found.suffix, part))
            for shard, part in self._names.parts(found, tensor)
        ]
        slots = self._slots_of.get(expert, [])
        for shard, part in parts:
            parameter = self._parameter(found.suffix, shard)
            for slot in slots:
                if self._is_shared(expert, shard, found.suffix):
                    if not parameter.holds(slot, shard, part, self._tp_rank):
                        raise ValueError(f"differs between w1 and w3 of expert {expert}, which share it")
                else:
                    parameter.fill(slot, shard, part, self._tp_rank)
            self._missing.discard((expert, shard, found.suffix))
        return len(slots)

    def _checked(self, shard: Shard, suffix: str, tensor: torch.Tensor) -> torch.Tensor:
        """One expert's tensor in the shape that is held here; ``ValueError`` where it does not fit."""
        parameter = self._parameter(suffix, shard)
        if not parameter.takes(tensor.dtype):
            own = parameter.tensor_S.dtype
            wanted = "a floating-point dtype" if own.is_floating_point else str(own)
            raise ValueError(f"must have {wanted}, got {tensor.dtype}")
        expected = parameter.loaded_shape(shard, self._tp_size)
        fitted = parameter.fitted(shard, tensor)
        if tuple(fitted.shape) != expected:
            raise ValueError(
                f"must have the shape {list(expected)} for {shard.value}, got {list(tensor.shape)}"
            )
        if parameter.zeros and fitted.any():
            raise ValueError("must be zeros: the layer's quantization is symmetric")
        return fitted

    def _is_shared(self, expert: int, shard: Shard, suffix: str) -> bool:
        """Whether the other one of w1 and w3 has brought this value already."""
        other = {Shard.W1: Shard.W3, Shard.W3: Shard.W1}.get(shard)
        shared = other is not None and self._parameter(suffix, shard).granularity.shared
        return shared and other in self._names.shards and (expert, other, suffix) not in self._missing

    def _parameter(self, suffix: str, shard: Shard) -> ExpertParameter:
        w13, w2 = self._parameters[suffix]
        return w2 if shard is Shard.W2 else w13
