"""Check that the agent can balance an engine's release with its options.

An adapter replaces private functions of its engine, and relies on others. For each tested release, ``known.json``
records where these functions are, their parameters and a fingerprint of their bodies. If a release has changed one of
them, the adapter refuses it and names the function. It checks all functions before it patches any of them.
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
    """An engine, release, model or combination of options that the agent cannot balance.

    Releases are checked before the engine is patched, and options before or while it loads its model. Only faults that
    the first forward passes reveal are raised later.

    Parameters
    ----------
    subject
        The release, option or tensor at fault; the beginning of a sentence.
    reason
        Reason why it cannot be balanced; a sentence without its full stop.
    remedy
        Way to start the engine with the agent; the beginning of a sentence.
    """

    def __init__(self, subject: str, reason: str, remedy: str) -> None:
        super().__init__(
            f"eplb-agent cannot balance this engine: {subject}. {reason}. {remedy}, "
            "or unset EPLB_AGENT_SERVICE to serve without the agent."
        )


def refuse(cases: Iterable[tuple[bool, str, str, str]]) -> None:
    """Raise ``UnsupportedEngineError`` for the first case that applies.

    Parameters
    ----------
    cases
        Tuples of a condition, which is True if the case applies, and the arguments of the error.
    """
    for applies, subject, reason, remedy in cases:
        if applies:
            raise UnsupportedEngineError(subject, reason, remedy)


def refuse_cut_models(vllm_config: Any) -> None:
    """Refuse options that split a model so that its experts cannot be moved.

    Parameters
    ----------
    vllm_config
        vLLM's ``VllmConfig``.
    """
    stages = vllm_config.parallel_config.pipeline_parallel_size
    refuse(
        [
            (
                vllm_config.lora_config is not None,
                "LoRA (--enable-lora)",
                "LoRA weights are split by rank and slot, so they would stay behind when their expert moves",
                "Start without --enable-lora",
            ),
            (
                stages > 1,
                f"pipeline parallelism (--pipeline-parallel-size {stages})",
                "Each stage would need its own deployment, but all stages have the same deployment name",
                "Start with --pipeline-parallel-size 1 and more tensor-parallel or data-parallel ranks",
            ),
        ]
    )


@dataclass(frozen=True)
class Function:
    """A function of one engine release.

    Parameters
    ----------
    parameters
        Names of its parameters, in order.
    source
        Fingerprint of its body.
    """

    parameters: tuple[str, ...]
    source: str


KnownReleases: TypeAlias = Mapping[str, Mapping[str, Function]]
"""Functions that an adapter patches or relies on, by release and then by target (``module:qualified.name``)."""

Patches: TypeAlias = Mapping[str, int | None]
"""Number of leading parameters that each patch of an adapter names, by the target that it replaces.

The patch passes all further arguments on unchanged. ``None`` if the patch takes exactly the known parameters.
"""


@dataclass(frozen=True)
class _Mismatch:
    """A function of the installed engine that differs from the known one.

    Parameters
    ----------
    target
        The function's target.
    reason
        Predicate for a message, such as "is missing".
    fatal
        True if the adapter's patch of the function would no longer fit.
    """

    target: str
    reason: str
    fatal: bool


def read_known(package: str) -> KnownReleases:
    """Return the releases that the ``known.json`` of an adapter's package lists."""
    releases = json.loads((resources.files(package) / "known.json").read_text())
    return {
        release: {
            target: Function(tuple(entry["parameters"]), entry["source"])
            for target, entry in functions.items()
        }
        for release, functions in releases.items()
    }


def _resolve(target: str) -> Callable[..., Any]:
    """Import the function at a target, without the wrapper of a class method, static method or property."""
    module, _, qualified_name = target.partition(":")
    value: Any = importlib.import_module(module)
    for name in qualified_name.split("."):
        value = inspect.getattr_static(value, name)
    if isinstance(value, (classmethod, staticmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    return cast(Callable[..., Any], value)


def fingerprint_of_tree(tree: ast.Module) -> str:
    """Return a fingerprint of the single function in a module: 16 hexadecimal digits.

    Comments, layout and docstrings do not affect it. Docstrings are removed from ``tree`` in place.
    """
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.FunctionDef, ast.ClassDef))
            and ast.get_docstring(node, clean=False) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]


def fingerprint(target: str) -> Function:
    """Return the function at ``target`` in the installed engine.

    Raises ``ImportError`` or ``AttributeError`` if the engine has no such function.
    """
    function = _resolve(target)
    source = fingerprint_of_tree(ast.parse(textwrap.dedent(inspect.getsource(function))))
    return Function(tuple(inspect.signature(function).parameters), source)


