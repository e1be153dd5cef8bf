"""Search everything that an object reaches: attributes, containers, closures, wrappers, submodules."""

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
DEEPEST = 16

_LEAVES = (
    *(type(None), str, bytes, bytearray, bool, complex, type, enum.Enum, re.Pattern),
    *(types.ModuleType, types.CodeType, types.BuiltinFunctionType, types.GeneratorType),
    *(torch.dtype, torch.device, torch.Size, torch.Generator),
)
"""Types whose values hold no tensors, or only tensors that the whole process shares."""

_MAX_RECORD = 4
"""Tuples up to this length are taken for records of unlike values, not for one value per expert."""

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
"""Modules whose objects belong to the process, to its groups or to its configuration, not to a layer."""

_OTHER_PARTS = re.compile(r"^_?(gate|router|topk)$|shared_expert|_hooks(_|$)|weight_loader$|^__")
"""Names of attributes that lead to other parts of the model, or back to the loader."""


@dataclass(frozen=True)
class Found:
    """A value, how it is reached, and its place if it is one of several like parts.

    ``group`` is the path with the part's number left out, ``member`` that number; ``None`` without one.
    """

    path: str
    value: Any
    group: str | None = None
    member: int | None = None

    @property
    def name(self) -> str:
        """The last name in the path; the number of an element is none."""
        return last_name(self.path)


def last_name(path: str) -> str:
    """Return the last identifier in ``path``, or an empty text."""
    names = re.findall(r"[A-Za-z_]\w*", path)
    return names[-1] if names else ""


class Search:
    """A breadth-first search from ``roots`` for tensors, arrays and numbers.

    A list, a mapping or attributes that number ``parts`` like parts are a group, so that a tensor per expert is known
    as one of several. The search does not enter the rest of the model: objects that contain a root. It ends after
    ``MAX_OBJECTS`` objects or ``MAX_SECONDS``. ``cut`` is then the path that it had reached.
    """

    def __init__(self, roots: Mapping[str, Any], parts: int) -> None:
        self.cut: str | None = None
        self._parts = parts
        self._roots = {id(root) for root in roots.values()}
        self._seen: dict[int, Any] = {}
        self._queue: deque[tuple[Found, int]] = deque((Found(name, root), 0) for name, root in roots.items())

    def __iter__(self) -> Iterator[Found]:
        """Yield each tensor, array and number once, the nearest first."""
        deadline = time.monotonic() + MAX_SECONDS
        while self._queue:
            found, depth = self._queue.popleft()
            value = found.value
            if isinstance(value, (int, float)) and not isinstance(value, (bool, enum.Enum)):
                yield found
                continue
            holds_numbers = isinstance(value, (torch.Tensor, np.ndarray))
            if id(value) in self._seen:
                if holds_numbers and found.group is not None:
                    yield found
                continue
            if isinstance(value, _LEAVES) or self._is_elsewhere(value):
                continue
            self._seen[id(value)] = value
            if holds_numbers:
                yield found
            if depth >= DEEPEST or len(self._seen) > MAX_OBJECTS or time.monotonic() > deadline:
                self.cut = found.path
                if depth >= DEEPEST:
                    continue
                return
            for name, child in _children(value):
                if not _OTHER_PARTS.search(name.lstrip(".")):
                    self._enqueue(found, name, child, depth)
            self._enqueue_parts(found, value, depth)

    def _enqueue(self, parent: Found, name: str, child: Any, depth: int) -> None:
        path = f"{parent.path}{name}".lstrip(".")
        group = None if parent.group is None else f"{parent.group}{name}"
        self._queue.append((Found(path, child, group, parent.member), depth + 1))

    def _enqueue_parts(self, parent: Found, value: Any, depth: int) -> None:
        """Enqueue numbered children. If there is one child per part, they become members of one group."""
        for pattern, children in _numbered(value).items():
            is_group = parent.group is None and self._are_parts(value, pattern, children)
            for number, (name, child) in children.items():
                path = f"{parent.path}{name}".lstrip(".")
                if is_group:
                    found = Found(path, child, f"{parent.path}{pattern}".lstrip("."), number)
                else:
                    group = None if parent.group is None else f"{parent.group}{name}"
                    found = Found(path, child, group, parent.member)
                self._queue.append((found, depth + 1))

    def _are_parts(self, value: Any, pattern: str, children: Mapping[int, Any]) -> bool:
        """Return True if there is one child for each part, and only numbers distinguish them."""
        if len(children) != self._parts or self._parts < 2 or "*" not in pattern:
            return False
        if isinstance(value, tuple):
            return self._parts > _MAX_RECORD
        if isinstance(value, (list, deque)):
            return True
        first = min(children)
        is_mapping = isinstance(value, Mapping) and pattern == "[*]"
        return max(children) == first + self._parts - 1 and (first == 0 or is_mapping)

    def _is_elsewhere(self, value: Any) -> bool:
        """Return True for objects of the process, for what contains a root, and for registries of layers."""
        if id(value) in self._roots:
            return False
        if isinstance(value, torch.nn.Module):
            return any(id(module) in self._roots for module in value.modules())
        if isinstance(value, (Mapping, list, tuple)):
            return self._is_registry(value)
        known = (set, frozenset, types.FunctionType, types.MethodType, deque, functools.partial, weakref.ref)
        if isinstance(value, (*known, np.ndarray, torch.Tensor)):
            return False
        module = type(value).__module__ or ""
        return any(module == name or module.startswith(f"{name}.") for name in _FOREIGN)

    def _is_registry(self, value: Any) -> bool:
        """Return True for a container that holds a root beside other modules."""
        try:
            children = list(value.values() if isinstance(value, Mapping) else value)
        except Exception:  # a mapping that is made on demand
            return True
        modules = [child for child in children if isinstance(child, torch.nn.Module)]
        roots = [child for child in children if id(child) in self._roots]
        return bool(roots) and any(id(module) not in self._roots for module in modules)


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the named parts of an object."""
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


def _numbered(value: Any) -> dict[str, dict[int, tuple[str, Any]]]:
    """Return an object's other parts by their name without its number; each with its name and value, by number."""
    groups: dict[str, dict[int, tuple[str, Any]]] = {}
    for name, key, child in _named(value):
        if _OTHER_PARTS.search(str(key)):
            continue
        text = str(key)
        numbers = re.findall(r"\d+", text)
        pattern = re.sub(r"\d+", "*", text) if len(numbers) == 1 else text
        pattern = name.replace(text, pattern)
        number = int(numbers[-1]) if len(numbers) == 1 else 0
        members = groups.setdefault(pattern, {})
        if number in members:  # several parts have the same number
            members = groups.setdefault(name, {})
        members[number] = (name, child)
    return groups


def _named(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield path, key and value of the elements and attributes of an object."""
    if isinstance(value, Mapping):
        try:
            items = list(value.items())
        except Exception:  # a mapping that is made on demand
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
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict):
        for name, child in list(own.items()):
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
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    private = kind.__name__.lstrip("_")
    return [
        f"_{private}{name}" if name.startswith("__") and not name.endswith("__") else name
        for name in names
        if name not in ("__dict__", "__weakref__")
    ]
