"""Search the values reachable from an object: attributes, containers, closures, wrappers and submodules."""

from __future__ import annotations

import enum
import functools
import re
import time
import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

MAX_OBJECTS = 50_000
MAX_SECONDS = 10.0
MAX_DEPTH = 16

_LEAVES = (
    *(type(None), str, bytes, bytearray, bool, complex, type, enum.Enum, re.Pattern),
    *(types.ModuleType, types.CodeType, types.BuiltinFunctionType, types.GeneratorType),
    *(torch.dtype, torch.device, torch.Size, torch.Generator),
)
"""Types whose instances hold no tensors, or only tensors shared by the whole process."""

_MAX_RECORD = 4
"""Maximum length at which a tuple is treated as a record of unrelated values, not as one value per expert."""

_FOREIGN = (
    *(
        "builtins",
        "logging",
        "threading",
        "asyncio",
        "concurrent",
        "multiprocessing",
        "queue",
        "socket",
        "grpc",
    ),
    *("torch", "triton", "numba", "transformers", "vllm.config", "vllm.distributed"),
    *("sglang.srt.configs", "sglang.srt.distributed", "sglang.srt.server_args"),
)
"""Modules whose objects belong to the process, its groups or its configuration, not to a layer."""

_SKIPPED_NAMES = re.compile(r"^_?(gate|router|topk)$|shared_expert|_hooks(_|$)|weight_loader$|^__")
"""Attributes that lead to the router, to shared experts, or back to the weight loader."""


@dataclass(frozen=True)
class ReachableValue:
    """A value and the path to it from a root.

    Parameters
    ----------
    path
        Chain of attributes and indices, such as ``kernel.scales[3]``.
    value
        The value.
    group
        Path without the member's number, such as ``kernel.scales[*]``, if the path passes through a group.
    member
        Index of that member within its group.
    """

    path: str
    value: Any
    group: str | None = None
    member: int | None = None

    @property
    def name(self) -> str:
        """Last identifier in the path, ignoring indices."""
        return last_name(self.path)


def last_name(path: str) -> str:
    """Return the last identifier in ``path``, or an empty string.

    Examples
    --------
    >>> last_name("kernel.scales[3]")
    'scales'
    """
    names = re.findall(r"[A-Za-z_]\w*", path)
    return names[-1] if names else ""


class Search:
    """Breadth-first search for tensors, arrays and numbers.

    Values that an engine keeps once per expert form a group: a list, a mapping or a set of numbered attributes with one
    member per expert. The search skips the rest of the model, that is, objects that contain a root. It stops after
    ``MAX_OBJECTS`` objects or ``MAX_SECONDS``.

    Parameters
    ----------
    roots
        Objects to start from, by name.
    experts
        Number of experts on this rank, and therefore of members in a group.

    Attributes
    ----------
    cut
        Path at which the search stopped early or did not descend further, or ``None`` if the search was complete.
    """

    def __init__(self, roots: Mapping[str, Any], experts: int) -> None:
        self.cut: str | None = None
        self._experts = experts
        self._roots = {id(root) for root in roots.values()}
        self._seen: dict[int, Any] = {}
        self._queue: deque[tuple[ReachableValue, int]] = deque(
            (ReachableValue(name, root), 0) for name, root in roots.items()
        )

    def __iter__(self) -> Iterator[ReachableValue]:
        """Yield tensors, arrays and numbers, nearest first. A tensor or array is yielded again for each group."""
        deadline = time.monotonic() + MAX_SECONDS
        while self._queue:
            item, depth = self._queue.popleft()
            value = item.value
            if isinstance(value, (int, float)) and not isinstance(value, (bool, enum.Enum)):
                yield item
                continue
            holds_numbers = isinstance(value, (torch.Tensor, np.ndarray))
            if id(value) in self._seen:
                if holds_numbers and item.group is not None:
                    yield item
                continue
            if isinstance(value, _LEAVES) or self._is_outside(value):
                continue
            self._seen[id(value)] = value
            if holds_numbers:
                yield item
            if depth >= MAX_DEPTH or len(self._seen) > MAX_OBJECTS or time.monotonic() > deadline:
                self.cut = item.path
                if depth >= MAX_DEPTH:
                    continue
                return
            for name, child in _unnumbered_children(value):
                if not _SKIPPED_NAMES.search(name.lstrip(".")):
                    self._enqueue(item, name, child, depth)
            self._enqueue_numbered(item, value, depth)

    def _enqueue(self, parent: ReachableValue, name: str, child: Any, depth: int) -> None:
        path = f"{parent.path}{name}".lstrip(".")
        group = None if parent.group is None else f"{parent.group}{name}"
        self._queue.append((ReachableValue(path, child, group, parent.member), depth + 1))

    def _enqueue_numbered(self, parent: ReachableValue, value: Any, depth: int) -> None:
        """Enqueue numbered children. If there is one child per expert, they become members of one group."""
        for pattern, children in _numbered_children(value).items():
            is_group = parent.group is None and self._is_group(value, pattern, children)
            for number, (name, child) in children.items():
                if is_group:
                    path = f"{parent.path}{name}".lstrip(".")
                    group = f"{parent.path}{pattern}".lstrip(".")
                    self._queue.append((ReachableValue(path, child, group, number), depth + 1))
                else:
                    self._enqueue(parent, name, child, depth)

    def _is_group(self, value: Any, pattern: str, children: Mapping[int, Any]) -> bool:
        """Return True if there is one child per expert, and the children's names differ only in their numbers."""
        if len(children) != self._experts or self._experts < 2 or "*" not in pattern:
            return False
        if isinstance(value, tuple):
            return self._experts > _MAX_RECORD
        if isinstance(value, (list, deque)):
            return True
        first = min(children)
        is_mapping = isinstance(value, Mapping) and pattern == "[*]"
        return max(children) == first + self._experts - 1 and (first == 0 or is_mapping)

    def _is_outside(self, value: Any) -> bool:
        """Return True for process-wide objects, objects that contain a root, and registries of layers."""
        if id(value) in self._roots:
            return False
        if isinstance(value, torch.nn.Module):
            return any(id(module) in self._roots for module in value.modules())
        if isinstance(value, (Mapping, list, tuple)):
            return self._is_registry(value)
        inside = (set, frozenset, types.FunctionType, types.MethodType, deque, functools.partial, weakref.ref)
        if isinstance(value, (*inside, np.ndarray, torch.Tensor)):
            return False
        module = type(value).__module__ or ""
        return any(module == name or module.startswith(f"{name}.") for name in _FOREIGN)

    def _is_registry(self, value: Any) -> bool:
        """Return True for a container that holds a root and other modules."""
        try:
            children = list(value.values() if isinstance(value, Mapping) else value)
        except Exception:  # a mapping that computes its values on demand
            return True
        modules = [child for child in children if isinstance(child, torch.nn.Module)]
        roots = [child for child in children if id(child) in self._roots]
        return bool(roots) and any(id(module) not in self._roots for module in modules)


