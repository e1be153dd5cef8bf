"""Every function and method of the API reference documents its parameters, result and errors in numpydoc sections.

One without parameters may describe its result in its one sentence.
"""

import importlib
import inspect
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/reference/api.md").read_text()
NAMES = re.findall(r"^::: (\S+)$", PAGE, re.MULTILINE)


def documented():
    """Functions of the page, and the public methods of its classes that they define themselves."""
    for name in NAMES:
        module, _, attribute = name.rpartition(".")
        thing = getattr(importlib.import_module(module), attribute)
        if not inspect.isclass(thing):
            yield name, thing
            continue
        for method, member in vars(thing).items():
            function = inspect.unwrap(getattr(member, "__func__", member))
            if inspect.isfunction(function) and not method.startswith("_"):
                yield f"{name}.{method}", function


def section(function, heading):
    text = inspect.getdoc(function) or ""
    return re.search(rf"^{heading}\n-+\n(.*?)(?=\n\n\w+\n-+\n|\Z)", text, re.DOTALL | re.MULTILINE)


def parameters_of(function):
    return [name for name in inspect.signature(function).parameters if name not in {"self", "cls"}]


FUNCTIONS = dict(documented())


def test_the_reference_has_what_it_should():
    expected = {"solve", "Placement", "Agent", "AgentSettings", "LiveLayer", "open_trace"}
    assert expected <= {name.rpartition(".")[2] for name in NAMES}
    assert len(FUNCTIONS) > 12


@pytest.mark.parametrize("name", FUNCTIONS)
def test_parameters_results_and_errors_have_their_sections(name):
    function = FUNCTIONS[name]
    assert not re.search(r"\bRaises ``", inspect.getdoc(function)), "errors belong under Raises"
    if not parameters_of(function):
        return
    found = section(function, "Parameters")
    assert found, "no Parameters section"
    lines = re.findall(r"^(\S.*)$", found[1], re.MULTILINE)
    assert set(parameters_of(function)) <= {entry for line in lines for entry in re.split(r"[, *]+", line)}
    if inspect.signature(function).return_annotation not in (None, "None"):
        assert section(function, "Returns"), "no Returns section"
