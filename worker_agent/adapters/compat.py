"""Check that the agent supports an engine's release and options.

An adapter replaces some of its engine's private functions and relies on others. For each tested release, ``known.json``
records where these functions are defined, their parameters and a fingerprint of their bodies. If any of them has
changed, the adapter refuses the release, and the error message names the function. All functions are checked before any
of them is patched.
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
    """Raised for an engine, release, model or combination of options that the agent does not support.

    The release is checked before the engine is patched, and the options before or while the model is loaded. Only
    problems that become visible in the first forward passes are raised later.

    Parameters
    ----------
    subject
        The release, option or tensor at fault, phrased as the start of a sentence.
    reason
        Reason why the engine cannot be balanced, phrased as a sentence without its full stop.
    remedy
        Change that lets the engine start with the agent, phrased as the start of a sentence.
    """

    def __init__(self, subject: str, reason: str, remedy: str) -> None:
        self.subject = subject
        self.reason = reason
        super().__init__(
            f"eplb-agent cannot balance this engine: {subject}. {reason}. {remedy}, "
            "or unset EPLB_AGENT_SERVICE and EPLB_AGENT_MODE to serve without the agent."
        )


def refuse(cases: Iterable[tuple[bool, str, str, str]]) -> None:
    """Raise ``UnsupportedEngineError`` for the first case that applies.

    Parameters
    ----------
    cases
        Tuples ``(applies, subject, reason, remedy)``. The last three are the arguments of the error.
    """
    for applies, subject, reason, remedy in cases:
        if applies:
            raise UnsupportedEngineError(subject, reason, remedy)


def refuse_split_models(vllm_config: Any) -> None:
    """Refuse options that split the model in a way that prevents its experts from being moved.

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
    """A function in one engine release.

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
"""Number of leading parameters that each of an adapter's patches declares, by patched target.

The patch forwards all other arguments unchanged. ``None`` means that the patch takes exactly the known parameters.
"""


@dataclass(frozen=True)
class _Mismatch:
    """A function in the installed engine that differs from the known one.

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
    """Return the releases listed in the ``known.json`` of an adapter's package."""
    releases = json.loads((resources.files(package) / "known.json").read_text())
    return {
        release: {
            target: Function(tuple(entry["parameters"]), entry["source"])
            for target, entry in functions.items()
        }
        for release, functions in releases.items()
    }


def _resolve(target: str) -> Callable[..., Any]:
    """Import the function at a target, and unwrap it if it is a class method, static method or property."""
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
    """Return the fingerprint of the only function in a module, as 16 hexadecimal digits.

    Comments, formatting and docstrings do not affect it. Docstrings are removed from ``tree`` in place.
    """
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.FunctionDef, ast.ClassDef))
            and ast.get_docstring(node, clean=False) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]


def fingerprint(target: str) -> Function:
    """Return the parameters and the fingerprint of the function at ``target`` in the installed engine.

    Raises ``ImportError`` or ``AttributeError`` if the engine has no such function.
    """
    function = _resolve(target)
    source = fingerprint_of_tree(ast.parse(textwrap.dedent(inspect.getsource(function))))
    return Function(tuple(inspect.signature(function).parameters), source)


def mismatches(functions: Mapping[str, Function], patches: Patches) -> list[_Mismatch]:
    """Compare ``functions`` with those of the installed engine, and return the differences."""
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
        # The slice is empty for a function that is not patched, so its parameters may differ.
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
    """Check that the installed engine's functions match those that the adapter was tested with.

    Parameters
    ----------
    engine
        Name of the engine, for messages.
    version
        Installed version of the engine. If its release is unknown, its functions are compared with those of the nearest
        known release.
    known
        Functions of all known releases.
    patches
        Patches of the adapter.
    allow_unverified
        True to accept an unknown release and any differences, as long as all patches still fit.

    Returns
    -------
    str or None
        Warning that lists the accepted differences, or ``None`` if the release is known and no function differs.

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
        reason = f"The agent has not been tested with this release. {reason}"
    fatal = [mismatch for mismatch in differences if mismatch.fatal]
    if allow_unverified and not fatal:
        return f"{engine} {version} is unverified: {reason[0].lower()}{reason[1:]}"
    remedy = f"Install {engine} {', '.join(sorted(known, key=_order))} or a newer agent"
    if fatal:
        reason += f". The agent's patches no longer fit {', '.join(mismatch.target for mismatch in fatal)}"
    else:
        remedy += ", set EPLB_AGENT_ALLOW_UNVERIFIED_ENGINE=1 to accept the risk"
    raise UnsupportedEngineError(f"{engine} {version}", reason, remedy)


def release_of(version: str, known: KnownReleases) -> str:
    """Return the known release that a version belongs to, or the version's own components if there is none.

    A version belongs to the known release whose components it begins with; if there are several, to the longest.
    Suffixes for pre-releases, post-releases, development and local versions are ignored.

    Examples
    --------
    >>> known = {"0.5.23": {}, "0.32": {}}
    >>> release_of("0.5.23.post1+cu13", known), release_of("0.32.1rc1", known)
    ('0.5.23', '0.32')
    >>> release_of("0.5.24", known)
    '0.5.24'
    """
    numbers = _numbers(version)
    # Pad with zeros, so that a version without trailing zeros (1 for 1.0) also matches its release.
    owners = [name for name in known if (*numbers, 0, 0, 0, 0)[: len(_numbers(name))] == _numbers(name)]
    return max(owners, key=lambda name: len(_numbers(name)), default=".".join(map(str, numbers)))


def nearest(version: str, known: KnownReleases) -> str:
    """Return the release that a version belongs to if it is known, or else the nearest known release.

    If two known releases are equally near, return the newer one.

    Examples
    --------
    >>> known = {"0.23": {}, "0.33": {}}
    >>> nearest("0.27.3", known)
    '0.23'
    >>> nearest("0.28.0", known)
    '0.33'
    >>> nearest("0.34.0.dev12", known)
    '0.33'
    """
    release = release_of(version, known)
    if release in known:
        return release
    return min(known, key=lambda candidate: (abs(_order(candidate) - _order(version)), -_order(candidate)))


def _order(release: str) -> int:
    """Return a sort key for a release or version: its first four components, combined into one integer."""
    major, minor, patch, fourth = (*_numbers(release), 0, 0, 0, 0)[:4]
    return ((major * 1000 + minor) * 1000 + patch) * 1000 + fourth


def _numbers(version: str) -> tuple[int, ...]:
    """Return the components of a version without its suffixes; empty if it does not begin with a number.

    Examples
    --------
    >>> _numbers("0.5.23.post1"), _numbers("v0.30.0rc2"), _numbers("0.25.1.dev20261101+cu13"), _numbers("dev")
    ((0, 5, 23), (0, 30, 0), (0, 25, 1), ())
    """
    matched = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(map(int, matched[1].split("."))) if matched else ()


def _describe(differences: Sequence[_Mismatch]) -> str:
    return "; ".join(f"{mismatch.target} {mismatch.reason}" for mismatch in differences)