def _unnumbered_children(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values held by a callable, a weak reference or a set, each with its path relative to the holder."""
    if isinstance(value, functools.partial):
        yield ".func", value.func
        yield ".args", value.args
        yield ".keywords", value.keywords
    elif isinstance(value, types.MethodType):
        yield ".self", value.__self__
        yield ".func", value.__func__
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield f".{name}", cell.cell_contents
            except ValueError:  # not assigned yet
                continue
        yield ".defaults", value.__defaults__
        yield ".keyword_defaults", value.__kwdefaults__
        if "__wrapped__" in vars(value):
            yield ".wrapped", vars(value)["__wrapped__"]
    elif isinstance(value, weakref.ref):
        yield "()", value()
    elif isinstance(value, (set, frozenset)):
        for index, child in enumerate(value):
            yield f"{{{index}}}", child


def _numbered_children(value: Any) -> dict[str, dict[int, tuple[str, Any]]]:
    """Return an object's elements and attributes, grouped by their path with the number replaced by ``*``.

    Returns
    -------
    dict
        For each such path, a dictionary that maps the number, or 0 if there is none, to the full path and the value.
        Paths with several numbers are not changed.
    """
    groups: dict[str, dict[int, tuple[str, Any]]] = {}
    for name, key, child in _elements_and_attributes(value):
        if _SKIPPED_NAMES.search(str(key)):
            continue
        text = str(key)
        numbers = re.findall(r"\d+", text)
        pattern = re.sub(r"\d+", "*", text) if len(numbers) == 1 else text
        pattern = name.replace(text, pattern)
        number = int(numbers[-1]) if len(numbers) == 1 else 0
        members = groups.setdefault(pattern, {})
        if number in members:  # for example x1 and x01
            members = groups.setdefault(name, {})
        members[number] = (name, child)
    return groups


def _elements_and_attributes(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the path, key and value of each of an object's elements and attributes."""
    if isinstance(value, Mapping):
        try:
            items = list(value.items())
        except Exception:  # a mapping that computes its values on demand
            return
        for key, child in items:
            yield f"[{key!r}]", key, child
        if type(value) is dict:
            return
    elif isinstance(value, (list, tuple, deque)):
        for index, child in enumerate(value):
            yield f"[{index}]", index, child
        if type(value) in (list, tuple, deque):
            return
    elif isinstance(value, np.ndarray) and value.dtype == object:
        for index, child in enumerate(value.ravel().tolist()):
            yield f"[{index}]", index, child
        return
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial, weakref.ref, np.ndarray)):
        return
    yield from _attributes(value)


def _attributes(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the path, name and value of each of an object's attributes.

    These are its instance attributes and slots, and those class attributes that are tensors or containers.
    """
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        for name, child in list(attributes.items()):
            if isinstance(value, torch.nn.Module) and name in ("_parameters", "_buffers", "_modules"):
                for inner, tensor in list(child.items()):
                    yield f".{inner}", inner, tensor
            else:
                yield f".{name}", name, child
    for kind in type(value).__mro__:
        for name in _slots_of(kind):
            child = getattr(value, name, None)
            if child is not None:
                yield f".{name}", name, child
        if kind.__module__.partition(".")[0] in ("builtins", "torch", "typing", "enum", "collections", "abc"):
            continue
        for name, child in list(vars(kind).items()):
            if isinstance(child, (torch.Tensor, np.ndarray, list, dict)) and not name.startswith("__"):
                yield f".{name}", name, child


def _slots_of(kind: type) -> Sequence[str]:
    """Return the names in a class's ``__slots__``, with private names mangled as in Python."""
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    private = kind.__name__.lstrip("_")
    return [
        f"_{private}{name}" if name.startswith("__") and not name.endswith("__") else name
        for name in names
        if name not in ("__dict__", "__weakref__")
    ]
