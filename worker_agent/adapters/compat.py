"""Engines that can be balanced: as far as an adapter knows their functions, and their options allow it.

An adapter replaces or relies on private functions of its engine. Of each it is known, by release, where it is, what
arguments it takes and what its body was when the adapter was tested. A release that moves one is refused with that
function's name, instead of being patched half.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import json
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeAlias, cast


class UnsupportedEngineError(RuntimeError):
    """An engine, version or combination of options that the agent cannot balance; says what, why and what to do.

    Raised while the engine starts, before anything of it is patched.
    """

    def __init__(self, what: str, why: str, remedy: str) -> None:
        super().__init__(
            f"eplb-agent cannot balance this engine: {what}. {why}. {remedy}, "
            "or unset EPLB_AGENT_SERVICE to serve without it."
        )


def refuse(cases: Iterable[tuple[bool, str, str, str]]) -> None:
    """Raise ``UnsupportedEngineError`` for the first case that applies: condition, what, why and remedy of each."""
    for applies, what, why, remedy in cases:
        if applies:
            raise UnsupportedEngineError(what, why, remedy)


@dataclass(frozen=True)
class Function:
    """A function as one release has it: its parameters' names in order, and the fingerprint of its body."""

    parameters: tuple[str, ...]
    source: str


KnownReleases: TypeAlias = Mapping[str, Mapping[str, Function]]
"""By release, by target (``module:qualified.name``): the functions that an adapter patches or relies on."""


@dataclass(frozen=True)
class _Mismatch:
    """A function that is not as an adapter knows it; ``fatal`` where its place or its arguments changed."""

    target: str
    reason: str
    fatal: bool


def read_known(package: str) -> KnownReleases:
    """Return the releases that ``known.json`` of an adapter's package lists."""
    releases = json.loads((resources.files(package) / "known.json").read_text())
    return {
        release: {
            target: Function(tuple(entry["parameters"]), entry["source"])
            for target, entry in functions.items()
        }
        for release, functions in releases.items()
    }


def _resolve(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    if isinstance(found, (classmethod, staticmethod)):
        found = found.__func__
    elif isinstance(found, property):
        found = found.fget
    return cast(Callable[..., Any], found)


def fingerprint_of_tree(tree: ast.Module) -> str:
    """Return 16 hexadecimal digits of the function that a module holds alone; its docstrings are removed in place.

    Comments, layout and docstrings do not count.
    """
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.FunctionDef, ast.ClassDef))
            and ast.get_docstring(node, clean=False) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]


def fingerprint(target: str) -> Function:
    """Return the function at ``target`` as the engine that is installed here has it.

    Raises ``ImportError`` or ``AttributeError`` where it is not there.
    """
    function = _resolve(target)
    source = fingerprint_of_tree(ast.parse(textwrap.dedent(inspect.getsource(function))))
    return Function(tuple(inspect.signature(function).parameters), source)


def mismatches(functions: Mapping[str, Function]) -> list[_Mismatch]:
    """Return those of ``functions`` that the engine installed here does not have as they are known."""
    found = (_mismatch(target, expected) for target, expected in functions.items())
    return [mismatch for mismatch in found if mismatch is not None]


def _mismatch(target: str, expected: Function) -> _Mismatch | None:
    try:
        found = fingerprint(target)
    except (ImportError, AttributeError) as error:
        return _Mismatch(target, f"is not there ({error})", fatal=True)
    if found.parameters != expected.parameters:
        took, takes = ", ".join(expected.parameters), ", ".join(found.parameters)
        return _Mismatch(target, f"takes ({takes}), known is ({took})", fatal=True)
    if found.source != expected.source:
        return _Mismatch(
            target, f"has another body ({found.source}, known is {expected.source})", fatal=False
        )
    return None


def require(engine: str, version: str, known: KnownReleases, *, allow_unverified: bool = False) -> None:
    """Check ``engine`` of ``version`` against its ``known`` release.

    With ``allow_unverified`` other bodies are let through, and so is an unknown release, held against the newest known
    one.

    Raises ``UnsupportedEngineError`` where the release is unknown, or a function is missing, takes other arguments or
    has another body.
    """
    release = release_of(version, known)
    compared = release if release in known else newest(known)
    found = mismatches(known[compared])
    fatal = any(mismatch.fatal for mismatch in found)
    if release == compared and not found:
        return
    if allow_unverified and not fatal:
        return
    why = f"Functions that the agent relies on changed: {_listed(found)}"
    if release != compared:
        changed = (
            f"what it relies on changed since {compared}: {_listed(found)}"
            if found
            else "nothing it relies on changed"
        )
        why = f"This release was never tried; {changed}"
    remedy = f"Install {engine} {', '.join(sorted(known, key=_order))} or a newer agent"
    if not fatal:
        remedy += ", set EPLB_AGENT_ALLOW_UNVERIFIED_ENGINE=1 to take the risk"
    raise UnsupportedEngineError(f"{engine} {version}", why, remedy)


def release_of(version: str, known: KnownReleases) -> str:
    """Return the name under which a version is known: its own, or else its first two numbers."""
    public = version.split("+", maxsplit=1)[0]
    return public if public in known else ".".join(public.split(".")[:2])


def newest(known: KnownReleases) -> str:
    """Return the highest of the known releases."""
    return max(known, key=_order)


def _order(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


def _listed(found: Sequence[_Mismatch]) -> str:
    return "; ".join(f"{mismatch.target} {mismatch.reason}" for mismatch in found)
