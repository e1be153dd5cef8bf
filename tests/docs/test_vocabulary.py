"""Docs, deployment files, help texts and the packages' own texts use the glossary's terms and plain English."""

import re
from pathlib import Path

import pytest

from tools.docs_reference.command_line import cli_page
from tools.docs_reference.settings import settings_page

ROOT = Path(__file__).parents[2]

BETTER = {
    r"\b(?:told|tells?)\b": "reported, shown, given",
    r"\bwords\b": "message, reason",
    r"\b(?:anew|from nothing)\b": "from scratch",
    r"\bcan not\b": "cannot",
    r"\bstands?\b(?!-| for\b| still\b)": "is, resides",
    r"\bone each CPU\b": "one per CPU",
    r"\b(?:slots|experts|tokens|steps|counts|choices|row|file|line) a (?:layer|rank|step|slot|CPU)\b": "per",
    r"\bcop(?:y|ies) of (?:an|each|the|hot|its) experts?\b": "replica",
    r"\b(?:near (?:tables|candidates)|unrest|telling|arbiter|plan[_ ]?life|yardman|set out)\b": "the glossary's term",
}

OTHERS_NAMES = "worker_agent/swap/link_guard.py"
"""Its words have 32 bits."""
ANY = re.compile("|".join(BETTER), re.IGNORECASE)


def texts():
    files = [
        *ROOT.glob("*.md"),
        ROOT / "pyproject.toml",
        ROOT / "Makefile",
        *(ROOT / "proto").rglob("*.proto"),
    ]
    pages = (ROOT / "docs").rglob("*.md")
    files += [*pages, *(ROOT / "deploy").rglob("*.y*ml"), *(ROOT / "deploy").rglob("*.json")]
    pages = {str(path.relative_to(ROOT)): path.read_text() for path in files}
    return {**pages, "cli": cli_page(), "settings": settings_page()}


def found(text):
    """What is to be said otherwise; a long text without any is passed over by one search."""
    if not ANY.search(text):
        return []
    return [
        f"line {number}: {match[0]!r} -> {better}"
        for number, line in enumerate(text.splitlines(), 1)
        for pattern, better in BETTER.items()
        for match in re.finditer(pattern, line, re.IGNORECASE)
    ]


def wrong_lines():
    """Place and finding of each line of the sources, their names taken apart, that is wrong."""
    for folder in ("eplb_core", "eplb_lab", "eplb_service", "worker_agent", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            place = path.relative_to(ROOT)
            about_texts = place.parts[:2] in (("tests", "docs"), ("tests", "tools"))
            if not ("generated" in path.parts or about_texts or str(place) == OTHERS_NAMES):
                text = path.read_text().replace("stand_in", "").replace("_", " ")
                yield from (f"{place}, {wrong}" for wrong in found(text))


@pytest.mark.parametrize(("name", "text"), texts().items())
def test_a_page_uses_the_glossary_s_terms(name, text):
    assert found(text) == []


def test_sources_use_the_glossary_s_terms():
    assert list(wrong_lines()) == []


def test_the_terms_that_are_refused_are_found():
    text = (
        "It can not tell.\nTwo slots a rank stand in place of a copy of an expert, anew;\n"
        "one each CPU; in words; unrest."
    )
    assert {line.rpartition("-> ")[2] for line in found(text)} == set(BETTER.values())
