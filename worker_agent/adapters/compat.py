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
import re
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


def refuse_cut_models(vllm_config: Any) -> None:
    """Refuse what cuts a model in ways that experts cannot be moved under; ``vllm_config`` is a ``VllmConfig``."""
    stages = vllm_config.parallel_config.pipeline_parallel_size
    refuse(
        [
            (
                vllm_config.lora_config is not None,
                "LoRA (--enable-lora)",
                "Adapters of experts are cut by rank and slot, and stay behind when their expert moves",
                "Start without it",
            ),
            (
                stages > 1,
                f"pipeline parallelism (--pipeline-parallel-size {stages})",
                "Each stage would be a deployment of its own, but they would have one name",
                "Start with --pipeline-parallel-size 1, and more tensor or data parallel ranks",
            ),
        ]
    )


@dataclass(frozen=True)
class Function:
    """A function as one release has it: its parameters' names in order, and the fingerprint of its body."""

    parameters: tuple[str, ...]
    source: str


KnownReleases: TypeAlias = Mapping[str, Mapping[str, Function]]
"""By release, by target (``module:qualified.name``): the functions that an adapter patches or relies on."""

Patches: TypeAlias = Mapping[str, int | None]
"""By target of a function that an adapter patches: how many leading parameters its patch names, which hands all others
on; ``None`` where it takes exactly the known ones."""


@dataclass(frozen=True)
class _Mismatch:
    """A function that is not as an adapter knows it; ``fatal`` where a patch of it would no longer fit."""

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


def mismatches(functions: Mapping[str, Function], patches: Patches) -> list[_Mismatch]:
    """Return those of ``functions`` that the engine installed here does not have as they are known."""
    found = (_mismatch(target, expected, patches) for target, expected in functions.items())
    return [mismatch for mismatch in found if mismatch is not None]


def _mismatch(target: str, expected: Function, patches: Patches) -> _Mismatch | None:
    try:
        found = fingerprint(target)
    except (ImportError, AttributeError) as error:
        return _Mismatch(target, f"is not there ({error})", fatal=target in patches)
    if found.parameters != expected.parameters:
        took, takes = ", ".join(expected.parameters), ", ".join(found.parameters)
        named = slice(patches.get(target, 0))
        fatal = found.parameters[named] != expected.parameters[named]
        return _Mismatch(target, f"takes ({takes}), known is ({took})", fatal)
    if found.source != expected.source:
        return _Mismatch(
            target, f"has another body ({found.source}, known is {expected.source})", fatal=False
        )
    return None


def require(
    engine: str, version: str, known: KnownReleases, patches: Patches, *, allow_unverified: bool = False
) -> str | None:
    """Check ``engine`` of ``version`` against its ``known`` release, an unknown one against the nearest.

    With ``allow_unverified`` all is let through that the adapter's ``patches`` still fit, an unknown release included.

    Returns what differs and was let through, ``None`` where all is as known.

    Raises ``UnsupportedEngineError`` where the release is unknown or a function is another one.
    """
    release, compared = release_of(version, known), nearest(version, known)
    found = mismatches(known[compared], patches)
    if release == compared and not found:
        return None
    changed = f"changed since {compared}: {_listed(found)}" if found else f"changed since {compared}: nothing"
    if release == compared:
        why = f"Functions that the agent relies on {changed}"
    else:
        why = f"This release was never tried; of the functions that the agent relies on {changed}"
    fatal = [mismatch for mismatch in found if mismatch.fatal]
    if allow_unverified and not fatal:
        return f"{engine} {version} is served unverified: {why[0].lower()}{why[1:]}"
    remedy = f"Install {engine} {', '.join(sorted(known, key=_order))} or a newer agent"
    if fatal:
        why += f". The agent's own patches no longer fit {', '.join(one.target for one in fatal)}"
    else:
        remedy += ", set EPLB_AGENT_ALLOW_UNVERIFIED_ENGINE=1 to take the risk"
    raise UnsupportedEngineError(f"{engine} {version}", why, remedy)


def release_of(version: str, known: KnownReleases) -> str:
    """Return the name under which a version is known: its own, or else its first two numbers."""
    public = version.split("+", maxsplit=1)[0]
    return public if public in known else ".".join(public.split(".")[:2])


def nearest(version: str, known: KnownReleases) -> str:
    """Return the known release that a version is of, or else is nearest to; the newer one of two as near."""
    release = release_of(version, known)
    if release in known:
        return release
    return min(known, key=lambda one: (abs(_order(one) - _order(version)), -_order(one)))


def _order(release: str) -> int:
    """Rank releases and versions by their first three numbers."""
    major, minor, patch = ([*map(int, re.findall(r"\d+", release)), 0, 0, 0])[:3]
    return (major * 1000 + minor) * 1000 + patch


def _listed(found: Sequence[_Mismatch]) -> str:
    return "; ".join(f"{mismatch.target} {mismatch.reason}" for mismatch in found)