def mismatches(functions: Mapping[str, Function], patches: Patches) -> list[_Mismatch]:
    """Return the ``functions`` that differ in the installed engine."""
    results = (_mismatch(target, expected, patches) for target, expected in functions.items())
    return [mismatch for mismatch in results if mismatch is not None]


def _mismatch(target: str, expected: Function, patches: Patches) -> _Mismatch | None:
    try:
        actual = fingerprint(target)
    except (ImportError, AttributeError) as error:
        return _Mismatch(target, f"is missing ({error})", fatal=target in patches)
    if actual.parameters != expected.parameters:
        actual_list = ", ".join(actual.parameters)
        expected_list = ", ".join(expected.parameters)
        # For a function without a patch, the slice is empty, so its parameters are never fatal.
        leading = slice(patches.get(target, 0))
        fatal = actual.parameters[leading] != expected.parameters[leading]
        return _Mismatch(target, f"takes ({actual_list}) instead of ({expected_list})", fatal)
    if actual.source != expected.source:
        return _Mismatch(
            target, f"has a different body ({actual.source} instead of {expected.source})", fatal=False
        )
    return None


def require(
    engine: str, version: str, known: KnownReleases, patches: Patches, *, allow_unverified: bool = False
) -> str | None:
    """Check that the functions of an installed engine are those that the adapter was tested with.

    Parameters
    ----------
    engine
        Name of the engine, for messages.
    version
        Its installed version. If its release is unknown, its functions are compared with the nearest known release.
    known
        Functions of all known releases.
    patches
        Patches of the adapter.
    allow_unverified
        True to accept every difference, and an unknown release, as long as all patches still fit.

    Returns
    -------
    str or None
        Warning that names the accepted differences; ``None`` if the release is known and no function differs.

    Raises
    ------
    UnsupportedEngineError
        If a difference or an unknown release is not accepted.
    """
    release = release_of(version, known)
    compared = nearest(version, known)
    differences = mismatches(known[compared], patches)
    if release == compared and not differences:
        return None
    reason = f"The functions that the agent relies on have not changed since {compared}"
    if differences:
        reason = f"Functions that the agent relies on have changed since {compared}: {_describe(differences)}"
    if release != compared:
        reason = f"The agent was never tested with this release. {reason}"
    fatal = [mismatch for mismatch in differences if mismatch.fatal]
    if allow_unverified and not fatal:
        return f"{engine} {version} is served unverified: {reason[0].lower()}{reason[1:]}"
    remedy = f"Install {engine} {', '.join(sorted(known, key=_order))} or a newer agent"
    if fatal:
        reason += f". The agent's patches no longer fit {', '.join(mismatch.target for mismatch in fatal)}"
    else:
        remedy += ", set EPLB_AGENT_ALLOW_UNVERIFIED_ENGINE=1 to accept the risk"
    raise UnsupportedEngineError(f"{engine} {version}", reason, remedy)


def release_of(version: str, known: KnownReleases) -> str:
    """Return the release of a version: the version itself if it is known, else its first two numbers.

    Examples
    --------
    >>> known = {"0.5.23": {}, "0.32": {}}
    >>> release_of("0.5.23+cu13", known)
    '0.5.23'
    >>> release_of("0.32.1", known)
    '0.32'
    """
    public = version.split("+", maxsplit=1)[0]
    return public if public in known else ".".join(public.split(".")[:2])


def nearest(version: str, known: KnownReleases) -> str:
    """Return the known release of a version, or the nearest one if its release is unknown.

    If two known releases are equally near, the newer one is returned.

    Examples
    --------
    >>> known = {"0.23": {}, "0.33": {}}
    >>> nearest("0.27.3", known)
    '0.23'
    >>> nearest("0.28.0", known)
    '0.33'
    """
    release = release_of(version, known)
    if release in known:
        return release
    return min(known, key=lambda candidate: (abs(_order(candidate) - _order(version)), -_order(candidate)))


def _order(release: str) -> int:
    """Return a sort key for releases and versions: their first three numbers, as one integer."""
    major, minor, patch = ([*map(int, re.findall(r"\d+", release)), 0, 0, 0])[:3]
    return (major * 1000 + minor) * 1000 + patch


def _describe(differences: Sequence[_Mismatch]) -> str:
    return "; ".join(f"{mismatch.target} {mismatch.reason}" for mismatch in differences)
