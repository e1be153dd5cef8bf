"""The API reference lists every name that the examples import and documents it in numpydoc sections.

A function without parameters may describe its result in its summary line.
"""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

import eplb_service

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reference/api.md").read_text()
ENTRY = re.compile(r"^::: (\S+)$(?:\n    options:\n      members: \[(.*)\]$)?", re.MULTILINE)
MEMBERS = {name: members.split(", ") if members else None for name, members in ENTRY.findall(PAGE)}
NAMES = list(MEMBERS)


def documented():
    """Yield the page's functions and the methods of its classes: the listed methods, or all public ones."""
    for name, members in MEMBERS.items():
        module, _, attribute = name.rpartition(".")
        thing = getattr(importlib.import_module(module), attribute)
        if not inspect.isclass(thing):
            yield name, thing
            continue
        for method, member in vars(thing).items():
            function = inspect.unwrap(getattr(member, "__func__", member))
            listed = method in members if members else not method.startswith("_")
            if inspect.isfunction(function) and listed:
                yield f"{name}.{method}", function


def section(function, heading):
    text = inspect.getdoc(function) or ""
    return re.search(rf"^{heading}\n-+\n(.*?)(?=\n\n\w+\n-+\n|\Z)", text, re.DOTALL | re.MULTILINE)


def parameters_of(function):
    return [name for name in inspect.signature(function).parameters if name not in {"self", "cls"}]


FUNCTIONS = dict(documented())


def examples():
    """Yield the path and source of each Python example in the docs."""
    for path in DOCS.rglob("*.py"):
        yield path, path.read_text()
    for path in DOCS.rglob("*.md"):
        for block in re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE):
            yield path, block


def imported(source):
    """Yield the qualified names that ``source`` imports from this project."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (
            name
            for name in names
            if name.partition(".")[0] in {"eplb_core", "eplb_lab", "eplb_service", "worker_agent"}
        )


def test_examples_import_only_documented_names():
    public = {*NAMES, *(f"eplb_service.{name}" for name in dir(eplb_service))}
    imports = {(path.name, name) for path, source in examples() for name in imported(source)}
    assert len(imports) > 10
    assert {(path, name) for path, name in imports if name not in public} == set()


def test_the_reference_lists_the_main_names():
    expected = {"solve", "Placement", "Agent", "AgentSettings", "LiveLayer", "open_trace"}
    assert expected <= {name.rpartition(".")[2] for name in NAMES}
    assert len(FUNCTIONS) > 12


@pytest.mark.parametrize("name", FUNCTIONS)
def test_parameters_results_and_errors_are_documented_in_their_sections(name):
    function = FUNCTIONS[name]
    assert not re.search(r"\bRaises ``", inspect.getdoc(function)), "errors belong under Raises"
    if not parameters_of(function):
        return
    parameters = section(function, "Parameters")
    assert parameters, "no Parameters section"
    lines = re.findall(r"^(\S.*)$", parameters[1], re.MULTILINE)
    assert set(parameters_of(function)) <= {entry for line in lines for entry in re.split(r"[, *]+", line)}
    if inspect.signature(function).return_annotation not in (None, "None"):
        assert section(function, "Returns"), "no Returns section"
