"""Find what belongs to an expert and would stay behind when the expert moves."""

from __future__ import annotations

import hashlib
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.adapters.reachable import Found, Search, last_name
from worker_agent.device import bytes_of
from worker_agent.live_layer import ExpertWeights

log = logging.getLogger("eplb.agent")

Facts = dict[str, str]
"""By path: a digest of a value that a rank has once for all its experts, and that must be the same on all ranks."""

_PLAIN_INTEGERS = (torch.bool, torch.int32, torch.int64, torch.uint32, torch.uint64)
_PLUMBING = re.compile(
    r"ptr|stride|offset|problem|size|tokens|count|mask|map|table|idx|ind(ex|ices)|(^|_)ids?$|load"
)
"""Names of integers that a grouped kernel keeps by slot, such as addresses and strides. They are no expert's."""

_ONE_FOR_ALL = re.compile(
    r"input_(global_)?scale|act(ivation)?_scale|(^|[._])_?a(1|2|13)q?[._]|gscale|swiglu|fake"
    r"|gemm1_(alpha|beta|clamp_limit)|per_token_global_scale"
)
"""Paths of values that engines keep once for each expert although they are one for all: scales of inputs, and constants
of the activation. They need not move if they are equal."""

_SCRATCH = re.compile(r"workspace|scratch")
_FACTOR = re.compile(r"scale|alpha|_gs\b|gscale|zero_point")


def refuse_unmoved(
    module: Any,
    moved: Iterable[ExpertWeights],
    slots: int,
    known: frozenset[str],
    *,
    tables: Iterable[torch.Tensor] = (),
    roots: Mapping[str, Any] | None = None,
) -> Facts:
    """Refuse experts of a layer that would not move whole.

    Parameters
    ----------
    module
        The object that owns the experts. Everything that it reaches is examined: its quantisation method, kernels,
        wrappers, containers, closures and submodules.
    moved
        All tensors that move, of this layer or of all layers.
    slots
        S, the number of experts on this rank.
    known
        Names of tensors that belong to no expert. Scales of inputs among them must be equal for all experts.
    tables
        Tensors that are not the layer's, such as the routing tables that the agent itself writes.
    roots
        Further objects to examine, by name.

    Returns
    -------
    Facts
        Values that are equal for all experts here. ``refuse_unlike_ranks`` compares them.

    Raises
    ------
    UnsupportedEngineError
        If a tensor has a part for each expert, along any axis, and neither moves nor is one value for all of them.
    """
    weights = [*_tensors(moved)]
    search = Search({"": module, **(roots or {})}, slots)
    found = list(search)
    if search.cut is not None:
        log.warning(
            "the search for tensors of experts ended early, at %s; the rest was not examined", search.cut
        )
    examiner = _Examiner(weights, slots, known, tables)
    left = examiner.unmoved(found)
    if left:
        raise UnsupportedEngineError(
            f"MoE layers with {', '.join(sorted(left))} per expert",
            "The engine's own balancer does not move them, so they would stay behind when their expert moves",
            "Report this model and its quantisation",
        )
    return examiner.facts


def refuse_unlike_ranks(facts: Facts, group: dist.ProcessGroup | None) -> None:
    """Reject values that are equal for all experts of a rank but differ between ranks. A collective over ``group``.

    An expert that moves to another rank would be computed with that rank's value, for example a scale of inputs that
    each rank derived from its first experts. Raises ``UnsupportedEngineError`` on all ranks alike.
    """
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, facts, group=group)
    for rank, theirs in enumerate(everyone):
        apart = sorted(
            path for path in facts.keys() | theirs.keys() if everyone[0].get(path) != theirs.get(path)
        )
        if apart:
            raise UnsupportedEngineError(
                f"MoE layers whose {apart[0]} differs between rank 0 and rank {rank}",
                "Each rank derived it from its own experts, and it does not move with them",
                "Report this model and its quantisation",
            )


