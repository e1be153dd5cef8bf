"""Find values that belong to an expert and would stay behind when the expert moves."""

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
from worker_agent.adapters.reachable import ReachableValue, Search, last_name
from worker_agent.device import bytes_of
from worker_agent.live_layer import ExpertWeights

log = logging.getLogger("eplb.agent")

SharedValues = dict[str, str]
"""Digests, by path, of values that all experts on a rank share. They must be the same on all ranks."""

_PLAIN_INTEGERS = (torch.bool, torch.int32, torch.int64, torch.uint32, torch.uint64)
_BOOKKEEPING = re.compile(
    r"ptr|stride|offset|problem|size|tokens|count|mask|map|table|idx|ind(ex|ices)|(^|_)ids?$|load"
)
"""Names of integers that a grouped kernel keeps per slot, such as addresses and strides. They belong to no expert."""

_EQUAL_BY_DESIGN = re.compile(
    r"input_(global_)?scale|act(ivation)?_scale|(^|[._])_?a(1|2|13)q?[._]|gscale|swiglu|fake"
    r"|gemm1_(alpha|beta|clamp_limit)|per_token_global_scale"
)
"""Paths of values that engines store once per expert although all experts have the same value: input scales and
activation constants. Such values need not move if they are equal."""

_SCRATCH = re.compile(r"workspace|scratch")
_FACTOR = re.compile(r"scale|alpha|_gs\b|gscale|zero_point")


def refuse_unmoved(
    module: Any,
    moved: Iterable[ExpertWeights],
    slots: int,
    exempt_names: frozenset[str],
    *,
    tables: Iterable[torch.Tensor] = (),
    roots: Mapping[str, Any] | None = None,
) -> SharedValues:
    """Refuse a layer if any of an expert's values would stay behind when the expert moves.

    Parameters
    ----------
    module
        Module that owns the experts. Every value reachable from it is examined, including its quantisation method,
        kernels, wrappers, containers, closures and submodules.
    moved
        All tensors that move, in this layer or in all layers.
    slots
        S, the number of experts on this rank.
    exempt_names
        Names of tensors that belong to no expert. If one of them is an input scale, it must still be equal for all
        experts.
    tables
        Tensors that do not belong to the layer, such as the routing tables that the agent itself writes.
    roots
        Additional objects to examine, by name.

    Returns
    -------
    SharedValues
        Values that are equal for all experts of this rank, to be compared by ``refuse_unlike_ranks``.

    Raises
    ------
    UnsupportedEngineError
        If a tensor has one element or slice per expert along any axis, does not move, and differs between experts.
    """
    weights = [*_tensors(moved)]
    search = Search({"": module, **(roots or {})}, slots)
    values = list(search)
    if search.cut is not None:
        log.warning(
            "the search for expert tensors stopped early, at %s; the remaining values were not examined",
            search.cut,
        )
    examiner = _Examiner(weights, slots, exempt_names, tables)
    unmoved = examiner.find_unmoved(values)
    if unmoved:
        raise UnsupportedEngineError(
            f"MoE layers with per-expert {', '.join(sorted(unmoved))}",
            "The engine's own balancer does not move them, so they would stay behind when their expert moves",
            "Report this model and its quantisation",
        )
    return examiner.shared_values


def refuse_unlike_ranks(shared_values: SharedValues, group: dist.ProcessGroup | None) -> None:
    """Reject values that are equal for all experts of a rank but differ between ranks (collective over ``group``).

    Otherwise, an expert that moves to another rank would be computed with that rank's value, for example with an input
    scale that the rank derived from its first experts. Raises ``UnsupportedEngineError`` on all ranks.
    """
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, shared_values, group=group)
    for rank, remote in enumerate(gathered):
        paths = shared_values.keys() | remote.keys()
        differing = sorted(path for path in paths if gathered[0].get(path) != remote.get(path))
        if differing:
            raise UnsupportedEngineError(
                f"MoE layers whose {differing[0]} differs between rank 0 and rank {rank}",
                "Each rank derived it from its own experts, and it does not move with them",
                "Report this model and its quantisation",
            )


