"""Docs, deployment files, help texts and the packages' own texts use the glossary's terms and plain English."""

import io
import re
import tokenize
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
    return {str(path.relative_to(ROOT)): path.read_text() for path in files}


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


def tokens_of_sources():
    """Tokens of the packages, their tests and benchmarks, by place; of files in which nothing is found, none."""
    for folder in ("eplb_service", "worker_agent", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            place, text = path.relative_to(ROOT), path.read_text()
            about_texts = place.parts[:2] in (("tests", "docs"), ("tests", "tools"))
            if "generated" not in path.parts and not about_texts and found(text.replace("_", " ")):
                for token in tokenize.generate_tokens(io.StringIO(text).readline):
                    yield f"{place}:{token.start[0]}", token


def texts_of_sources():
    """Docstrings, comments, messages and all other strings, by place."""
    for place, token in tokens_of_sources():
        if token.type in (tokenize.STRING, tokenize.COMMENT) or "FSTRING" in tokenize.tok_name[token.type]:
            yield place, token.string


def names_of_sources():
    """All names, as text, by place."""
    for place, token in tokens_of_sources():
        if (
            token.type == tokenize.NAME
            and "stand_in" not in token.string
            and not place.startswith(OTHERS_NAMES)
        ):
            yield place, token.string.replace("_", " ")


@pytest.mark.parametrize("name", texts())
def test_a_page_uses_the_glossary_s_terms(name):
    assert found(texts()[name]) == []


@pytest.mark.parametrize("page", [cli_page, settings_page])
def test_help_uses_the_glossary_s_terms(page):
    assert found(page()) == []


def test_sources_use_the_glossary_s_terms():
    assert [(place, wrong) for place, text in texts_of_sources() for wrong in found(text)] == []


def test_names_use_the_glossary_s_terms():
    names = {name: place for place, name in names_of_sources()}
    assert [(place, wrong) for name, place in names.items() for wrong in found(name)] == []


def test_the_terms_that_are_refused_are_found():
    text = (
        "It can not tell.\nTwo slots a rank stand in place of a copy of an expert, anew;\n"
        "one each CPU; in words; unrest."
    )
    assert {line.rpartition("-> ")[2] for line in found(text)} == set(BETTER.values())