class _Examiner:
    """Judge of the values that were found beside the tensors that move."""

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        slots: int,
        known: frozenset[str],
        tables: Iterable[torch.Tensor],
    ) -> None:
        self.facts: Facts = {}
        self._slots = slots
        self._known = known
        self._intervals = _merged(_interval(tensor) for tensor in weights)
        self._starts = {tensor.data_ptr() for tensor in weights}
        self._tables = {_storage(tensor) for tensor in tables}
        self._sizes = {slots}
        self._inner: set[int] = set()

    def unmoved(self, found: Sequence[Found]) -> set[str]:
        """Return the paths of what would stay behind; fills ``facts``."""
        for one in found:
            self._learn(one.value)
        left: set[str] = set()
        groups: defaultdict[str, dict[int, Any]] = defaultdict(dict)
        for one in found:
            if one.group is not None and one.member is not None:
                groups[one.group][one.member] = one.value
            if isinstance(one.value, (torch.Tensor, np.ndarray)):
                if self._stays(one):
                    left.add(one.path)
            elif isinstance(one.value, float) and _FACTOR.search(one.name) and one.group is None:
                self.facts[one.path] = repr(one.value)
        return left | {group for group, members in groups.items() if self._group_stays(group, members)}

    def _learn(self, value: Any) -> None:
        """Learn the sizes of experts, and of tensors that begin with moved experts and have other rows behind them."""
        if not isinstance(value, torch.Tensor) or not value.dim() or not _has_memory(value):
            return
        rows = value.shape[0]
        if rows > self._slots and value.data_ptr() in self._starts and self._moves(value[: self._slots]):
            self._sizes.add(rows)
        elif rows == self._slots and self._moves(value):
            size = 1
            for length in value.shape[:0:-1]:
                size *= length
                self._inner |= {length, size}

    def _moves(self, tensor: torch.Tensor) -> bool:
        start, end = _interval(tensor)
        return any(first <= start and end <= last for first, last in self._intervals)

    def _stays(self, found: Found) -> bool:
        """Return True if a tensor has parts by expert that do not move, and are not one for all experts."""
        tensor = _as_tensor(found.value)
        name = found.name
        if (
            tensor is None
            or not tensor.numel()
            or not _has_memory(tensor)
            or _storage(tensor) in self._tables
        ):
            return False
        if self._moves(tensor) or _SCRATCH.search(name) or self._is_plumbing(tensor, name):
            return False
        if tensor.dim() and tensor.shape[0] in self._sizes and self._moves(tensor[: self._slots]):
            return False  # a shared expert behind the experts that move
        if name in self._known and not name.endswith("input_scale"):
            return False
        axes = [axis for axis, size in enumerate(tensor.shape) if size in self._sizes]
        if not axes and self._is_flat_and_apart(tensor):
            return True
        if axes and not self._is_one_for_all(tensor, axes, found.path):
            return True
        if tensor.is_floating_point() and (axes or (tensor.numel() == 1 and _FACTOR.search(name))):
            self.facts[found.path] = _digest(tensor.select(axes[0], 0) if axes else tensor)
        return False

    def _is_one_for_all(self, tensor: torch.Tensor, axes: Sequence[int], path: str) -> bool:
        """Return True if the parts are equal by design; two experts may also have the same scale by chance."""
        is_meant = (
            tensor.dtype in _PLAIN_INTEGERS
            or bool(_ONE_FOR_ALL.search(path))
            or all(tensor.stride(axis) == 0 for axis in axes)
        )
        return is_meant and all(_alike(tensor, axis, self._slots) for axis in axes)

    def _is_plumbing(self, tensor: torch.Tensor, name: str) -> bool:
        return tensor.dtype in _PLAIN_INTEGERS and bool(_PLUMBING.search(name))

    def _is_flat_and_apart(self, tensor: torch.Tensor) -> bool:
        """Return True for parts by expert that one axis holds one after the other, as long as a moved tensor's are."""
        if not (tensor.is_floating_point() or tensor.element_size() == 1) or self._slots < 2:
            return False
        for axis, size in enumerate(tensor.shape):
            part, rest = divmod(size, self._slots)
            if not rest and part > 1 and part in self._inner:
                try:
                    parts = tensor.unflatten(axis, (self._slots, part))
                except RuntimeError:
                    return True
                if not _alike(parts, axis, self._slots):
                    return True
        return False

    def _group_stays(self, group: str, members: Mapping[int, Any]) -> bool:
        """Return True if there is one value for each expert that does not move, and it is not one for all."""
        if len(members) != self._slots or any(word in group for word in self._known):
            return False
        values = [members[number] for number in sorted(members)]
        tensors = [_as_tensor(value) for value in values]
        if all(tensor is not None for tensor in tensors):
            parts = [tensor for tensor in tensors if tensor is not None]
            if len({(part.shape, part.dtype) for part in parts}) != 1 or not parts[0].numel():
                return False
            if not all(_has_memory(part) for part in parts) or all(self._moves(part) for part in parts):
                return False
            if self._is_plumbing(parts[0], last_name(group)):
                return False
            is_meant = bool(_ONE_FOR_ALL.search(group)) or parts[0].dtype in _PLAIN_INTEGERS
            return not (is_meant and all(_same(part, parts[0]) for part in parts))
        if any(tensor is not None for tensor in tensors):
            return False
        factors = any(isinstance(value, float) for value in values)
        return factors and any(value != values[0] for value in values)


def _tensors(weights: Iterable[ExpertWeights]) -> Iterator[torch.Tensor]:
    for weight in weights:
        if isinstance(weight, torch.Tensor):
            yield weight
        else:
            yield from weight


def _as_tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, np.ndarray) and value.dtype.kind in "iuf" and value.dtype.isnative:
        return torch.from_numpy(value if value.flags.writeable else value.copy())
    return None


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return False for tensors without their own memory: wrappers of other tensors, or tensors not yet loaded."""
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        return False
    try:
        return tensor.data_ptr() != 0
    except (RuntimeError, ValueError):  # uninitialised parameters and wrappers have none
        return False


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _interval(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte and of the one behind the last."""
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (span + 1) * tensor.element_size()


def _merged(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _alike(tensor: torch.Tensor, axis: int, slots: int) -> bool:
    """Return True if the parts of the first ``slots`` along ``axis`` are the same, bit by bit."""
    try:
        parts = tensor.movedim(axis, 0)[:slots]
        rows = parts.contiguous().view(slots, -1).view(torch.uint8)
    except RuntimeError:  # a format of which no part can be read alone
        return False
    return bool((rows == rows[:1]).all())


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.device == other.device and torch.equal(
        bytes_of(one.contiguous()), bytes_of(other.contiguous())
    )


def _digest(tensor: torch.Tensor) -> str:
    data = bytes_of(tensor.contiguous()).cpu().numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]