class _Examiner:
    """Decides which values of a layer would stay behind when its experts move.

    Parameters
    ----------
    weights
        All tensors that move.
    slots
        S, the number of experts on this rank.
    exempt_names
        Names of tensors that belong to no expert.
    tables
        Tensors that do not belong to the layer.

    Attributes
    ----------
    shared_values
        Values that are equal for all experts; filled by ``find_unmoved``.
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        slots: int,
        exempt_names: frozenset[str],
        tables: Iterable[torch.Tensor],
    ) -> None:
        self.shared_values: SharedValues = {}
        self._slots = slots
        self._exempt_names = exempt_names
        self._intervals = _merged(_interval(tensor) for tensor in weights)
        self._starts = {tensor.data_ptr() for tensor in weights}
        self._tables = {_storage(tensor) for tensor in tables}
        # Lengths of expert axes, and axis lengths within one expert's slice of a moved tensor.
        self._expert_counts = {slots}
        self._inner_lengths: set[int] = set()

    def find_unmoved(self, values: Sequence[ReachableValue]) -> set[str]:
        """Return the paths of values that would stay behind, and fill ``shared_values``."""
        for item in values:
            self._learn_sizes(item.value)
        unmoved: set[str] = set()
        groups: defaultdict[str, dict[int, Any]] = defaultdict(dict)
        for item in values:
            if item.group is not None and item.member is not None:
                groups[item.group][item.member] = item.value
            if isinstance(item.value, (torch.Tensor, np.ndarray)):
                if self._stays(item):
                    unmoved.add(item.path)
            elif isinstance(item.value, float) and _FACTOR.search(item.name) and item.group is None:
                self.shared_values[item.path] = repr(item.value)
        return unmoved | {group for group, members in groups.items() if self._group_stays(group, members)}

    def _learn_sizes(self, value: Any) -> None:
        """Store the sizes of a moved tensor, even if it has additional rows after the experts that move."""
        if not isinstance(value, torch.Tensor) or not value.dim() or not _has_memory(value):
            return
        rows = value.shape[0]
        if rows > self._slots and value.data_ptr() in self._starts and self._moves(value[: self._slots]):
            self._expert_counts.add(rows)
        elif rows == self._slots and self._moves(value):
            size = 1
            for length in value.shape[:0:-1]:
                size *= length
                self._inner_lengths |= {length, size}

    def _moves(self, tensor: torch.Tensor) -> bool:
        """Return True if the memory of a tensor lies within the tensors that move."""
        start, end = _interval(tensor)
        return any(first <= start and end <= last for first, last in self._intervals)

    def _stays(self, item: ReachableValue) -> bool:
        """Return True if a tensor has per-expert values that neither move nor are the same for all experts."""
        tensor = _as_tensor(item.value)
        name = item.name
        if (
            tensor is None
            or not tensor.numel()
            or not _has_memory(tensor)
            or _storage(tensor) in self._tables
        ):
            return False
        if self._moves(tensor) or _SCRATCH.search(name) or self._is_bookkeeping(tensor, name):
            return False
        if tensor.dim() and tensor.shape[0] in self._expert_counts and self._moves(tensor[: self._slots]):
            return False  # a shared expert after the experts that move
        if name in self._exempt_names and not name.endswith("input_scale"):
            return False
        axes = [axis for axis, size in enumerate(tensor.shape) if size in self._expert_counts]
        if not axes and self._has_unequal_blocks(tensor):
            return True
        if axes and not self._is_shared(tensor, axes, item.path):
            return True
        if tensor.is_floating_point() and (axes or (tensor.numel() == 1 and _FACTOR.search(name))):
            self.shared_values[item.path] = _digest(tensor.select(axes[0], 0) if axes else tensor)
        return False

    def _is_shared(self, tensor: torch.Tensor, axes: Sequence[int], path: str) -> bool:
        """Return True if all experts have the same values by design rather than by chance."""
        by_design = (
            tensor.dtype in _PLAIN_INTEGERS
            or bool(_EQUAL_BY_DESIGN.search(path))
            or all(tensor.stride(axis) == 0 for axis in axes)
        )
        return by_design and all(_equal_along(tensor, axis, self._slots) for axis in axes)

    def _is_bookkeeping(self, tensor: torch.Tensor, name: str) -> bool:
        return tensor.dtype in _PLAIN_INTEGERS and bool(_BOOKKEEPING.search(name))

    def _has_unequal_blocks(self, tensor: torch.Tensor) -> bool:
        """Return True if an axis concatenates one block per expert, and the blocks differ.

        A block must be as long as an axis, or several flattened axes, of a moved tensor.
        """
        if not (tensor.is_floating_point() or tensor.element_size() == 1) or self._slots < 2:
            return False
        for axis, size in enumerate(tensor.shape):
            length, remainder = divmod(size, self._slots)
            if not remainder and length > 1 and length in self._inner_lengths:
                try:
                    blocks = tensor.unflatten(axis, (self._slots, length))
                except RuntimeError:
                    return True
                if not _equal_along(blocks, axis, self._slots):
                    return True
        return False

    def _group_stays(self, group: str, members: Mapping[int, Any]) -> bool:
        """Return True if a group has per-expert values that neither move nor are the same for all experts."""
        if len(members) != self._slots or any(name in group for name in self._exempt_names):
            return False
        values = [members[number] for number in sorted(members)]
        tensors = [tensor for tensor in map(_as_tensor, values) if tensor is not None]
        if len(tensors) == len(values):
            return self._tensors_stay(group, tensors)
        if tensors:
            return False
        has_factors = any(isinstance(value, float) for value in values)
        return has_factors and any(value != values[0] for value in values)

    def _tensors_stay(self, group: str, tensors: Sequence[torch.Tensor]) -> bool:
        first = tensors[0]
        if len({(tensor.shape, tensor.dtype) for tensor in tensors}) != 1 or not first.numel():
            return False
        if not all(_has_memory(tensor) for tensor in tensors) or all(
            self._moves(tensor) for tensor in tensors
        ):
            return False
        if self._is_bookkeeping(first, last_name(group)):
            return False
        by_design = bool(_EQUAL_BY_DESIGN.search(group)) or first.dtype in _PLAIN_INTEGERS
        return not (by_design and all(_equal_bytes(tensor, first) for tensor in tensors))


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
    """Return False for tensors without memory, such as wrappers around other tensors and tensors not loaded yet."""
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        return False
    try:
        return tensor.data_ptr() != 0
    except (RuntimeError, ValueError):  # uninitialised parameters and wrappers have no address
        return False


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _interval(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte and of the byte after the last one."""
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (span + 1) * tensor.element_size()


def _merged(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge intervals that touch or overlap.

    Examples
    --------
    >>> _merged([(4, 6), (0, 2), (2, 3)])
    [(0, 3), (4, 6)]
    """
    merged: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _equal_along(tensor: torch.Tensor, axis: int, slots: int) -> bool:
    """Return True if the first ``slots`` slices along ``axis`` are bitwise identical."""
    try:
        slices = tensor.movedim(axis, 0)[:slots]
        rows = slices.contiguous().view(slots, -1).view(torch.uint8)
    except RuntimeError:  # a format whose slices cannot be read separately
        return False
    return bool((rows == rows[:1]).all())


def _equal_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.device == second.device and torch.equal(
        bytes_of(first.contiguous()), bytes_of(second.contiguous())
    )


def _digest(tensor: torch.Tensor) -> str:
    data = bytes_of(tensor.contiguous()).cpu().numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]
